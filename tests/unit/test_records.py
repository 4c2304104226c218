"""A number in a document leads to its record, and the record to a commit of this repository."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RECORDS = sorted(RESULTS.glob("*.json"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = re.compile(r"benchmarks/results/([\w.*{},-]+\.(?:json|xml))")
HASH = r"[0-9a-f]{7,40}"


def commits(record: Any) -> Iterator[str]:
    """Of a record and of all its parts."""
    if isinstance(record, dict):
        yield from [record["commit"]] if "commit" in record else []
        record = list(record.values())
    if isinstance(record, list):
        for part in record:
            yield from commits(part)


def unknown(named: set[str], history: list[str]) -> list[str]:
    return sorted(name for name in named if not any(commit.startswith(name) for commit in history))


def files(pattern: str) -> list[str]:
    """`a_{1,2}.json` as a shell takes it."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    odd = [choices if i % 2 else [",".join(choices)] for i, choices in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*odd)]


@pytest.fixture(scope="module")
def history() -> list[str]:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)

    shallow = git("rev-parse", "--is-shallow-repository")
    if shallow.returncode or not (ROOT / ".git").exists():
        pytest.skip("no git checkout here, so no history to look commits up in")
    if shallow.stdout.strip() != "false":
        pytest.skip("a shallow clone has no history to look commits up in")
    return git("rev-list", "HEAD").stdout.split()


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_commits_of_a_record_are_in_the_history(path: Path, history: list[str]) -> None:
    named = {*commits(json.loads(path.read_text(encoding="utf-8")))}
    assert named
    assert all(re.fullmatch(HASH, commit) for commit in named)
    assert unknown(named, history) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_measurements_in_a_document_name_commits_of_the_history_and_records_that_exist(
    path: Path, history: list[str]
) -> None:
    text = path.read_text(encoding="utf-8")
    assert [name for found in NAMED.findall(text) for name in files(found) if not [*RESULTS.glob(name)]] == []
    measured = [paragraph for paragraph in text.split("\n\n") if "benchmarks/" in paragraph]
    sentences = re.findall(rf"\bcommits? ({HASH}(?:(?:,| and) {HASH})*)", "\n".join(measured))
    assert unknown({commit for said in sentences for commit in re.findall(HASH, said)}, history) == []


def test_commit_that_is_not_in_the_history_is_found() -> None:
    record = {"commit": "aaaaaaa", "rows": [{"commit": "bbbbbbb"}]}
    assert unknown({*commits(record)}, ["aaaaaaa" + "0" * 33]) == ["bbbbbbb"]


def test_names_in_braces_are_one_file_each() -> None:
    assert files("a_{1,2}x{3,4}.json") == ["a_1x3.json", "a_1x4.json", "a_2x3.json", "a_2x4.json"]


def test_record_of_tests_on_gpus_holds_every_test_and_where_it_ran() -> None:
    for path in RESULTS.glob("gpu_tests_*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["tests"]
        assert all({"test", "outcome", "seconds"} <= test.keys() for test in record["tests"])
        assert {"gpu", "gpus", "driver", "torch", "commit", "clean", "command", "date"} <= record.keys()
        assert (RESULTS / record["junit"]).is_file()
