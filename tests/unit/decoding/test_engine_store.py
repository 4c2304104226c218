"""The engines that are kept on disk: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import json
import pwd
import stat
from pathlib import Path

import pytest

from wanshim.core.decoding.operators.cudnn_graph import Engine
from wanshim.core.decoding.operators.engine_store import EngineStore
from wanshim.core.shared.files import engine_folder, written_whole

FACTS = {"gpu": "NVIDIA H200", "cudnn": 91900, "weight": (96, 96, 3, 3, 3)}
ENGINE = Engine(62, {"TILE_SIZE": 3, "TILEK": 1})


def test_engine_is_read_by_another_process_of_the_same_user(tmp_path: Path) -> None:
    EngineStore(tmp_path / "kept").put(FACTS, ENGINE)
    assert EngineStore(tmp_path / "kept").get(FACTS) == (ENGINE, True)


def test_torch_being_the_fastest_is_kept_too(tmp_path: Path) -> None:
    store = EngineStore(tmp_path / "kept")
    assert store.get(FACTS) == (None, False)
    store.put(FACTS, None)
    assert store.get(FACTS) == (None, True)


@pytest.mark.parametrize("other", [{"cudnn": 92000}, {"gpu": "NVIDIA H100"}, {"weight": (96, 96, 3, 1, 1)}])
def test_engine_of_other_facts_is_not_taken(tmp_path: Path, other: dict[str, object]) -> None:
    store = EngineStore(tmp_path / "kept")
    store.put(FACTS, ENGINE)
    assert store.get(FACTS | other) == (None, False)


def test_folder_and_files_are_for_this_user_alone(tmp_path: Path) -> None:
    EngineStore(tmp_path / "kept").put(FACTS, ENGINE)
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    (file,) = (tmp_path / "kept").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"engine": null}', '{"facts": {}, "engine": null}', "[" * 5000, "\xff"],
    ids=["empty", "cut off", "a list", "no facts", "other facts", "deep", "no UTF-8"],
)
def test_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    store = EngineStore(tmp_path / "kept")
    store.put(FACTS, ENGINE)
    (file,) = (tmp_path / "kept").iterdir()
    file.write_bytes(text.encode("latin-1"))
    assert store.get(FACTS) == (None, False)


@pytest.mark.parametrize(
    "engine",
    [
        '{"number": "x", "knobs": {}}',
        '{"number": 1e999, "knobs": {}}',
        '{"number": 1, "knobs": [1]}',
        '{"number": 1}',
        "5",
    ],
)
def test_file_that_names_no_engine_counts_as_none(tmp_path: Path, engine: str) -> None:
    store = EngineStore(tmp_path / "kept")
    store.put(FACTS, ENGINE)
    (file,) = (tmp_path / "kept").iterdir()
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"engine": 0}).replace('"engine": 0', f'"engine": {engine}')
    )
    assert store.get(FACTS) == (None, False)


def test_user_without_a_home_folder_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number which /etc/passwd does not have."""

    def no_entry(*_: object) -> None:
        raise KeyError("no entry")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    assert engine_folder() is None
    store = EngineStore(None)
    store.put(FACTS, ENGINE)
    assert store.get(FACTS) == (None, False)


def test_next_writer_removes_what_a_killed_one_left_and_not_what_another_writes_now(tmp_path: Path) -> None:
    store = EngineStore(tmp_path)
    (tmp_path / ".killed.partial").mkdir()
    (tmp_path / ".killed.partial" / "engine.json.partial").write_text("{")
    with written_whole(tmp_path / "written"):
        store.put(FACTS, ENGINE)
        assert {path.suffix for path in tmp_path.iterdir()} == {".partial", ".json"}
        assert not (tmp_path / ".killed.partial").exists()


def test_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    store = EngineStore(tmp_path / "kept")
    store.put(FACTS, ENGINE)
    (file,) = (tmp_path / "kept").iterdir()
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    assert store.get(FACTS) == (None, False)
    store.put(FACTS, ENGINE)
    assert not file.is_symlink()
    assert store.get(FACTS) == (ENGINE, True)


def test_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kept").symlink_to(tmp_path / "elsewhere")
    store = EngineStore(tmp_path / "kept")
    store.put(FACTS, ENGINE)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert store.get(FACTS) == (None, False)


def test_folder_that_cannot_be_made_costs_nothing_but_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = EngineStore(tmp_path / "file" / "kept")
    store.put(FACTS, ENGINE)
    assert store.get(FACTS) == (None, False)


def test_write_that_fails_leaves_no_part_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EngineStore(tmp_path / "kept")
    store.put(FACTS, ENGINE)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space is left")

    monkeypatch.setattr(Path, "replace", full)
    store.put(FACTS | {"cudnn": 1}, ENGINE)
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert store.get(FACTS) == (ENGINE, True)
