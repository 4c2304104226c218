"""The smallest video of the tiny checkpoint."""

from __future__ import annotations

VIDEO = {"height": 32, "width": 48, "num_frames": 5, "use_gradient_checkpointing": True}
