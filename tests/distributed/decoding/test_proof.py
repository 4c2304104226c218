"""Ranks agree on what a comparison with the framework's own finds: a fault on one of them reaches no user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wanshim.core.decoding import parallelize_decode, parallelize_encode
from wanshim.core.decoding.modes import temporal
from wanshim.core.decoding.operators.base import StrictOperators

from .ranks import run_ranks, values
from .tiny import encode, make_latent, make_vae, make_video

FAULTS = ("none", "exchange", "operator of the last rank", "framework of the last rank")
_Told = dict[str, list[tuple[bool, str, str]]]


def _plant(fault: str, last: bool, patch: pytest.MonkeyPatch) -> None:
    if fault == "exchange":
        own = temporal.begin_swap

        def begin_swap(comm: Any, step: str, sends: Any, targets: Any) -> Callable[[], None]:
            complete = own(comm, step, sends, targets)

            def late() -> None:
                complete()
                for target, _ in targets:
                    target[-1] *= 1 + 2**-6

            return late

        patch.setattr(temporal, "begin_swap", begin_swap)
    elif fault == "operator of the last rank" and last:
        conv = StrictOperators.conv

        def spoiled(self: StrictOperators, window: Any) -> Any:
            out = conv(self, window)
            out.main[-1, 0] *= 1 + 2**-6  # type: ignore[index]
            return out

        patch.setattr(StrictOperators, "conv", spoiled)


def _calls(rank: int, size: int) -> _Told:
    vae, latent, video = make_vae("2.1"), make_latent(7, batch=2), make_video(17, 48, 64)
    expected = vae.decode(latent).sample, encode(vae, video)
    told: _Told = {}
    for fault in FAULTS:
        told[fault] = []
        with pytest.MonkeyPatch.context() as patch:
            _plant(fault, rank == size - 1, patch)
            for parallelize, call, own in (
                (parallelize_decode, lambda: vae.decode(latent).sample, expected[0]),
                (parallelize_encode, lambda: encode(vae, video), expected[1]),
            ):
                handle = parallelize(vae, deadline=40.0)
                if fault == "framework of the last rank" and rank == size - 1:
                    module = vae.decoder if parallelize is parallelize_decode else vae.encoder
                    hook = module.register_forward_hook(lambda *_: None)
                found = [call() for _ in range(2)]
                equal = all(torch.equal(each, own) for each in found)
                told[fault].append((equal, handle.plan.claim if handle.plan else "", "; ".join(handle._reasons)))
                handle.remove()
                if fault == "framework of the last rank" and rank == size - 1:
                    hook.remove()
    return told


@pytest.fixture(scope="module")
def told() -> list[_Told]:
    found: list[_Told] = values(run_ranks(_calls, 3, seconds=280))
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_has_the_framework_s_result_and_the_same_sentence(fault: str, told: list[_Told]) -> None:
    for rank in told:
        assert rank[fault] == told[0][fault]
        assert [equal for equal, *_ in rank[fault]] == [True, True]


def test_equal_ranks_share_the_call_and_say_that_it_was_compared(told: list[_Told]) -> None:
    assert told[0]["none"] == 2 * [(True, "strict, compared", "")]


@pytest.mark.parametrize("fault", FAULTS[1:3])
def test_fault_is_found_and_named(fault: str, told: list[_Told]) -> None:
    for (_, _, reason), source in zip(told[0][fault], ("latent", "video")):
        assert reason.startswith(f"strict was not equal for a {source} of [")


def test_hook_on_one_rank_leaves_the_call_to_the_framework_on_all(told: list[_Told]) -> None:
    decode, encode_ = told[1]["framework of the last rank"]
    assert decode == (True, "strict, not compared", "decoder has a forward hook")
    assert encode_ == (True, "strict, not compared", "encoder has a forward hook")
