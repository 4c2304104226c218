"""A sharded step is the unsharded one: loss and every gradient, for sizes that do not divide, in every way to train.

One set of four processes runs all cases; fewer ranks are its first ones.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wanshim
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.sequence.cases import EXACT, quick
from wanshim.core.sequence import BlockList, exchange
from wanshim.core.sequence.gradients import GradientAverage
from wanshim.core.sequence.group import SequenceGroup

from .tiny import Case, Transformer, farthest

LATE = BlockList(  # exchanged when attention is called; rotary frequencies are then sharded like the tokens
    blocks=(), projections=(), num_heads=("self_attn.attn.num_heads",), whole=()
)


def thorough() -> list[Case]:
    grid = product(
        (2, 3, 4, 8), (12, 24, 40), (8, 13, 64), (1, 2), (False, True), ("none", "saved", "reentrant"), (1, 3)
    )
    return [
        Case(ranks=r, heads=h, tokens=t, batch=b, per_token=p, checkpointing=c, accumulation=a)
        for r, h, t, b, p, c, a in grid
    ]


def run_cases(rank: int, size: int, todo: list[Case], late: bool = False) -> dict[Case, float]:
    groups = {n: dist.new_group(list(range(n))) for n in sorted({case.ranks for case in todo})}
    done = {}
    for case in todo:
        dist.barrier()  # no rank of this case waits for one that is busy with those before
        if rank >= case.ranks:
            continue
        expected = case.step(case.model())
        model = case.model()
        blocks = [replace(LATE, blocks=list(model.blocks), exit=model.head)] if late else None
        handle = wanshim.shard_sequence(model, groups[case.ranks], blocks=blocks, deadline=60)
        done[case] = farthest(case.step(model), expected)
        handle.remove()
    return done


def worst(todo: list[Case], size: int = 4, late: bool = False, seconds: float = 240) -> dict[Case, float]:
    ranks = values(run_ranks(run_cases, size, todo, late, seconds=seconds))
    found = {case: [done[case] for done in ranks if case in done] for case in todo}
    assert all(len(found[case]) == case.ranks for case in todo)
    return {case: torch.tensor(distances).max().item() for case, distances in found.items()}


@pytest.mark.slow
def test_sharded_step_is_the_unsharded_one() -> None:
    for case, distance in worst(quick()).items():
        assert distance <= EXACT, case


def test_exchange_where_attention_is_called_is_exact_too() -> None:
    for case, distance in worst([Case(ranks=3, batch=2), Case(ranks=2, checkpointing="saved")], 3, late=True).items():
        assert distance <= EXACT, case


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_sharded_step_is_the_unsharded_one_over_all_sizes() -> None:
    for case, distance in worst(thorough(), 8, seconds=3500).items():
        assert distance <= EXACT, case


def train_pairs(rank: int, size: int, averaged_by_ddp: bool) -> float:
    """Two groups of two, a sample each; the reference sees both."""
    case = Case(accumulation=3, checkpointing="saved")
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    one, two = (case.step(case.model(), first_seed=seed) for seed in (1, 11))
    expected = {name: (one[1][name] + two[1][name]) / 2 for name in one[1]}
    model = case.model()
    group, mine = rank // 2, (one, two)[rank // 2]
    handle = wanshim.shard_sequence(model, groups[group], sum_gradients=not averaged_by_ddp, deadline=60)
    trained: Any = DistributedDataParallel(model) if averaged_by_ddp else model
    losses, found = case.step(trained, first_seed=(1, 11)[group])
    handle.remove()
    found = {name.removeprefix("module."): gradient for name, gradient in found.items()}
    if not averaged_by_ddp:
        for gradient in found.values():
            dist.all_reduce(gradient)
            gradient /= size
    return farthest((losses, found), (mine[0], expected))


@pytest.mark.parametrize("averaged_by_ddp", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_groups_of_two_train_as_two_processes(averaged_by_ddp: bool) -> None:
    assert max(values(run_ranks(train_pairs, 4, averaged_by_ddp))) <= EXACT


def infer(rank: int, size: int) -> tuple[float, bool]:
    case = Case(ranks=size, batch=2, per_token=True)
    model, sample = case.model(), case.sample(1)
    del sample["target"]
    with torch.no_grad():
        expected = model(**sample)
        handle = wanshim.shard_sequence(model, deadline=60)
        found = model(**sample)
    handle.remove()
    return ((found - expected).norm() / expected.norm()).item(), found.requires_grad


def test_inference_gives_every_rank_the_whole_output() -> None:
    for distance, requires_grad in values(run_ranks(infer, 3)):
        assert distance <= EXACT
        assert not requires_grad


def half(rank: int, size: int) -> tuple[float, float]:
    """How far the sharded and the unsharded gradients in bf16 are from those in fp32, at the farthest."""
    whole, case = Case(checkpointing="saved"), Case(checkpointing="saved", dtype="bfloat16")
    truth = whole.step(whole.model())
    alone = case.step(case.model())
    model = case.model()
    handle = wanshim.shard_sequence(model, deadline=60)
    sharded = case.step(model)
    handle.remove()
    assert all(gradient.dtype == torch.bfloat16 for gradient in sharded[1].values())
    return tuple(farthest((s[0], {n: g.float() for n, g in s[1].items()}), truth) for s in (sharded, alone))


def test_bf16_step_is_as_near_to_fp32_as_the_unsharded_one() -> None:
    for sharded, alone in values(run_ranks(half, 2)):
        assert sharded <= 1.5 * alone


def two_lengths(rank: int, size: int) -> float:
    """Two forward passes of different lengths, one backward: recomputation has both lengths to keep apart."""
    cases = [Case(tokens=29, checkpointing="saved"), Case(tokens=30, checkpointing="saved")]

    def step(model: Transformer) -> tuple[list[float], dict[str, torch.Tensor]]:
        loss = sum(case.loss(model, 1) for case in cases)
        loss.backward()
        return [loss.item()], {n: p.grad.clone() for n, p in model.named_parameters()}

    expected, model = step(cases[0].model()), cases[0].model()
    handle = wanshim.shard_sequence(model, deadline=60)
    found = step(model)
    handle.remove()
    return farthest(found, expected)


def test_two_lengths_before_one_backward_are_kept_apart() -> None:
    assert max(values(run_ranks(two_lengths, 2))) <= EXACT


def weight_term(model: Transformer) -> torch.Tensor:
    """L2 of every parameter, and how far each block's query projection is from orthogonal."""
    decay = sum(p.float().square().sum() for p in model.parameters())
    products = (block.self_attn.q.weight @ block.self_attn.q.weight.T for block in model.blocks)
    return 0.01 * (decay + sum((p - torch.eye(len(p))).square().sum() for p in products))


