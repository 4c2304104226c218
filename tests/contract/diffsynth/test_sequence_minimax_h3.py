"""MiniMax-H3's packed sequences, sharded over gloo ranks, take the unsharded step: loss and every trained gradient."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wanshim
from tests.distributed.decoding.ranks import made_together, run_ranks, values

pytest.importorskip("torchaudio", reason="DiffSynth's MiniMax-H3 imports it")
pytest.importorskip("diffsynth.models.minimax_h3_dit", reason="this release has no MiniMax-H3")

from diffsynth.models import minimax_h3_dit
from diffsynth.models.minimax_h3_dit_comfy import MiniMaxH3DiTComfy, MiniMaxH3DiTComfyPruned

from tests.contract.diffsynth import minimax_h3 as h3
from wanshim.adapters.diffsynth.splitting.minimax_h3 import FAMILY
from wanshim.core.streaming import stream_model

EXACT = 1e-5
SIZES = {2: {"num_frames": 39, "text": 9}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not recomputed": {"recomputed": False},
    "guidance": {"cfg_scale": 2.0},
    "references": {"sizes": {number: {"references": 1 + number} for number in range(4)}},
    "streamed": {"streamed": 3},
    "comfy": {"kind": MiniMaxH3DiTComfy},
    "comfy, pruned": {"kind": MiniMaxH3DiTComfyPruned},
}


def made(kind: str) -> h3.Training:
    given = KINDS[kind]
    model = h3.lora_model(torch.float32, given.get("kind", minimax_h3_dit.MiniMaxH3DiT))
    module = h3.Training(h3.pipe_of(model), sizes=given.get("sizes", SIZES), cfg_scale=given.get("cfg_scale", 1.0))
    module.use_gradient_checkpointing = given.get("recomputed", True)
    if "streamed" in given:
        stream_model(model, "cpu", count=given["streamed"], blocks="blocks")
    return module


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative distance of a loss or a gradient, by norm."""
    apart = [((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(found, expected, strict=True)]
    return torch.tensor(apart).max().item()


def compare(rank: int, size: int, kinds: tuple[str, ...], ranks: tuple[int, ...]) -> dict[Any, tuple[float, bool]]:
    """How far each step of two samples of other lengths is from the unsharded one, and whether the model computes the
    unsharded bits afterwards."""
    groups = {n: dist.new_group(list(range(n))) for n in ranks}
    attention = minimax_h3_dit._sdpa_varlen_attention
    expected = made_together(kinds, lambda kind: h3.step(made(kind)))
    done = {}
    for n, kind in product(ranks, kinds):
        if rank >= n:
            continue
        module = made(kind)
        handle = wanshim.shard_sequence(module.pipe.dit, groups[n], blocks=FAMILY.block_lists(module.pipe), deadline=60)
        found = h3.step(module)
        handle.remove()
        module.zero_grad()
        module.losses.clear()
        again = all(map(torch.equal, h3.step(module), expected[kind]))
        same = minimax_h3_dit._sdpa_varlen_attention is attention
        done[n, kind] = (distance(found, expected[kind]), again and same)
    return done


def check(kinds: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    for done in values(run_ranks(compare, max(ranks), kinds, ranks, seconds=200)):
        assert done
        for case, (distance, as_before) in done.items():
            assert distance <= EXACT, case
            assert as_before, case


def test_sharded_step_over_two_ranks_is_the_unsharded_one() -> None:
    check(("plain",), (2,))


@pytest.mark.slow
def test_sharded_step_over_three_ranks_is_the_unsharded_one_in_every_layout() -> None:
    """Neither tokens nor heads divide."""
    check(tuple(KINDS), (3,))


@pytest.mark.sweep
@pytest.mark.slow
def test_sharded_step_over_two_and_four_ranks_is_the_unsharded_one_in_every_layout() -> None:
    check(tuple(KINDS), (2, 4))
