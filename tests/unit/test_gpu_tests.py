"""`make gpu-tests` writes what ran, and takes a run that shows nothing for a failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import checkout
from tests import gpu_tests

MACHINE = {"gpu": "NVIDIA H200", "gpus": 2, "driver": "1.2.3", "torch": "2.15.0"}
MIXED = """
import pytest

pytestmark = pytest.mark.gpu(1)

def test_holds(): pass

def test_breaks(): assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="needs 4 CUDA devices, 2 here")
def test_needs_four(): pass
"""
SKIPPED = """
import pytest

@pytest.mark.gpu(4)
@pytest.mark.skip(reason="needs 4 CUDA devices, 2 here")
def test_needs_four(): pass

def test_without_gpu(): pass
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs files of tests in a checkout of their own, on a machine that claims two GPUs: status and record."""
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "environment", lambda: dict(MACHINE))
    monkeypatch.setenv("WANSHIM_COMMIT", "c0ffee-dirty")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu(count): needs them\n")

    def start(*arguments: str, **modules: str) -> tuple[int, dict[str, Any]]:
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
        status = gpu_tests.main([str(tmp_path), "--out", str(tmp_path / "out"), *arguments])
        return status, json.loads((tmp_path / "out" / "gpu_tests_2xH200.json").read_text())

    return start


def test_record_holds_each_outcome_with_its_reason_and_where_it_ran(run: Any, tmp_path: Path) -> None:
    status, record = run(test_mixed=MIXED, test_skipped=SKIPPED)
    assert status == 1
    assert {test["test"]: test["outcome"] for test in record["tests"]} == {
        "test_mixed.py::test_holds": "passed",
        "test_mixed.py::test_breaks": "failed",
        "test_mixed.py::test_needs_four": "skipped",
        "test_skipped.py::test_needs_four": "skipped",
    }
    assert record["outcomes"] == {"failed": 1, "passed": 1, "skipped": 2}
    reasons = {test["test"]: test.get("reason") for test in record["tests"]}
    assert reasons["test_mixed.py::test_needs_four"] == "needs 4 CUDA devices, 2 here"
    assert "one is not two" in reasons["test_mixed.py::test_breaks"]
    assert all(test["seconds"] >= 0 for test in record["tests"])
    assert record | MACHINE | {"commit": "c0ffee", "clean": False} == record
    report = (tmp_path / "out" / record["junit"]).read_text()
    assert report.count("<testcase ") == 4
    assert str(tmp_path) not in report
    assert "hostname" not in report


def test_run_in_which_all_is_skipped_fails_and_says_so(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, record = run(test_skipped=SKIPPED)
    assert status == 1
    assert record["outcomes"] == {"skipped": 1}
    assert "no test passed" in capsys.readouterr().out


@pytest.mark.slow
def test_file_that_cannot_be_collected_and_one_that_does_not_end_are_errors(run: Any) -> None:
    waits = "import pytest, time\n\n@pytest.mark.gpu(1)\ndef test_waits(): time.sleep(600)\n"
    status, record = run("--limit", "5", test_broken="import none_such  # mark.gpu(1)\n", test_waits=waits)
    assert status == 1
    errors = {test["test"]: test["reason"] for test in record["tests"] if test["outcome"] == "error"}
    assert "did not end within 5 s" in errors["test_waits.py"]
    assert any(test.startswith("test_broken.py") for test in errors)


def test_without_a_gpu_nothing_runs_and_the_message_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 0), __version__="2.15.0")
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu_tests.main([])


def test_every_file_of_the_gpu_folder_is_run() -> None:
    chosen = gpu_tests.files([gpu_tests.ROOT / "tests"])
    assert {file.relative_to(gpu_tests.ROOT) for file in (gpu_tests.ROOT / "tests/gpu").rglob("test_*.py")} <= {*chosen}
    assert Path("tests/contract/diffsynth/test_split_pipeline.py") in chosen


def test_state_of_a_checkout_is_its_commit_and_whether_a_file_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    assert checkout.state() == {"commit": None, "clean": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert checkout.state() == {"commit": commit, "clean": True}
    record = tmp_path / "benchmarks" / "results" / "a.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    assert checkout.state() == {"commit": commit, "clean": True}
    (tmp_path / "new.py").write_text("")
    assert checkout.state() == {"commit": commit, "clean": False}
    monkeypatch.setenv("WANSHIM_COMMIT", "c0ffee")
    assert checkout.state() == {"commit": "c0ffee", "clean": True}
