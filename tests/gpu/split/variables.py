"""Variables of ranks that train on GPUs."""

from __future__ import annotations

ON_GPU = {"ON_GPU": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
