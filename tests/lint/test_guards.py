"""mypy, import-linter and ruff see adapters and tools: each reports a fault planted in a copy of the checkout.

The lint environment runs this file; the other test environments do not have the tools.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ADAPTER = "adapters/diffsynth/planted.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the code and of the tools' settings."""
    for name in ("wanshim", "adapters", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def reports(checkout: Path, *command: str) -> list[str]:
    """The lines that a tool of this environment prints for a fault; none if it finds nothing."""
    tool = str(Path(sys.executable).with_name(command[0]))
    done = subprocess.run([tool, *command[1:]], cwd=checkout, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


def test_mypy_reports_wrong_calls_in_an_adapter_once_each(checkout: Path) -> None:
    faults = {
        "from wanshim.undo import Undo; Undo().add(1)": "[arg-type]",
        "from wanshim.core.strategy import TrainingPlan; TrainingPlan(1)": "[call-arg]",
        "from wanshim.adapters.diffsynth.training_road import TrainingCall; TrainingCall(1)": "[call-arg]",
        "from wanshim.adapters.diffsynth import no_such_module": "[attr-defined]",
        "from wanshim.adapters.diffsynth.nowhere import name": "[import-not-found]",
    }
    (checkout / ADAPTER).write_text("\n".join(faults) + "\n")
    (checkout / "tools/planted.py").write_text("from wanshim.undo import Undo; Undo().add(1)\n")
    if (ROOT / ".mypy_cache").is_dir():  # of the environment's own run: it need not check again what is not planted
        shutil.copytree(ROOT / ".mypy_cache", checkout / ".mypy_cache")
    found = [line for line in reports(checkout, "mypy", "wanshim", "tools") if "error:" in line]
    for number, fault in enumerate(faults.values(), 1):
        assert [line for line in found if line.startswith(f"wanshim/{ADAPTER}:{number}:") and fault in line], found
    assert [line for line in found if line.startswith("tools/planted.py:1:") and "[arg-type]" in line], found
    assert len(found) == len(set(found))
    assert not [line for line in found if line.startswith("adapters/")], "read a second time, by its other path"


def test_import_linter_reports_each_forbidden_import_of_and_by_an_adapter_and_of_a_tool(checkout: Path) -> None:
    assert reports(checkout, "lint-imports", "--no-cache") == []
    (checkout / ADAPTER).write_text(
        "from wanshim import activation\nfrom wanshim.adapters.fastvideo import conditioning\n"
    )
    (checkout / "wanshim/demo/planted.py").write_text("import wanshim.adapters.diffsynth.patchify\n")
    (checkout / "wanshim/cli/planted.py").write_text("from tools import drift\n")
    (checkout / "wanshim/core/planted.py").write_text("from wanshim.adapters import diffsynth\n")
    found = " ".join(" ".join(reports(checkout, "lint-imports", "--no-cache")).split())
    for fault in (
        "adapters know core and patching, not the machinery above them BROKEN",
        "adapters never import each other BROKEN",
        "nobody imports an adapter by name BROKEN",
        "wanshim.adapters.diffsynth.planted -> wanshim.activation (l.1)",
        "wanshim.adapters.diffsynth.planted -> wanshim.adapters.fastvideo.conditioning (l.2)",
        "wanshim.demo.planted -> wanshim.adapters.diffsynth.patchify (l.1)",
        "wanshim.core.planted -> wanshim.adapters.diffsynth (l.1)",
        "wanshim.cli.planted -> tools.drift (l.1)",
    ):
        assert fault in found, found


def test_ruff_sorts_adapters_with_the_rest_of_wanshim(checkout: Path) -> None:
    imports = (
        "from rich import print\n\nfrom wanshim.adapters.diffsynth import patchify\nfrom wanshim.undo import Undo\n"
    )
    ruff = ("ruff", "check", "--no-cache", "--select", "I001", ADAPTER)
    (checkout / ADAPTER).write_text(imports)
    assert reports(checkout, *ruff) == []
    (checkout / ADAPTER).write_text(imports.replace("\nfrom wanshim.undo", "\n\nfrom wanshim.undo"))
    assert [each for each in reports(checkout, *ruff) if "I001" in each]


def test_ruff_reads_an_adapter_once(checkout: Path) -> None:
    (checkout / ADAPTER).write_text("import os\n")
    assert "Found 1 error." in reports(checkout, "ruff", "check", "--no-cache", "--select", "F401", ".")
