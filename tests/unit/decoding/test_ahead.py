"""What other ranks wait for is computed and sent before the rest of a window."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from wanshim.core.decoding.model.graph import Conv, Norm
from wanshim.core.decoding.modes.spatial import Neighbours
from wanshim.core.decoding.modes.temporal import Relay
from wanshim.core.decoding.operators import fused
from wanshim.core.decoding.operators.base import FastOperators
from wanshim.core.decoding.operators.layout import dense
from wanshim.core.decoding.operators.window import Pending, Slab, Window

CONV = Conv(name="conv", module=nn.Conv3d(4, 4, 3))
STRIDED = Conv(name="strided", module=nn.Conv2d(4, 4, 3, stride=2))
NORM = Norm(module=SimpleNamespace(gamma=torch.linspace(0.5, 2, 4), bias=None), scale=2.0, eps=1e-12)  # type: ignore[arg-type]
SUM = torch.randn(1, 4, 5, 6, 7, generator=torch.Generator().manual_seed(0)).contiguous(
    memory_format=torch.channels_last_3d
)
BANDS = ((0, 3), (3, 6), (6, 9), (9, 9))


class Exchanges:
    """A `Comm` that notes what begins and what is completed, and sends nothing."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 4
        self.events: list[Any] = []

    def begin(self, step: str, sends: Any, receives: Any) -> Callable[[], None]:
        self.events.append(("begin", {peer: x.clone() for x, peer in sends}, [peer for _, peer in receives]))
        return lambda: self.events.append("complete")

    def checkpoint(self) -> None:
        pass


def window_of(conv: Conv = CONV, split: int | None = 4, frames: int = 5) -> Window:
    ops = FastOperators(SimpleNamespace(dtype=SUM.dtype), split)  # type: ignore[arg-type]
    return ops.plain_window(conv, SUM[:, :, :frames])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("with_skip", [False, True])
def test_edges_are_there_when_they_are_sent_and_as_they_are_at_the_end(
    keep: bool, with_skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []
    widths: list[int] = []
    ops = FastOperators(SimpleNamespace(dtype=SUM.dtype), 4)  # type: ignore[arg-type]
    bias, skip = torch.arange(4.0), SUM.flip(4).contiguous(memory_format=torch.channels_last_3d) if with_skip else None
    whole, _ = ops.normed_window(NORM, CONV, Pending(SUM.clone(), bias, skip), keep=keep)

    class Both:
        def slabs(self, window: Window) -> list[Slab]:
            return [Slab(4, 0, 1), Slab(4, 6, 1)]

        def begin(self, window: Window) -> None:
            sent.extend(window.edge(4, side).clone() for side in (0, 1))
            widths.append(0)

    norm_into = fused.norm_into

    def note(*args: Any, **named: Any) -> None:
        widths.append(args[4].shape[4])
        norm_into(*args, **named)

    monkeypatch.setattr(fused, "norm_into", note)
    ops.ahead = Both()
    window, kept = ops.normed_window(NORM, CONV, Pending(SUM.clone(), bias, skip), keep=keep)
    assert widths == [1, 1, 0, 7]
    assert torch.equal(window.own(), whole.own())
    for side in (0, 1):
        torch.testing.assert_close(sent[side], whole.edge(4, side))
    if keep:
        total = SUM + bias.view(1, -1, 1, 1, 1)
        assert kept is not None
        torch.testing.assert_close(kept, total if skip is None else total + skip)


def test_sum_by_phase_is_not_sent_ahead() -> None:
    ops = FastOperators(SimpleNamespace(dtype=SUM.dtype), 4)  # type: ignore[arg-type]
    ops.ahead = Neighbours(Exchanges(1), BANDS, 4)  # type: ignore[arg-type]
    phases = dense((1, 16, 2, 4, 5), SUM).zero_()
    window, _ = ops.normed_window(NORM, CONV, Pending(phases, by_phase=True), keep=False)
    assert window.own().shape == (1, 4, 2, 6, 8)
    assert ops.ahead.comm.events == []


@pytest.mark.parametrize(
    ("rank", "conv", "starts", "peers"),
    [
        (0, CONV, [6], [1]),
        (1, CONV, [0, 6], [0, 2]),
        (2, CONV, [0], [1]),  # the last rank has nothing to compute
        (0, STRIDED, [], [1]),  # it reads beyond the end of a band alone
        (1, STRIDED, [0], [2]),
        (2, STRIDED, [0], []),
    ],
)
def test_band_sends_the_edges_that_its_neighbours_read(
    rank: int, conv: Conv, starts: list[int], peers: list[int]
) -> None:
    comm = Exchanges(rank)
    neighbours = Neighbours(comm, BANDS, 4)  # type: ignore[arg-type]
    window = window_of(conv)
    assert neighbours.slabs(window) == [Slab(4, start, 1) for start in starts]
    neighbours.begin(window)
    ((_, sends, receives),) = comm.events
    assert receives == peers
    assert sorted(sends) == [rank + (1 if start else -1) for start in starts]
    for peer, edge in sends.items():
        assert torch.equal(edge, window.edge(4, 0 if peer < rank else 1))
    neighbours.answer(window, last=False)
    assert comm.events[1:] == ["complete"]
    assert bool(neighbours.history._tails) == bool(conv.history)
    neighbours.answer(window_of(conv), last=True)  # nothing had begun
    assert not neighbours.history._tails
    assert [event if event == "complete" else event[0] for event in comm.events[2:]] == ["begin", "complete"]


@pytest.mark.parametrize(
    ("rank", "frames", "slabs"),
    [
        (0, 5, [Slab(2, 3, 2)]),
        (1, 2, [Slab(2, 0, 2)]),
        (0, 1, []),  # shorter than the past that it hands on
        (2, 5, []),  # the last
    ],
)
def test_run_sends_the_frames_that_the_next_rank_reads(rank: int, frames: int, slabs: list[Slab]) -> None:
    comm = Exchanges(rank)
    relay = Relay(comm, last=2)  # type: ignore[arg-type]
    window = window_of(split=None, frames=frames)
    assert relay.slabs(window) == slabs
    relay.begin(window)
    if frames < CONV.history:
        assert comm.events == []
        return
    ((_, sends, receives),) = comm.events
    assert list(sends) == ([rank + 1] if slabs else [])
    assert receives == ([rank - 1] if rank else [])
    for tail in sends.values():
        assert torch.equal(tail, window.own()[:, :, -2:])
    window.past().fill_(7)
    relay.complete([window])
    assert comm.events[1:] == ["complete"]
    assert rank > 0 or not window.past().any()
