"""A command for one GPU, checked before it is started."""

from __future__ import annotations

import ast
import sys

import pytest

from wanshim.errors import FeatureUnavailable
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
