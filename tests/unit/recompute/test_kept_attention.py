"""Self-attention that is kept: the bits of plain checkpointing, fewer kernels, and what is refused."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from wanshim.core.offload import CheckpointOffload
from wanshim.core.recompute import KeptAttention
from wanshim.errors import WanshimError

BLOCKS, HEADS, TOKENS, TEXT, DIM = 4, 2, 24, 5, 16
OUTPUT_BYTES, SUM_BYTES = 4 * TOKENS * DIM, 4 * TOKENS * HEADS
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.qkv, self.o, self.cross = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(heads(q), heads(k), heads(v)).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.attend(*self.qkv(x).chunk(3, -1)))
        return x + self.attend(self.cross(x), context, context)


def blocks(attention: Attention = scaled_dot_product_attention) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(attention) for _ in range(BLOCKS))


def forward(model: nn.ModuleList, contexts: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, TOKENS, DIM, generator=generator, requires_grad=True) * 1.5
    context = torch.randn(1, TEXT, DIM, generator=generator)
    for block in model:
        x = checkpoint(block, x, context, use_reentrant=False, context_fn=contexts)
    return x.pow(2).mean()


def step(model: nn.ModuleList, contexts: Any, seed: int = 0) -> list[torch.Tensor]:
    loss = forward(model, contexts, seed)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("offloaded", [False, True])
def test_loss_and_gradients_are_those_of_plain_checkpointing(offloaded: bool) -> None:
    kept = KeptAttention(CheckpointOffload(min_bytes=0) if offloaded else None)
    plain, keeping = blocks(), blocks()
    for seed in range(3):
        expected, found = step(plain, noop_context_fn, seed), step(keeping, kept.contexts, seed)
        assert len(found) == 1 + 6 * BLOCKS
        assert all(map(torch.equal, expected, found))
    assert (kept.count.kept, kept.count.reused) == (3 * BLOCKS, 3 * BLOCKS)
    assert kept.count.kept_bytes == 3 * BLOCKS * (OUTPUT_BYTES + SUM_BYTES)


class Ran(TorchDispatchMode):
    """Notes queries' and keys' tokens of every attention kernel that computes: its output is new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: Counter[tuple[int, int]] = Counter()
        self.outputs: list[torch.Tensor] = []  # alive, so that no two have one address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if "attention" in func._schema.name and "backward" not in func._schema.name:
            known = {output.data_ptr() for output in self.outputs}
            self.lengths[args[0].shape[2], args[1].shape[2]] += results[0].data_ptr() not in known
            self.outputs.append(results[0])
        return results


def test_self_attention_runs_once_a_block_and_cross_attention_twice() -> None:
    for contexts, times in ((noop_context_fn, 2), (KeptAttention().contexts, 1)):
        with Ran() as ran:
            step(blocks(), contexts)
        assert ran.lengths == {(TOKENS, TOKENS): times * BLOCKS, (TOKENS, TEXT): 2 * BLOCKS}


