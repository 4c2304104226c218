"""The core that splits models knows none by name: what is particular to one is a table in an adapter."""

from __future__ import annotations

import re
from pathlib import Path

from wanshim.core import placement

FOLDER = Path(placement.__file__).parent
NAMES = re.compile(r"\b(wan|wan_?\w*dit|flux|flux_?2\w*|dit2|vace\d?|single_transformer_blocks)\b", re.IGNORECASE)


def test_core_names_no_model() -> None:
    files = sorted(FOLDER.rglob("*.py"))
    assert len(files) > 8
    found = [f"{path.name}: {match.group()}" for path in files for match in NAMES.finditer(path.read_text("utf-8"))]
    assert found == []


def test_names_would_be_found_where_they_are() -> None:
    table = FOLDER.parents[2] / "adapters" / "diffsynth" / "flux2_placement.py"
    assert {match.group().lower() for match in NAMES.finditer(table.read_text("utf-8"))} > {"flux2dit"}
