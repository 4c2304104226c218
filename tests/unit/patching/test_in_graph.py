"""A seam in a compiled region: counted when called eagerly, one graph without a recompilation when compiled."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from wanshim.activation import _seam_state
from wanshim.patching import Seam, SeamState
from wanshim.patching import seam as seam_module
from wanshim.patching.seam import State
from wanshim.patching.transaction import put_in, take_out

SOURCE = "class Block:\n    def forward(self, x):\n        return x + 1\n"


def doubling(original: Any, seam: SeamState) -> Callable[..., Any]:
    def replacement(self: Any, x: Any) -> Any:
        if not seam.enter_graph():
            return original(self, x)
        return original(self, x) * 2

    return replacement


@pytest.fixture
def block() -> Iterator[Any]:
    module = types.ModuleType("graphtarget")
    module.__file__ = "graphtarget.py"
    exec(compile(SOURCE, "graphtarget.py", "exec"), vars(module))
    sys.modules["graphtarget"] = module
    torch._dynamo.reset()
    yield module.Block()
    del sys.modules["graphtarget"]
    torch._dynamo.reset()


def seam_of(in_graph: bool) -> SeamState:
    return SeamState(Seam("graphtarget:Block.forward", doubling, "w", "u", "r", in_graph=in_graph))


def test_seam_in_a_graph_counts_eager_calls_and_none_when_off(block: Any) -> None:
    seam = seam_of(in_graph=True)
    put_in([seam])
    kept = block.forward
    assert kept(torch.ones(1)).item() == 4
    take_out(seam)
    assert kept(torch.ones(1)).item() == 2
    assert seam.calls == 1


@pytest.mark.parametrize("declared", [True, False])
def test_seam_in_a_compiled_region_is_one_graph_that_is_compiled_once(block: Any, declared: bool) -> None:
    """Also where the seam does not say that it lies in a graph, so that nothing was looked up beforehand."""
    seam, counter = seam_of(in_graph=declared), CompileCounter()
    put_in([seam])
    compiled = torch.compile(lambda x: block.forward(x), backend=counter, fullgraph=True)
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [4, 4]
        block.forward(torch.ones(2))  # an eager call between them changes nothing the graph rests on
    assert counter.frame_count == 1
    assert seam.calls == 3


def test_seam_that_only_a_compiled_region_reaches_is_exercised(block: Any) -> None:
    seam = seam_of(in_graph=True)
    put_in([seam])
    compiled = torch.compile(lambda x: block.forward(x), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(2)).tolist() for _ in range(2)] == [[4, 4]] * 2
    assert _seam_state(seam, covered=None) is State.EXERCISED
    assert (seam.calls, seam.compiled) == (0, 1)
    assert list(seam.notes) == ["in a graph of torch.compile, whose calls are not counted"]


def test_putting_a_seam_in_a_graph_in_spares_the_import_in_each_call(
    block: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam_module, "_is_compiling", None)
    put_in([seam_of(in_graph=True)])
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it would fail
    assert block.forward(1) == 4