def test_only_attention_passes_through_python_and_only_until_removed() -> None:
    modes: list[int] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        modes.append(torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack())
        return scaled_dot_product_attention(q, k, v)

    def overridden() -> set[str]:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return {name for name in ("mm", "add.Tensor", *kernels) if has(f"aten::{name}", "BackendSelect")}

    kernels = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"}
    first, second = KeptAttention(), KeptAttention()
    loss = forward(blocks(attention), first.contexts)
    assert overridden() == kernels
    first.remove()
    assert overridden()
    second.remove()
    assert not overridden()
    loss.backward()  # computes its attention again
    assert (first.count.kept, first.count.reused) == (BLOCKS, 0)
    assert modes == [0] * 4 * BLOCKS


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As flash-attn registers its kernel; this one computes on the host."""
    calls.append(k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), scores.logsumexp(-1)


calls: list[int] = []


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, sums = flash_forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, sums = (x.transpose(1, 2) if x.dim() == 4 else x for x in ctx.saved_tensors)
        (gradient,) = (g.transpose(1, 2) for g in gradients)
        shares = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 - sums[..., None]).exp()
        towards_scores = shares * (gradient @ v.transpose(2, 3) - (gradient * out).sum(-1, keepdim=True))
        scaled = towards_scores / q.shape[-1] ** 0.5
        found = (scaled @ k, scaled.transpose(2, 3) @ q, shares.transpose(2, 3) @ gradient)
        return tuple(x.transpose(1, 2) for x in found)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Flash.apply(*(x.transpose(1, 2) for x in (q, k, v)))
    return result.transpose(1, 2)


def test_kernel_of_flash_attn_is_kept_too() -> None:
    calls.clear()
    expected = step(blocks(flash), noop_context_fn)
    assert calls.count(TOKENS) == 2 * BLOCKS
    calls.clear()
    kept = KeptAttention(CheckpointOffload(min_bytes=0))
    assert all(map(torch.equal, expected, step(blocks(flash), kept.contexts)))
    assert (calls.count(TOKENS), calls.count(TEXT)) == (BLOCKS, 2 * BLOCKS)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, step(blocks(), noop_context_fn), strict=True))


@pytest.mark.parametrize("offloaded", [False, True])
def test_second_backward_of_one_graph_uses_what_was_kept_again(offloaded: bool) -> None:
    kept = KeptAttention(CheckpointOffload(min_bytes=0) if offloaded else None)
    found = []
    for contexts in (noop_context_fn, kept.contexts):
        model = blocks()
        loss = forward(model, contexts)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))
    assert kept.count.reused == 2 * BLOCKS


@pytest.mark.parametrize("backward", [True, False])
def test_what_is_kept_dies_with_the_graph_without_the_collector(backward: bool) -> None:
    outputs: list[weakref.ref[Any]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = scaled_dot_product_attention(q, k, v)
        outputs.append(weakref.ref(out.untyped_storage()))
        return out

    gc.disable()
    try:
        loss = forward(blocks(attention), KeptAttention().contexts)
        assert sum(ref() is not None for ref in outputs) >= BLOCKS
        if backward:
            loss.backward()
        del loss
        assert not [ref for ref in outputs if ref() is not None]
    finally:
        gc.enable()


def test_outputs_wait_in_host_memory_and_come_back_ahead_of_use() -> None:
    offload = CheckpointOffload(min_bytes=0)
    step(blocks(), KeptAttention(offload).contexts)
    assert offload.count.sent_bytes == BLOCKS * OUTPUT_BYTES  # the log-sum-exp stays
    assert offload.count.on_demand <= 1
    assert offload.count.ahead + offload.count.on_demand + offload.count.stayed == BLOCKS


def test_threads_have_their_own() -> None:
    kept, expected = KeptAttention(), [step(blocks(), noop_context_fn, seed) for seed in range(3)]
    models, found = [blocks() for _ in range(3)], {}

    def work(seed: int) -> None:
        found[seed] = step(models[seed], kept.contexts, seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(all(map(torch.equal, expected[seed], found[seed])) for seed in range(3))
    assert kept.count.reused == 3 * BLOCKS


def test_output_that_is_written_to_stops_the_backward() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = scaled_dot_product_attention(q, k, v)
        with torch.no_grad():
            out.mul_(1.5)
        return out

    with pytest.raises(WanshimError, match=r"shape \(1, 2, 24, 8\) was written to"):
        step(blocks(attention), KeptAttention().contexts)


def test_another_kernel_in_backward_is_refused() -> None:
    backward = False

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (flash if backward else scaled_dot_product_attention)(q, k, v)

    loss = forward(blocks(attention), KeptAttention().contexts)
    backward = True
    with pytest.raises(WanshimError, match=r"_flash_attn_forward.* as attention 1.*Expected aten._scaled"):
        loss.backward()
