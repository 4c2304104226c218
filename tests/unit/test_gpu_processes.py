"""A command for one GPU, checked before it is started."""

from __future__ import annotations

import ast
import sys

import pytest

from wanshim.errors import FeatureUnavailable, SettingInvalid, WanshimError
from wanshim.launch.gpu_processes import settings_of_generation, settings_of_ranks
from wanshim.patching.probe import SourceTree

COMMAND = [sys.executable, "generate.py"]


@pytest.fixture
def _without_diffsynth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SourceTree, "of_installed", lambda name: SourceTree(name, None))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.usefixtures("_without_diffsynth")
def test_program_of_another_framework_runs_on_one_gpu_and_is_told_the_command_that_generates(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert settings_of_ranks(COMMAND, 1, None).local_world_size == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "no package diffsynth is installed here; the program runs with the other features" in said
    assert "wanshim generate --gpus N" in said


@pytest.mark.usefixtures("_without_diffsynth")
def test_several_processes_are_not_started_for_it() -> None:
    with pytest.raises(FeatureUnavailable, match="no package diffsynth is installed here"):
        settings_of_ranks(COMMAND, 2, None)


@pytest.mark.usefixtures("_without_diffsynth")
def test_strict_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    with pytest.raises(FeatureUnavailable, match="no package diffsynth is installed here"):
        settings_of_ranks(COMMAND, 1, None)


def test_files_of_one_framework_are_read_where_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    read: set[str] = set()
    parse = SourceTree.tree

    def tree(self: SourceTree, module: str) -> ast.Module | None:
        read.add(self.package)
        return parse(self, module)

    monkeypatch.setattr(SourceTree, "tree", tree)
    here = {name for name in ("diffsynth", "diffusers") if SourceTree.of_installed(name).root is not None}
    if not here:
        pytest.skip("neither of them is installed")
    assert settings_of_generation(COMMAND, 2, None).generate is not None
    assert len(read) == 1
    assert read <= here


@pytest.mark.parametrize(("present", "count"), [(1, 2), (0, 1)])
def test_fewer_gpus_in_sight_are_said(present: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wanshim.core.shared.gpus.in_sight", lambda visible: present)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    for settings_of in (settings_of_ranks, settings_of_generation):
        with pytest.raises(SettingInvalid, match=f"--gpus {count} with {present} GPUs in sight"):
            settings_of(COMMAND, count, None)


def test_more_gpus_in_sight_are_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wanshim.core.shared.gpus.in_sight", lambda visible: 4)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with pytest.raises(FeatureUnavailable, match="no selected feature runs a pipeline on several GPUs"):
        settings_of_generation(COMMAND, 2, "none")


def test_groups_of_a_sequence_take_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("WANSHIM_PLAN", "sequence:2")
    with pytest.raises(SettingInvalid, match="--gpus 3 and WANSHIM_PLAN=sequence:2"):
        settings_of_ranks(COMMAND, 3, "none")
    with pytest.raises(FeatureUnavailable, match="no selected feature carries such a plan out"):
        settings_of_ranks(COMMAND, 4, "none")


def test_fast_asks_for_a_feature_that_is_faster_where_something_is_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    if SourceTree.of_installed("diffusers").root is None:
        pytest.skip("diffusers is not installed")
    only = "none,diffusers.generate"
    assert settings_of_generation(COMMAND, 2, only).generate is not None
    with pytest.raises(FeatureUnavailable, match="--fast, and no selected feature makes a forward"):
        settings_of_generation(COMMAND, 2, only, fast=True)
    monkeypatch.setenv("WANSHIM_COMPILE", "off")
    monkeypatch.setenv("WANSHIM_COMPUTE", "off")
    assert settings_of_generation(COMMAND, 2, only, fast=True).generate is not None


@pytest.mark.parametrize("command", ["deepspeed train.py", "python -m deepspeed.launcher train.py", "bash train.sh"])
def test_what_starts_processes_itself_is_not_started_for_each_gpu(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(WanshimError, match=r"which starts processes itself|a shell script, would run each"):
        settings_of_ranks(command.split(), 2, "none")
