"""The core that splits models knows none by name: what is particular to one is a table in an adapter."""

from __future__ import annotations

import re
from pathlib import Path

from wanshim import core

CORE = Path(core.__file__).parent
ROOMS = ("model_split", "offload", "pipeline", "shared", "strategy", "streaming")
NAMES = re.compile(r"\b(wan|wan_?\w*dit|flux|flux_?2\w*|dit2|vace\d?|single_transformer_blocks)\b", re.IGNORECASE)


def test_core_names_no_model() -> None:
    files = [path for room in ROOMS for path in sorted((CORE / room).rglob("*.py"))]
    assert len(files) > 30
    found = [f"{path.name}: {match.group()}" for path in files for match in NAMES.finditer(path.read_text("utf-8"))]
    assert found == []


def test_names_would_be_found_where_they_are() -> None:
    table = CORE.parents[1] / "adapters" / "diffsynth" / "splitting" / "flux2.py"
    assert {match.group().lower() for match in NAMES.finditer(table.read_text("utf-8"))} > {"flux2dit"}
