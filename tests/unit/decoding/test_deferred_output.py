"""Operators that read a convolution by Winograd's method: values of a computed one, in the order that others wait."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wanshim.core.decoding.model.graph import Conv, Norm
from wanshim.core.decoding.operators.base import FastOperators
from wanshim.core.decoding.operators.layout import dense
from wanshim.core.decoding.operators.window import Pending, Slab, Window
from wanshim.core.decoding.operators.winograd import DeferredOutput, split_weight

CHANNELS, FRAMES = 8, 11
CONV = Conv(name="conv", module=nn.Conv3d(CHANNELS, CHANNELS, 3, device="meta"))  # type: ignore[arg-type]
NORM = Norm(module=SimpleNamespace(gamma=torch.rand(CHANNELS) + 0.5, bias=None), scale=2.0, eps=1e-12)  # type: ignore[arg-type]
BIAS = torch.randn(CHANNELS)


def random(*shape: int) -> torch.Tensor:
    return dense(shape, torch.empty(0)).copy_(torch.randn(shape))


class Made:
    """A convolution of eleven frames in pieces, its log, and its output."""

    def __init__(self, log: list[str], spans: tuple[tuple[int, int], ...] = ((0, 4), (4, 8), (8, 11))) -> None:
        x, weight = random(1, CHANNELS, FRAMES + 2, 4, 6), torch.randn(CHANNELS, CHANNELS, 3, 3, 3)
        self.expected = F.conv3d(x, weight, None, 1, (0, 1, 1))
        runs = [(start, stop, self._run(f"frames {start} to {stop}", log)) for start, stop in spans]
        self.output = DeferredOutput(x, self.expected.shape, split_weight(weight), runs)

    @staticmethod
    def _run(name: str, log: list[str]) -> Callable[..., None]:
        def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            if name not in log:
                log.append(name)
            out.copy_(F.conv3d(x, weight, None, 1, (0, 1, 1)))

        return run


class Waiting:
    """Another rank, which waits for some slabs; what they held when they were sent."""

    def __init__(self, slabs: list[Slab], log: list[str]) -> None:
        self._slabs, self._log = slabs, log
        self.sent: list[torch.Tensor] = []

    def slabs(self, window: Window) -> list[Slab]:
        return self._slabs

    def begin(self, window: Window) -> None:
        self._log.append("sent")
        self.sent = [slab.of(window.own()).clone() for slab in self._slabs]


@pytest.fixture
def ops() -> FastOperators:
    torch.manual_seed(0)
    return FastOperators(None)  # type: ignore[arg-type]


def both(skip: torch.Tensor | None = None, **named: Any) -> tuple[Pending, Pending, list[str]]:
    """A pending sum over a deferred output, the same over a tensor, and the log of the first."""
    log: list[str] = []
    made = Made(log)
    skips = (None, None) if skip is None else (skip, skip.clone())
    return Pending(made.output, BIAS, skips[0], **named), Pending(made.expected, BIAS, skips[1]), log


def close(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    assert first is not None
    assert second is not None
    return torch.allclose(first, second, rtol=0, atol=1e-4)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_norm_reads_each_piece_once_from_the_last_to_the_first(ops: FastOperators, keep: bool, residual: bool) -> None:
    deferred, plain, log = both(random(1, CHANNELS, FRAMES, 4, 6) if residual else None)
    (found, kept), (expected, sums) = (ops.normed_window(NORM, CONV, x, keep=keep) for x in (deferred, plain))
    assert close(found.own(), expected.own())
    assert log == ["frames 8 to 11", "frames 4 to 8", "frames 0 to 4"]
    if keep:
        assert close(kept, sums)
    else:
        assert kept is None


@pytest.mark.parametrize("shared", [True, False])
def test_sum_replaces_the_residual_unless_that_is_read_again(ops: FastOperators, shared: bool) -> None:
    skip = random(1, CHANNELS, FRAMES, 4, 6)
    before = skip.clone()
    deferred, plain, _ = both(skip, shared=shared)
    (_, kept), (_, expected) = (ops.normed_window(NORM, CONV, x, keep=True) for x in (deferred, plain))
    assert close(kept, expected)
    assert (kept is skip) is not shared
    assert torch.equal(skip, before) is shared


@pytest.mark.parametrize(
    ("slabs", "order"),
    [
        ([Slab(2, 9, 2)], ["frames 8 to 11", "sent", "frames 4 to 8", "frames 0 to 4"]),
        ([Slab(2, 7, 4)], ["frames 8 to 11", "frames 4 to 8", "sent", "frames 0 to 4"]),
        ([Slab(3, 0, 1), Slab(3, 3, 1)], ["frames 8 to 11", "frames 4 to 8", "frames 0 to 4", "sent"]),
        ([Slab(4, 5, 1)], ["frames 8 to 11", "frames 4 to 8", "frames 0 to 4", "sent"]),
        ([], ["sent", "frames 8 to 11", "frames 4 to 8", "frames 0 to 4"]),
    ],
)
def test_what_others_wait_for_is_sent_as_soon_as_it_is_there(
    ops: FastOperators, slabs: list[Slab], order: list[str]
) -> None:
    deferred, plain, log = both(random(1, CHANNELS, FRAMES, 4, 6))
    ops.split = next((slab.dim for slab in slabs if slab.dim != 2), None)
    expected, _ = ops.normed_window(NORM, CONV, plain, keep=True)
    ops.ahead = waiting = Waiting(slabs, log)
    found, _ = ops.normed_window(NORM, CONV, deferred, keep=True)
    assert log == order
    assert all(close(sent, slab.of(expected.own())) for slab, sent in zip(slabs, waiting.sent))
    assert close(found.own(), expected.own())


def test_pieces_share_the_buffers_of_the_largest() -> None:
    made = Made([], ((0, 8), (8, 11)))
    stores = [products.parts[0].untyped_storage() for _, products in made.output.pieces()]
    assert len({store.data_ptr() for store in stores}) == 1
    assert stores[0].nbytes() == 4 * 7 * 2 * CHANNELS * 4 * 6  # fp32, seven buffers, two groups


READERS: dict[str, Callable[[FastOperators, Pending], torch.Tensor]] = {
    "resolve": lambda ops, x: ops.resolve(x),
    "summed window": lambda ops, x: ops.summed_window(CONV, x).own(),
    "join": lambda ops, x: ops.resolve(ops.join(torch.zeros(1, CHANNELS, 1, 4, 6), x)),
    "time window": lambda ops, x: torch.cat(
        [each if isinstance(each, torch.Tensor) else each.own() for each in _apart(ops, x)], 2
    ),
    "resized window": lambda ops, x: ops.resized_window(SimpleNamespace(conv=CONV), lead=x, pairs=None).own(),  # type: ignore[arg-type]
}


def _apart(ops: FastOperators, x: Pending) -> tuple[torch.Tensor, Window]:
    window, lead = ops.time_window(CONV, x)
    return ops.resolve(lead), window


@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
@pytest.mark.parametrize("residual", [True, False])
def test_every_operator_that_takes_a_sum_reads_it(
    ops: FastOperators, reader: Callable[[FastOperators, Pending], torch.Tensor], residual: bool
) -> None:
    deferred, plain, log = both(random(1, CHANNELS, FRAMES, 4, 6) if residual else None)
    found, expected = (reader(ops, x) for x in (deferred, plain))
    assert close(found, expected)
    assert len(log) == 3
