"""What runs in CI is what was reviewed: a tag of an action can be moved, a commit cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests import dist, release
from wanshim.select.matrix import load

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


def test_release_is_built_once_used_on_every_promised_python_attested_and_published_without_a_secret() -> None:
    text = (WORKFLOWS[0].parent / "release.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert "secrets." not in text
    assert workflow["permissions"] == {"contents": "read"}
    assert (publish["needs"], publish["environment"], publish["permissions"]) == (
        "build",
        "pypi",
        {"id-token": "write"},
    )
    runs = " ".join(step.get("run", "") for step in build["steps"])
    assert f'make dist PYTHONS="{" ".join(dist.promised())}"' in runs
    used = [step["uses"].partition("@")[0] for job in (build, publish) for step in job["steps"] if "uses" in step]
    order = ["actions/attest-build-provenance", "actions/attest-sbom", "pypa/gh-action-pypi-publish"]
    assert [name for name in used if name in order] == order
    assert "build" not in " ".join(step.get("run", "") for step in publish["steps"])


@pytest.mark.parametrize(
    ("tag", "head", "fault"),
    [
        ("v{version}", "## {version} (2026-12-01)", ""),
        ("v9.9.9", "## {version} (2026-12-01)", "the tag is v9.9.9 and the source is v{version}"),
        ("v{version}", "## {version} (not yet published)", "CHANGELOG.md begins with '{version} (not yet published)'"),
        ("v{version}", "## 0.0.1 (2026-12-01)", "CHANGELOG.md begins with '0.0.1 (2026-12-01)'"),
    ],
)
def test_tag_that_is_not_the_version_of_source_and_changelog_is_not_released(tag: str, head: str, fault: str) -> None:
    version = dist.version()
    found = release.fault(tag.format(version=version), f"# Changes\n\n{head.format(version=version)}\n\n- It works.\n")
    assert found.startswith(fault.format(version=version))
    assert bool(found) is bool(fault)


def test_every_python_that_is_promised_is_run_by_a_workflow() -> None:
    promised = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()))
    jobs = yaml.safe_load((WORKFLOWS[0].parent / "checks.yml").read_text(encoding="utf-8"))["jobs"]
    run = {name.removeprefix("python-") for name in jobs["environment"]["strategy"]["matrix"]["name"]}
    [setup] = [step["with"] for step in jobs["test"]["steps"] if "python-version" in step.get("with", {})]
    assert len(promised) > 3
    assert promised <= run | {setup["python-version"]}


def test_the_scan_of_every_week_reads_every_framework_of_the_matrix() -> None:
    text = (WORKFLOWS[0].parent / "weekly-matrix.yml").read_text(encoding="utf-8")
    commands = re.findall(r"run: python tools/matrix\.py (missing|scan|verify)( --check)? (.*)", text)
    assert [command for command, _, _ in commands] == ["missing", "scan", "verify"]
    frameworks = {row.framework for row in load().rows}
    assert [frameworks - {*names.replace("-", "_").split()} for _, _, names in commands] == [set()] * 3


def test_tools_that_judge_a_change_are_pinned() -> None:
    tools = [
        line.partition(";")[0] for line in (ROOT / "tests/constraints.txt").read_text().splitlines() if line[0] != "#"
    ]
    assert len(tools) > 5
    assert [tool for tool in tools if not re.fullmatch(r"[\w-]+==[\d.]+\s*", tool)] == []
