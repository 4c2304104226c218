"""What is attached comes off: in reverse, by identity, once, and whatever a step raises."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from torch import nn

from wanshim.undo import Undo


def test_attributes_come_back_by_identity_and_absent_ones_go() -> None:
    value = object()
    owner = SimpleNamespace(there=value)
    with Undo() as undo:
        undo.set(owner, {"there": 1, "absent": 2})
        assert vars(owner) == {"there": 1, "absent": 2}
    assert vars(owner) == {"there": value}
    assert owner.there is value


def test_method_of_a_class_is_replaced_on_one_object_only() -> None:
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    with Undo() as undo:
        undo.replace(one, "extra_repr", lambda original: lambda: original() + "!")
        assert one.extra_repr().endswith("!")
        assert not other.extra_repr().endswith("!")
    assert "extra_repr" not in vars(one)


def test_later_of_two_replacements_comes_off_first() -> None:
    owner = SimpleNamespace(name="original")
    undo = Undo()
    undo.replace(owner, "name", lambda value: value + " once")
    undo.replace(owner, "name", lambda value: value + " twice")
    assert owner.name == "original once twice"
    undo.remove()
    assert owner.name == "original"


def test_foreign_value_stays_where_it_was_asked_to() -> None:
    owner, undo = SimpleNamespace(kept="ours", lost="ours"), Undo()
    undo.set(owner, {"kept": 1}, keep_foreign=True)
    undo.set(owner, {"lost": 1})
    owner.kept = owner.lost = "foreign"
    undo.remove()
    assert vars(owner) == {"kept": "foreign", "lost": "ours"}


def test_second_removal_does_nothing() -> None:
    calls: list[int] = []
    undo = Undo()
    undo.add(lambda: calls.append(1))
    undo.remove()
    undo.remove()
    assert calls == [1]


def test_failing_step_is_raised_after_all_others_ran() -> None:
    owner, undo = SimpleNamespace(name="original"), Undo()
    undo.set(owner, {"name": "ours"})
    undo.add(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        undo.remove()
    assert owner.name == "original"


def test_variable_comes_back_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDO_TEST_SET", "before")
    monkeypatch.delenv("UNDO_TEST_UNSET", raising=False)

    def work() -> None:
        with Undo() as undo:
            undo.set_variable("UNDO_TEST_SET", "during")
            undo.set_variable("UNDO_TEST_UNSET", "during")
            assert os.environ["UNDO_TEST_SET"] == os.environ["UNDO_TEST_UNSET"] == "during"
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        work()
    assert os.environ["UNDO_TEST_SET"] == "before"
    assert "UNDO_TEST_UNSET" not in os.environ
