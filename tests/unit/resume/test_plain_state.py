"""Plain attributes of a module or logger as a part of the state."""

from __future__ import annotations

import json
from typing import Any

import torch

from wanshim.core.resume import tree
from wanshim.core.resume.tree import PlainState


class Module(torch.nn.Module):
    steps = 0

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.words = folder, ["a"]
        self.odd: Any = object()


def test_changed_plain_attributes_come_back_and_what_a_start_sets_is_that_of_the_start() -> None:
    module = Module("old")
    state = PlainState(module, without=["_secret"])
    assert state.changed() == {}
    module.steps += 1
    module.words.append("b")
    module._scores = {3: (None, True, 0.5, float("inf"))}
    module._secret = 5
    module.eval()
    saved = json.loads(json.dumps(state.changed()))
    assert saved.keys() == {"steps", "words", "_scores"}
    again = Module("new")
    PlainState(again).restore(saved)
    assert (again.steps, again.words, again._scores, again.folder) == (1, ["a", "b"], module._scores, "new")
    assert again.training


def test_name_that_is_something_else_now_stays() -> None:
    module = Module("x")
    del module.words
    module.words = torch.nn.Linear(1, 1)
    PlainState(module).restore({"words": 4, "odd": 5, "late": 6})
    assert isinstance(module.words, torch.nn.Linear)
    assert type(module.odd) is object
    assert module.late == 6


def test_count_of_what_no_state_has_begins_anew_with_it() -> None:
    module = Module("x")
    module.files = []
    state = PlainState(module)
    module.steps += 1
    module.files.append(object())
    assert (state.changed(), state.left) == ({}, ["steps"])
    module.files.clear()
    module.odd = torch.zeros(1)
    assert (state.changed(), state.left) == ({}, ["steps"])
    module.odd = 3
    assert (state.changed(), state.left) == ({"odd": 3, "steps": 1}, [])


def test_long_value_is_left_out_by_name() -> None:
    module = Module("x")
    state = PlainState(module)
    module.steps, module.long = 3, "x" * tree.MOST_TEXT
    assert (state.changed(), state.left) == ({"steps": 3}, ["long"])


def test_endless_value_is_none_that_a_state_has() -> None:
    module = Module("x")
    state = PlainState(module)
    module.steps, module.endless = 3, [1]
    module.endless.append(module.endless)
    assert (state.changed(), state.left) == ({}, ["steps"])
