"""What `make mutants` breaks: its rooms exist, run every week, and each survivor that is written down has a reason."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
MUTANTS = ROOT / "tests/mutants"
RESULTS = sorted((MUTANTS / "results").glob("*.yaml"))
NO_REASON = "none given yet"


def rooms() -> dict[str, dict[str, list[str]]]:
    toml = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    found: dict[str, dict[str, list[str]]] = toml.loads((MUTANTS / "rooms.toml").read_text(encoding="utf-8"))["rooms"]
    return found


def test_every_room_names_code_and_tests_that_exist() -> None:
    missing = [
        path for room in rooms().values() for path in room["paths"] + room["tests"] if not (ROOT / path).exists()
    ]
    assert missing == []


def test_every_room_is_broken_once_a_week() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/weekly-mutants.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["mutants"]["strategy"]["matrix"]["room"] == list(rooms())


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_counts_its_survivors_and_each_has_a_reason(path: Path) -> None:
    result = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert result["room"] == path.stem
    assert path.stem in rooms()
    assert result["mutants"] - result["killed"] == len(result["survivors"])
    assert [one for one in result["survivors"] if one["reason"] == NO_REASON] == []


def test_make_refuses_the_shells_variable_as_the_name_of_a_room() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make")
    found = subprocess.run(
        [make, "-n", "mutants", "PATH=offload"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode != 0
    assert "make mutants ROOM=offload" in found.stderr