def with_weight_term(rank: int, size: int, way: str) -> float:
    case = Case(ranks=size, checkpointing="saved")

    def step(model: Transformer) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = []
        for seed in (1, 2):
            loss = case.loss(model, seed)
            if way == "in the loss":
                loss = loss + weight_term(model)
            loss.backward()
            losses.append(loss.item())
            if way == "in a backward of its own":
                weight_term(model).backward()
        return losses, {n: p.grad.clone() for n, p in model.named_parameters()}

    expected, model = step(case.model()), case.model()
    handle = wanshim.shard_sequence(model, deadline=60)
    found = step(model)
    handle.remove()
    return farthest(found, expected)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["in the loss", "in a backward of its own"])
def test_term_on_the_weights_counts_once(way: str, size: int) -> None:
    assert max(values(run_ranks(with_weight_term, size, way))) <= EXACT


def tied(rank: int, size: int) -> float:
    """A parameter that blocks share with what every rank computes whole."""

    def made() -> Transformer:
        model = Case().model()
        model.head.weight = torch.nn.Parameter(model.blocks[1].self_attn.q.weight[:3].detach().clone())
        model.blocks[1].self_attn.q.register_parameter("shared", model.head.weight)
        model.blocks[1].register_forward_hook(lambda block, args, out: out + block.self_attn.q.shared.sum(0))
        return model

    expected, model = Case().step(made()), made()
    handle = wanshim.shard_sequence(model, deadline=60)
    found = Case().step(model)
    handle.remove()
    return farthest(found, expected)


