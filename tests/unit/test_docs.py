"""What documents say of the matrix and of features is what the matrix and the adapters say."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from wanshim.catalog import discover
from wanshim.matrix import load
from wanshim.patching import Kind

ROOT = Path(__file__).parent.parent.parent
IGNORED = shutil.ignore_patterns("__pycache__", "images")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("generate")


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "docs" / "generate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the documents are made from."""
    for name in ("wanshim", "adapters", "docs", "benchmarks/results", "tests/mutants"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=IGNORED)
    for name in ("README.md", "compat_matrix.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_documents_are_those_that_the_matrix_and_the_adapters_make() -> None:
    result = run(ROOT, "--check")
    assert result.returncode == 0, f"run `make docs`:\n{result.stdout}{result.stderr}"


def test_stale_table_is_noticed(generate: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    assert generate.render(text.replace("| patch |", "| native |", 1), load()) == text


def test_stale_missing_and_left_over_page_are_noticed_and_mended(checkout: Path) -> None:
    pages = checkout / "docs" / "features"
    before = {path.name: path.read_text() for path in pages.iterdir()}
    (pages / "diffsynth.patchify.md").write_text("stale\n")
    (pages / "diffsynth.model_split.md").unlink()
    (pages / "diffsynth.gone.md").write_text("of a feature that is gone\n")
    result = run(checkout, "--check")
    assert result.returncode == 1, result.stderr
    for name in ("patchify", "model_split", "gone"):
        assert f"--- docs/features/diffsynth.{name}.md" in result.stdout
    assert run(checkout).returncode == 0
    assert {path.name: path.read_text() for path in pages.iterdir()} == before


def test_changed_ledger_makes_its_page_stale(checkout: Path) -> None:
    adapter = checkout / "adapters" / "diffsynth" / "patchify.py"
    adapter.write_text(adapter.read_text().replace('remove_when="', 'remove_when="never: '))
    result = run(checkout, "--check")
    assert result.returncode == 1
    assert "+- remove when: never: " in result.stdout


def test_changed_measurement_makes_the_tables_of_its_page_stale_and_names_a_missed_aim(checkout: Path) -> None:
    path = checkout / "benchmarks" / "results" / "vae_decode_2.1.json"
    record = json.loads(path.read_text())
    for row in record["rows"]:
        if row["arm"] == "vLLM-Omni 0.30 tile executor" and row["ranks"] == 4:
            row["seconds"] = 0.001
    path.write_text(json.dumps(record))
    result = run(checkout, "--check")
    assert result.returncode == 1
    assert "--- docs/vae_decode.md" in result.stdout
    assert "+| vLLM-Omni 0.30 tile executor | 4 | 0.001 |" in result.stdout
    ratios = next(
        line for line in result.stdout.splitlines() if line.startswith("+| vLLM-Omni's tile executor | 1.8 |")
    )
    assert " | **0.00** / " in ratios


def test_record_of_tests_on_gpus_has_its_line_and_says_that_files_differed(checkout: Path) -> None:
    record = {"gpus": 2, "gpu": "NVIDIA H200", "outcomes": {"passed": 40, "skipped": 3, "error": 1}, "torch": "2.11.0"}
    record |= {"driver": "580.1", "date": "2026-11-22T15:00:00+00:00", "commit": "c0ffee" + "0" * 34, "clean": False}
    (checkout / "benchmarks" / "results" / "gpu_tests_2xH200.json").write_text(json.dumps(record))
    assert run(checkout).returncode == 0
    said = (checkout / "docs" / "reliability.md").read_text()
    assert (
        "\n| 2 x NVIDIA H200 | 40 | 3 | 1 | 2.11.0 | 580.1 | 2026-11-22 | c0ffee0 (with changes) | [gpu_tests_2x"
        in said
    )


def test_every_feature_has_a_page_with_the_ledger_of_every_seam() -> None:
    features = discover().features.values()
    assert features
    for feature in features:
        page = (ROOT / "docs" / "features" / f"{feature.name}.md").read_text()
        for seam in feature.seams:
            for said in (seam.module, seam.qualname, seam.why, seam.upstream, seam.remove_when):
                assert said in page
            assert seam.kind is not Kind.CLOSURE or f"- a closure because: {seam.closure_because}" in page
        for row in load().of(feature.framework):
            if feature.ability in row.cells:
                assert f"\n| {row.version} | {row.cells[feature.ability].verdict.value} | " in page


def test_links_of_documents_lead_to_files() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    links = [(path, link) for path in documents for link in LINK.findall(path.read_text())]
    assert any(link == "docs/features/diffsynth.patchify.md" for _, link in links)
    assert [f"{path.name}: {link}" for path, link in links if not (path.parent / link).exists()] == []


def test_every_promise_of_the_reliability_page_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    written = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    named = set(re.findall(r"::(test_\w+\*?)", text))
    assert len(named) > 150
    assert [name for name in named if f"def {name.removesuffix('*')}" not in written] == []
    assert [file for file in set(re.findall(r"tests/[\w/]+\.py", text)) if not (ROOT / file).is_file()] == []
