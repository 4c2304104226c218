"""FastVideo's training methods, and where a prompt's embedding comes from."""

from __future__ import annotations

import re
from typing import Any

METHODS = "fastvideo.train.methods"


def origins(reports: list[dict[str, Any]]) -> list[str]:
    """How each rank came by the embeddings, from its report."""
    notes = [note for report in reports for row in report["features"] for note in row["notes"]]
    found = [re.search(r": (encoded|waited|cache|per_rank), [0-9.]+ s$", note) for note in notes]
    return sorted(match[1] for match in found if match)


def training_method(name: str, model: Any) -> Any:
    """A training method as its constructor leaves it, without optimizers and data."""
    import importlib

    import torch

    module, kind = name.rsplit(".", 1)
    method = getattr(importlib.import_module(module), kind).__new__(getattr(importlib.import_module(module), kind))
    torch.nn.Module.__init__(method)
    method.student, method.training_config, method._role_models = model, model.training_config, {"student": model}
    return method
