"""The one import hook: calls back after a watched module has run, and is not there otherwise."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest

from tests.unit.conftest import FakeFramework
from wanshim.patching.hooks import ImportHook


@pytest.fixture
def hook() -> Iterator[ImportHook]:
    made = ImportHook()
    yield made
    made.clear()


@pytest.fixture
def seen() -> list[ModuleType]:
    return []


def test_callback_comes_after_the_module_has_run(fake: FakeFramework, hook: ImportHook) -> None:
    fake.write(leaf="VALUE = 1\nLAST = 2\n")
    values: list[int] = []
    hook.watch(["fakewan.leaf"], lambda module: values.append(module.LAST))
    assert fake.module("leaf").VALUE == 1
    assert values == [2]


def test_only_the_watched_module_calls_back_and_only_once(
    fake: FakeFramework, hook: ImportHook, seen: list[ModuleType]
) -> None:
    fake.write(leaf="", other="from fakewan import leaf")
    hook.watch(["fakewan.leaf"], seen.append)
    fake.module("other")
    fake.module("leaf")
    assert seen == [sys.modules["fakewan.leaf"]]


def test_module_keeps_its_own_loader_and_spec(fake: FakeFramework, hook: ImportHook) -> None:
    fake.write(leaf="")
    plain = fake.module("leaf")
    del sys.modules["fakewan.leaf"]
    hook.watch(["fakewan.leaf"], lambda module: None)
    watched = fake.module("leaf")
    assert type(watched.__loader__) is type(plain.__loader__)
    assert watched.__spec__ is not None
    assert watched.__spec__.loader is watched.__loader__
    assert watched.__file__ == plain.__file__


def test_reload_calls_back_again(fake: FakeFramework, hook: ImportHook, seen: list[ModuleType]) -> None:
    fake.write(leaf="VALUE = 1")
    hook.watch(["fakewan.leaf"], seen.append)
    module = fake.module("leaf")
    fake.write(leaf="VALUE = 2")
    assert importlib.reload(module).VALUE == 2
    assert seen == [module, module]


def test_module_that_raises_is_the_users_error_and_no_callback(
    fake: FakeFramework, hook: ImportHook, seen: list[ModuleType]
) -> None:
    fake.write(leaf="raise OSError('the framework is broken')")
    hook.watch(["fakewan.leaf"], seen.append)
    with pytest.raises(OSError, match="the framework is broken"):
        fake.module("leaf")
    assert seen == []
    fake.write(leaf="")
    fake.module("leaf")
    assert len(seen) == 1


def test_module_that_does_not_exist_is_the_usual_error(
    fake: FakeFramework, hook: ImportHook, seen: list[ModuleType]
) -> None:
    fake.write()
    hook.watch(["fakewan.gone"], seen.append)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'fakewan\.gone'"):
        fake.module("gone")
    assert importlib.util.find_spec("fakewan.gone") is None
    assert seen == []


def test_looking_for_a_watched_module_does_not_call_back(
    fake: FakeFramework, hook: ImportHook, seen: list[ModuleType]
) -> None:
    fake.write(leaf="")
    hook.watch(["fakewan.leaf"], seen.append)
    spec = importlib.util.find_spec("fakewan.leaf")
    assert spec is not None
    assert spec.origin == str(fake.site / "fakewan" / "leaf.py")
    assert seen == []


def test_loaders_own_abilities_can_be_asked_through_the_hook(fake: FakeFramework, hook: ImportHook) -> None:
    fake.write(leaf="VALUE = 1")
    hook.watch(["fakewan.leaf"], lambda module: None)
    spec = importlib.util.find_spec("fakewan.leaf")
    assert spec is not None
    assert spec.loader is not None
    assert isinstance(spec.loader, importlib.abc.Loader)
    assert spec.loader.get_source("fakewan.leaf") == "VALUE = 1"  # type: ignore[attr-defined]


def test_finders_of_others_are_asked(hook: ImportHook, seen: list[ModuleType]) -> None:
    class Made(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
            return importlib.util.spec_from_loader(name, self) if name == "made_by_a_finder" else None

        def exec_module(self, module: ModuleType) -> None:
            module.VALUE = 3  # type: ignore[attr-defined]

    finder = Made()
    sys.meta_path.append(finder)
    hook.watch(["made_by_a_finder"], seen.append)
    try:
        assert importlib.import_module("made_by_a_finder").VALUE == 3
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop("made_by_a_finder", None)
    assert [module.__name__ for module in seen] == ["made_by_a_finder"]


def test_hook_is_on_the_meta_path_only_while_something_is_watched(hook: ImportHook) -> None:
    before = list(sys.meta_path)
    hook.watch(["fakewan.leaf", "fakewan.other"], lambda module: None)
    assert sys.meta_path == [hook, *before]
    hook.clear()
    assert sys.meta_path == before
    hook.clear()
    assert sys.meta_path == before


def test_module_that_imports_itself_in_a_thread_does_not_deadlock(
    fake: FakeFramework, hook: ImportHook, seen: list[ModuleType]
) -> None:
    fake.write(
        leaf="""
        import threading
        def look():
            import fakewan.other
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(20)
        FINISHED = not thread.is_alive()
        """,
        other="",
    )
    hook.watch(["fakewan.leaf", "fakewan.other"], seen.append)
    assert fake.module("leaf").FINISHED
    assert [module.__name__ for module in seen] == ["fakewan.other", "fakewan.leaf"]


def test_imports_in_two_threads_call_back_once_each(
    fake: FakeFramework, hook: ImportHook, seen: list[ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins while the module's top level runs in the first."""
    meeting = SimpleNamespace(runs=threading.Event(), second=threading.Event())
    monkeypatch.setitem(sys.modules, "meeting_of_threads", meeting)
    fake.write(leaf="from meeting_of_threads import runs, second\nruns.set()\nsecond.wait(20)\nVALUE = 1\n")
    hook.watch(["fakewan.leaf"], seen.append)
    values: list[int] = []

    def load(begin: Callable[[], object]) -> None:
        begin()
        values.append(fake.module("leaf").VALUE)

    begins = (lambda: None, lambda: (meeting.runs.wait(20), meeting.second.set()))
    threads = [threading.Thread(target=load, args=(begin,)) for begin in begins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert values == [1, 1]
    assert len(seen) == 1


def test_two_hooks_that_ask_each_other_both_call_back(
    fake: FakeFramework, hook: ImportHook, seen: list[ModuleType]
) -> None:
    fake.write(leaf="VALUE = 1")
    other = ImportHook()
    other.watch(["fakewan.leaf"], seen.append)
    hook.watch(["fakewan.leaf"], seen.append)
    try:
        module = fake.module("leaf")
    finally:
        other.clear()
    assert seen == [module, module]
    assert module.__spec__ is not None
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_watching_others_replaces_those_before(fake: FakeFramework, hook: ImportHook, seen: list[ModuleType]) -> None:
    fake.write(leaf="", other="")
    hook.watch(["fakewan.leaf"], seen.append)
    hook.watch(["fakewan.other"], seen.append)
    assert sys.meta_path.count(hook) == 1
    fake.module("leaf")
    fake.module("other")
    assert seen == [sys.modules["fakewan.other"]]
    hook.watch([], seen.append)
    assert hook not in sys.meta_path
