"""`doctor` names the processes that wanshim would not reach, and stays quiet where it reaches all."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from wanshim import settings
from wanshim.doctor import diagnosis, process_coverage
from wanshim.doctor.process_coverage import TABLE, Environment, findings

SOUND = Environment(
    variables={"VLLM_PLUGINS": "other,wanshim"},
    versions={"vllm": "0.24.1", "vllm_omni": "0.24.0"},
    stage_process="load_omni_general_plugins()",
)
FAULTS = {
    "vllm_plugins_hides_wanshim": replace(SOUND, variables={"VLLM_PLUGINS": "other"}),
    "vllm_of_another_release": replace(SOUND, versions={"vllm": "0.25.0", "vllm_omni": "0.24.0"}),
    "stage_process_loads_no_plugins": replace(SOUND, stage_process="class StageDiffusionProc: ..."),
    "user_site_is_off": replace(SOUND, variables={"PYTHONNOUSERSITE": "1"}, in_user_site=True),
    "ray_workers_have_no_hook": replace(SOUND, ray_cluster="10.0.0.1:6379"),
    "interpreter_skips_sitecustomize": replace(SOUND, skipping_option="-I"),
}


def test_sound_surroundings_give_no_finding() -> None:
    assert findings(SOUND) == ()


def test_every_finding_of_the_table_has_a_case() -> None:
    assert FAULTS.keys() == TABLE.keys()


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_alone_and_with_advice(name: str) -> None:
    (finding,) = findings(FAULTS[name])
    assert (finding.name, finding.advice) == (name, TABLE[name][1])


def test_empty_vllm_plugins_hides_all_plugins() -> None:
    assert [f.name for f in findings(replace(SOUND, variables={"VLLM_PLUGINS": ""}))] == ["vllm_plugins_hides_wanshim"]


def test_vllm_plugins_without_vllm_omni_is_no_finding() -> None:
    assert findings(Environment(variables={"VLLM_PLUGINS": "other"})) == ()


@pytest.mark.parametrize("strict", ["0", "1"])
def test_doctor_fails_under_strict_where_a_process_is_not_reached(monkeypatch: pytest.MonkeyPatch, strict: str) -> None:
    monkeypatch.setattr("wanshim.doctor.process_coverage.here", lambda: FAULTS["vllm_plugins_hides_wanshim"])
    monkeypatch.setenv("WANSHIM_STRICT", strict)
    assert diagnosis.examine(settings.read(), "none").is_well is (strict == "0")


def test_doctor_carries_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wanshim.doctor.process_coverage.here", lambda: FAULTS["vllm_plugins_hides_wanshim"])
    assert [f.name for f in diagnosis.examine(settings.read(), "none").unreached] == ["vllm_plugins_hides_wanshim"]
    monkeypatch.setenv("WANSHIM_DISABLE", "1")
    assert diagnosis.examine(settings.read()).unreached == ()


@pytest.mark.parametrize(
    ("hook", "named"),
    [("wanshim.launch.boot.plugin.activate_in_worker", False), ("my.module.setup", True)],
    ids=["wanshims", "anothers"],
)
def test_ray_hook_counts_just_where_it_is_wanshims(hook: str, named: bool) -> None:
    config = f'{{"runtime_env": {{"worker_process_setup_hook": "{hook}"}}}}'
    variables = {"RAY_JOB_CONFIG_JSON_ENV_VAR": config}
    found = findings(replace(SOUND, ray_cluster="10.0.0.1:6379", variables=variables))
    assert [finding.name for finding in found] == ["ray_workers_have_no_hook"] * named


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: path.write_text("10.0.0.1:6379\n"), "10.0.0.1:6379"),
        (lambda path: path.write_bytes(b"\x1b]0;title\x07\xff10.0.0.1\n\x1b[2J"), "]0;title10.0.0.1"),
        (lambda path: path.write_text("1" * 10**6), "1" * 256),
        (os.mkfifo, ""),
        (lambda path: path.symlink_to("/etc/hostname"), ""),
        (lambda path: path.mkdir(), ""),
        (lambda path: None, ""),
    ],
    ids=["address", "escapes", "endless", "pipe", "link", "folder", "none"],
)
def test_ray_cluster_of_a_file_that_anybody_could_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], found: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(process_coverage, "RAY_CURRENT_CLUSTER", tmp_path / "cluster")
    make(tmp_path / "cluster")
    assert process_coverage._ray_cluster() == found
