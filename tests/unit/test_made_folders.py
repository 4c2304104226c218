"""A folder that the program makes is made once by all ranks of a run, and no other folder is anybody's."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wanshim import hand_over
from wanshim.launch.boot import made_folders

Make = Callable[..., None]


@pytest.fixture(params=[os.makedirs, pathlib.Path.mkdir], ids=["makedirs", "mkdir"])
def ranks(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Make]:
    """The function as each of two ranks has it."""
    monkeypatch.setattr(made_folders, "_WAIT_S", 0.05)
    run = tmp_path / "run"
    run.mkdir()
    made = []
    for rank in range(2):
        monkeypatch.setattr(hand_over, "failure_file", lambda rank=rank: run / str(rank))
        made.append(made_folders._once_by_all(request.param))
    return made


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_rank_makes_a_folder_once(ranks: list[Make], order: tuple[int, int], tmp_path: Path) -> None:
    for rank in order:
        ranks[rank](tmp_path / "out")
    for rank in order:
        with pytest.raises(FileExistsError):
            ranks[rank](tmp_path / "out")


def test_folder_of_before_the_run_exists_for_all(ranks: list[Make], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ranks[0](tmp_path / "out", exist_ok=True)
    for make in ranks:
        with pytest.raises(FileExistsError):
            make(tmp_path / "out")


def test_file_in_the_place_is_an_error(ranks: list[Make], tmp_path: Path) -> None:
    ranks[0](tmp_path / "out")
    (tmp_path / "out").rmdir()
    (tmp_path / "out").touch()
    with pytest.raises(FileExistsError):
        ranks[1](tmp_path / "out")


def test_library_gets_what_the_file_system_says(ranks: list[Make], tmp_path: Path) -> None:
    """Two processes may lock each other out by a folder."""
    ranks[0](tmp_path / "lock")
    library = compile("make(path)", f"{tmp_path}/site-packages/lock.py", "exec")
    with pytest.raises(FileExistsError):
        exec(library, {"make": ranks[1], "path": tmp_path / "lock"})