def test_parameter_that_blocks_share_with_the_head_gets_its_whole_gradient() -> None:
    assert max(values(run_ranks(tied, 2))) <= EXACT


def kept_gradient(rank: int, size: int) -> bool:
    """The object in `.grad` stays the same one over micro-batches, as without shards."""
    case = Case()
    model = case.model()
    handle = wanshim.shard_sequence(model, deadline=60)
    case.loss(model, 1).backward()
    before = {n: p.grad for n, p in model.named_parameters()}
    case.loss(model, 2).backward()
    kept = all(p.grad is before[n] for n, p in model.named_parameters())
    handle.remove()
    return kept


def test_accumulation_keeps_the_gradient_object() -> None:
    assert all(values(run_ranks(kept_gradient, 2)))


def with_hooks(rank: int, size: int, kind: str) -> list[float]:
    """Weights after two steps of an optimizer that runs in backward, or behind clipping by value in backward."""
    case = Case(checkpointing="saved", accumulation=2)

    def trained(sharded: bool) -> Transformer:
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

        for parameter in model.parameters():
            if kind == "steps":
                parameter.register_post_accumulate_grad_hook(step)
            else:
                parameter.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        if sharded:
            wanshim.shard_sequence(model, deadline=60)
        for seed in (1, 2):
            case.step(model, first_seed=seed)
            optimizer.step()
        return model

    pairs = zip(trained(True).parameters(), trained(False).parameters(), strict=True)
    return [((found - expected).norm() / expected.norm()).item() for found, expected in pairs]


@pytest.mark.parametrize("kind", ["steps", "clips"])
def test_hooks_on_parameters_see_the_whole_gradient(kind: str) -> None:
    for distances in values(run_ranks(with_hooks, 2, kind)):
        assert max(distances) <= EXACT


# Planted faults: each breaks the code in one place, and the comparison above sees it.


def _wrong_permutation() -> None:
    true = exchange.spans
    exchange.spans = lambda counts: tuple(reversed(true(counts))) if counts == (3, 2) else true(counts)  # type: ignore[assignment]


def _missing_sum() -> None:
    SequenceGroup.sum = lambda self, tensor: SimpleNamespace(wait=lambda: None)  # type: ignore


def _earlier_gradients_lost() -> None:
    true = GradientAverage.finish

    def finish(self: Any) -> None:
        self._earlier = dict.fromkeys(self._earlier)
        true(self)

    GradientAverage.finish = finish  # type: ignore[method-assign]


def _stale_buffer() -> None:
    buffers: dict[Any, torch.Tensor] = {}
    true = exchange._token_first

    def same(like: torch.Tensor, count: int, width: int) -> torch.Tensor:
        return buffers.setdefault((like.size(0), count, width), true(like, count, width)).detach()

    exchange._token_first = same


def _early_read() -> None:
    exchange.Passage._await = lambda self: None  # type: ignore[method-assign]


FAULTS = {
    "wrong permutation": _wrong_permutation,
    "missing sum": _missing_sum,
    "earlier gradients lost": _earlier_gradients_lost,
    "stale buffer": _stale_buffer,
    "read before arrival": _early_read,
}


def faulty(rank: int, size: int, name: str) -> float:
    case = Case(accumulation=2)
    expected = case.step(case.model())
    FAULTS[name]()
    model = case.model()
    wanshim.shard_sequence(model, deadline=30, check_finite=False)
    return farthest(case.step(model), expected)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen_by_the_comparison(name: str) -> None:
    outcomes = run_ranks(faulty, 2, name)
    distances = [float("nan") if outcome.error else outcome.value for outcome in outcomes]
    assert not max(distances) <= 100 * EXACT
