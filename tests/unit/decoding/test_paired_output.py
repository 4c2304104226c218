"""Operators that read a convolution by pairs of frames: the values of a computed one, in the order that others wait."""

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
from wanshim.core.decoding.operators.winograd import PairedOutput, split_weight

CHANNELS, FRAMES = 8, 7
CONV = Conv(name="conv", module=nn.Conv3d(CHANNELS, CHANNELS, 3, device="meta"))  # type: ignore[arg-type]
NORM = Norm(module=SimpleNamespace(gamma=torch.rand(CHANNELS) + 0.5, bias=None), scale=2.0, eps=1e-12)  # type: ignore[arg-type]
BIAS = torch.randn(CHANNELS)


def random(*shape: int) -> torch.Tensor:
    return dense(shape, torch.empty(0)).copy_(torch.randn(shape))


class Paired:
    """A convolution of seven frames in pieces of two, two and three, its log, and its output."""

    def __init__(self, log: list[str]) -> None:
        x, weight = random(1, CHANNELS, FRAMES + 2, 4, 6), torch.randn(CHANNELS, CHANNELS, 3, 3, 3)
        self.expected = F.conv3d(x, weight, None, 1, (0, 1, 1))
        runs = [(start, stop, self._run(f"frames {start} to {stop}", log)) for start, stop in ((0, 2), (2, 4), (4, 7))]
        self.output = PairedOutput(x, self.expected.shape, split_weight(weight), runs)

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
    """A pending sum over a paired output, the same over a tensor, and the log of the first."""
    log: list[str] = []
    made = Paired(log)
    skips = (None, None) if skip is None else (skip, skip.clone())
    return Pending(made.output, BIAS, skips[0], **named), Pending(made.expected, BIAS, skips[1]), log


def close(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    assert first is not None
    assert second is not None
    return torch.allclose(first, second, rtol=0, atol=1e-4)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_norm_reads_each_piece_once_from_the_last_to_the_first(ops: FastOperators, keep: bool, residual: bool) -> None:
    paired, plain, log = both(random(1, CHANNELS, FRAMES, 4, 6) if residual else None)
    (found, kept), (expected, sums) = (ops.normed_window(NORM, CONV, x, keep=keep) for x in (paired, plain))
    assert close(found.own(), expected.own())
    assert log == ["frames 4 to 7", "frames 2 to 4", "frames 0 to 2"]
    if keep:
        assert close(kept, sums)
    else:
        assert kept is None


@pytest.mark.parametrize("shared", [True, False])
def test_sum_replaces_the_residual_unless_that_is_read_again(ops: FastOperators, shared: bool) -> None:
    skip = random(1, CHANNELS, FRAMES, 4, 6)
    before = skip.clone()
    paired, plain, _ = both(skip, shared=shared)
    (_, kept), (_, expected) = (ops.normed_window(NORM, CONV, x, keep=True) for x in (paired, plain))
    assert close(kept, expected)
    assert (kept is skip) is not shared
    assert torch.equal(skip, before) is shared


@pytest.mark.parametrize(
    ("slabs", "order"),
    [
        ([Slab(2, 5, 2)], ["frames 4 to 7", "sent", "frames 2 to 4", "frames 0 to 2"]),
        ([Slab(2, 3, 4)], ["frames 4 to 7", "frames 2 to 4", "sent", "frames 0 to 2"]),
        ([Slab(3, 0, 1), Slab(3, 3, 1)], ["frames 4 to 7", "frames 2 to 4", "frames 0 to 2", "sent"]),
        ([], ["sent", "frames 4 to 7", "frames 2 to 4", "frames 0 to 2"]),
    ],
)
def test_what_others_wait_for_is_sent_as_soon_as_it_is_there(
    ops: FastOperators, slabs: list[Slab], order: list[str]
) -> None:
    paired, plain, log = both(random(1, CHANNELS, FRAMES, 4, 6))
    expected, _ = ops.normed_window(NORM, CONV, plain, keep=True)
    ops.ahead = waiting = Waiting(slabs, log)
    found, _ = ops.normed_window(NORM, CONV, paired, keep=True)
    assert log == order
    assert all(close(sent, slab.of(expected.own())) for slab, sent in zip(slabs, waiting.sent))
    assert close(found.own(), expected.own())


def test_pieces_share_the_buffers_of_the_largest() -> None:
    made = Paired([])
    stores = [products.parts[0].untyped_storage() for _, products in made.output.pieces()]
    assert len({store.data_ptr() for store in stores}) == 1
    assert stores[0].nbytes() == 4 * 5 * 2 * CHANNELS * 4 * 6  # fp32, five buffers, two pairs for three frames


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
    paired, plain, log = both(random(1, CHANNELS, FRAMES, 4, 6) if residual else None)
    found, expected = (reader(ops, x) for x in (paired, plain))
    assert close(found, expected)
    assert len(log) == 3
