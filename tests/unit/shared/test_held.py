"""Contents of the objects that an object holds, put back."""

from __future__ import annotations

import io
import itertools
import pathlib
import threading
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from wanshim.core.shared import held
from wanshim.core.shared.fallback import Fallback
from wanshim.core.shared.held import held_objects, put_back_later


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.names, self.kinds = 1, ["a", {"b": [2]}], {3}
        self.recent, self.found = deque([1, 2], maxlen=3), Counter(a=2)
        self.order = OrderedDict(one=1)
        self.args = SimpleNamespace(rate=1e-2, deeper=SimpleNamespace(done=False), path=pathlib.Path("x"))
        self.device, self.dtype, self.layout = torch.device("cpu"), torch.float32, torch.strided
        self.array, self.average, self.step = numpy.zeros(2), torch.zeros(2), torch.zeros(())
        self.part = torch.nn.Linear(1, 1)
        self.part.register_buffer("seen", torch.zeros(1))
        self.call, self.nothing = self.change, object()
        self.itself = self

    def change(self) -> None:
        self.count, self.late = 2, [1]
        self.names[1]["b"].append(3)  # type: ignore[index]
        self.names.insert(0, "c")
        self.kinds.clear()
        self.recent.append(3)
        self.recent.append(4)
        self.found["a"] += 1
        self.order.move_to_end(self.order.setdefault("zero", "one"))
        self.args.deeper.done, self.args.more = True, 1
        del self.args.rate
        self.array += 1
        self.array[0] = numpy.nan
        self.average.add_(1)
        self.step = self.step + 1
        self.part.seen.fill_(5)
        self.part.calls = 3


def contents(value: Any) -> str:
    return repr([value.names, value.kinds, value.recent, value.found, value.order, value.args, value.array.tolist(),
                 value.average, value.step, value.part.seen, value.count, sorted(vars(value)),
                 sorted(vars(value.part))])  # fmt: skip


def test_contents_are_put_back_into_the_same_objects() -> None:
    module = Module()
    before, kept = contents(module), [module.names, module.args, module.array, module.average, module.step]
    put_back = put_back_later(module)
    module.change()
    assert contents(module) != before
    put_back()
    assert contents(module) == before
    now = [module.names, module.args, module.array, module.average, module.step]
    assert [*map(id, now)] == [*map(id, kept)]


def test_parameters_and_what_is_left_out_stay_as_they_are_changed() -> None:
    module = Module()
    module.weight = torch.nn.Parameter(torch.zeros(1))
    put_back = put_back_later(module, without=[module.part, module.args])
    module.change()
    with torch.no_grad():
        module.weight.fill_(4)
    put_back()
    assert module.weight == 4
    assert module.part.calls == 3
    assert module.args.more == 1
    assert module.count == 1


@pytest.mark.parametrize(
    "odd", [itertools.count(), iter([1]), io.StringIO(), threading.Lock(), bytearray(b"x"), (i for i in "ab")]
)
def test_content_that_cannot_be_put_back_is_named(odd: Any) -> None:
    module = Module()
    module.args.odd = [odd]
    with pytest.raises(Fallback, match=f"Module holds an object of the type {type(odd).__name__}, whose content"):
        put_back_later(module)


def test_no_more_objects_are_looked_at_than_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MOST_OBJECTS", 5)
    assert [*held_objects([1, 2, 3, 4, 5, 6], without=[7])][1:] == [1, 2, 3, 4]
    with pytest.raises(Fallback, match="list holds 5 objects or more"):
        put_back_later([1, 2, 3, 4, 5, 6])
