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
