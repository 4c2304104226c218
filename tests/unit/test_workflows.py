"""What runs in CI is what was reviewed: a tag of an action can be moved, a commit cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from wanshim.matrix import load

ROOT = Path(__file__).parent.parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
OF_THIS_REPOSITORY = re.compile(r"\./")
PINNED = re.compile(r"[\w.-]+(/[\w.-]+)+@[0-9a-f]{40} # v\d+(\.\d+){2}")


def unpinned(text: str) -> list[str]:
    used = re.findall(r"^\s*(?:-\s+)?uses:\s*(.+?)\s*$", text, re.MULTILINE)
    return [action for action in used if not OF_THIS_REPOSITORY.match(action) and not PINNED.fullmatch(action)]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_with_their_release_beside_it(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    assert "uses:" in text
    assert unpinned(text) == []


@pytest.mark.parametrize(
    "used", ["actions/checkout@v4", "actions/checkout@v4.4.0", "actions/checkout@11d5960a # v4.4.0"]
)
def test_tag_or_short_hash_is_found(used: str) -> None:
    assert unpinned(f"steps:\n  - uses: {used}\n") == [used]


def test_every_environment_that_a_workflow_names_is_one_of_tox() -> None:
    text = (WORKFLOWS[0].parent / "checks.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    named = {*jobs["environment"]["strategy"]["matrix"]["name"]}
    named |= {entry["row"] for entry in jobs["contract-kit"]["strategy"]["matrix"]["include"]}
    rows = {row.tox_environment: row.framework for row in load().rows}
    across = set(re.findall(r'^    "([\w.-]+)": \(', (ROOT / "toxfile.py").read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= rows.keys() | across
    assert {rows[name] for name in named & rows.keys()} == {"diffsynth", "diffusers", "fastvideo", "vllm_omni"}


def test_every_python_that_is_promised_is_run_by_a_workflow() -> None:
    promised = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()))
    jobs = yaml.safe_load((WORKFLOWS[0].parent / "checks.yml").read_text(encoding="utf-8"))["jobs"]
    run = {name.removeprefix("python-") for name in jobs["environment"]["strategy"]["matrix"]["name"]}
    [setup] = [step["with"] for step in jobs["test"]["steps"] if "python-version" in step.get("with", {})]
    assert len(promised) > 3
    assert promised <= run | {setup["python-version"]}


def test_the_scan_of_every_week_reads_every_framework_of_the_matrix() -> None:
    text = (WORKFLOWS[0].parent / "weekly-matrix.yml").read_text(encoding="utf-8")
    commands = re.findall(r"run: wanshim matrix (missing|scan|verify)( --check)? (.*)", text)
    assert [command for command, _, _ in commands] == ["missing", "scan", "verify"]
    frameworks = {row.framework for row in load().rows}
    assert [frameworks - {*names.replace("-", "_").split()} for _, _, names in commands] == [set()] * 3


def test_tools_that_judge_a_change_are_pinned() -> None:
    tools = [
        line.partition(";")[0] for line in (ROOT / "tests/constraints.txt").read_text().splitlines() if line[0] != "#"
    ]
    assert len(tools) > 5
    assert [tool for tool in tools if not re.fullmatch(r"[\w-]+==[\d.]+\s*", tool)] == []
