"""Compiled blocks: one graph for all of them, what counts as another, and what does not compile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, noop_context_fn

from wanshim.core.compile import CompiledBlocks, compiler_refusal, rotate_pairs
from wanshim.core.recompute import KeptAttention
from wanshim.errors import WanshimError
from wanshim.undo import Undo

BLOCKS, DIM = 3, 16


@pytest.fixture(autouse=True)
def _own_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).tanh()


class Broken(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def blocks(kind: type[Block] = Block) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(kind() for _ in range(BLOCKS))


def step(model: nn.ModuleList, tokens: int = 24, kept: KeptAttention | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(1, tokens, DIM, generator=torch.Generator().manual_seed(1))
    contexts = noop_context_fn if kept is None else kept.contexts
    for block in model:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    loss = x.pow(2).mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.slow
def test_all_blocks_are_one_graph_and_a_second_shape_makes_one_for_all_shapes() -> None:
    model = blocks()
    expected = {tokens: step(model, tokens) for tokens in (24, 30, 36)}
    kept = KeptAttention()
    with Undo() as undo:
        compiled = CompiledBlocks(model, undo)
        for tokens, graphs in ((24, 1), (30, 2), (36, 2), (24, 2)):
            torch.testing.assert_close(step(model, tokens), expected[tokens])
            assert (compiled.count.graphs, compiled.count.recompiled) == (graphs, graphs - 1)
        torch.testing.assert_close(step(model, 24, kept), expected[24])
    kept.remove()
    assert compiled.count.graphs == 2
    assert (kept.count.kept, kept.count.reused) == (BLOCKS, BLOCKS)
    assert compiled.count.seconds > 0
    assert "forward" not in vars(model[0])
    assert all(map(torch.equal, step(model), expected[24]))


def test_graph_break_in_a_block_raises() -> None:
    model = blocks(Broken)
    with Undo() as undo:
        CompiledBlocks(model, undo)
        with pytest.raises(WanshimError, match=r"Broken does not compile as one graph.*WANSHIM_COMPILE"):
            step(model)
    gc.collect()  # before torch 2.15 a failed checkpoint's hooks stay for as long as the frames of its error do
    step(model)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.outside = nn.Linear(DIM, DIM), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.outside(self.linear(x))
        if Around.where == "directly behind":
            torch._dynamo.graph_break()
        return y.exp()


class Around(nn.Module):
    """A block with a submodule of a submodule that runs outside of graphs, and one break elsewhere."""

    where = "nowhere"

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "first":
            torch._dynamo.graph_break()
        y = x.sin()
        for _ in range(2):
            y = y + 1
            if self.where == "in a loop":
                torch._dynamo.graph_break()
        if self.where == "before":
            torch._dynamo.graph_break()
        y = self.inner(y).exp()
        if self.where == "behind":
            torch._dynamo.graph_break()
        return y.cos()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["first", "before", "directly behind", "behind", "in a loop"])
def test_graph_break_beside_the_submodule_outside_raises(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Around, "where", where)
    block = Around()
    with Undo() as undo:
        CompiledBlocks([block], undo, outside="inner.outside")
        for _ in range(2):
            with pytest.raises(WanshimError, match=r"Around does not compile as one graph.*WANSHIM_COMPILE"):
                block(torch.ones(1, 24, DIM))


@pytest.mark.slow
def test_graph_break_of_another_function_meanwhile_is_none_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the user's own compiled function in another thread, here in the middle of a block's call."""
    from torch._inductor import compile_fx as inductor

    block, compile_fx = Around(), inductor.compile_fx

    def with_a_break(*given: Any) -> Any:
        torch._dynamo.utils.counters["graph_break"]["of another thread"] += 1
        return compile_fx(*given)

    monkeypatch.setattr(inductor, "compile_fx", with_a_break)
    expected = block(torch.ones(1, 24, DIM))
    with Undo() as undo:
        compiled = CompiledBlocks([block], undo, outside="inner.outside")
        torch.testing.assert_close(block(torch.ones(1, 24, DIM)), expected)
    assert compiled.count.graphs == 4


def no_compiler(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")


NO_COMPILER = "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."


@pytest.mark.parametrize("when", ["compiled", "launched"])
def test_graph_that_has_no_kernels_runs_as_its_operators(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx as inductor

    monkeypatch.setattr(inductor, "compile_fx", no_compiler if when == "compiled" else lambda *_: no_compiler)
    model, said = blocks(), list[str]()
    expected = step(model)
    with Undo() as undo:
        compiled = CompiledBlocks(model, undo, on_fallback=said.append)
        for _ in range(2):
            assert all(map(torch.equal, step(model), expected))
    assert said == [NO_COMPILER]
    assert compiled.count.eager == {NO_COMPILER: 1}
    torch._dynamo.reset()
    with Undo() as undo:
        CompiledBlocks(model, undo)
        with pytest.raises((WanshimError, RuntimeError), match="Failed to find C compiler"):
            step(model)


def test_graphs_around_the_submodule_outside_run_as_their_operators_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx as inductor

    block, said, outside = Around(), list[str](), list[int]()
    expected = block(torch.ones(1, 24, DIM))
    block.inner.outside.register_forward_hook(lambda *_: outside.append(1))
    monkeypatch.setattr(inductor, "compile_fx", no_compiler)
    with Undo() as undo:
        CompiledBlocks([block], undo, outside="inner.outside", on_fallback=said.append)
        assert torch.equal(block(torch.ones(1, 24, DIM)), expected)
    assert outside == [1]  # ranks exchange in it: not a second time
    assert said == [NO_COMPILER]


def test_block_with_a_graph_break_runs_without_the_compiler_where_that_is_accepted() -> None:
    model, said = blocks(Broken), list[str]()
    expected = step(model)
    with Undo() as undo:
        CompiledBlocks(model, undo, on_fallback=said.append)
        assert all(map(torch.equal, step(model), expected))
    assert len(said) == 1
    assert said[0].startswith("Broken does not compile as one graph: ")


def test_what_cannot_be_compiled_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx as inductor

    assert str(compiler_refusal(torch.device("cuda"))).startswith("nothing can be compiled for cuda: ")
    compiler_refusal.cache_clear()
    monkeypatch.setattr(inductor, "compile_fx", no_compiler)
    try:
        assert compiler_refusal(torch.device("cpu")) == f"nothing can be compiled for cpu: {NO_COMPILER}"
    finally:
        compiler_refusal.cache_clear()
        torch._dynamo.reset()


def test_rotation_in_fp32_rounds_to_the_bf16_of_fp64() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 500, 4 * 32).bfloat16()
    angles = torch.arange(500).double()[:, None, None] * torch.logspace(0, -4, 16, dtype=torch.float64)
    turns = torch.polar(torch.ones_like(angles), angles)
    exact = torch.view_as_real(torch.view_as_complex(x.double().unflatten(2, (4, -1, 2))) * turns).flatten(2)
    pairs = torch.view_as_real(turns)
    found = rotate_pairs(x, pairs, 4)
    assert found.dtype is torch.bfloat16
    assert (found != exact.bfloat16()).float().mean() < 1e-4  # a tie that fp32 rounds the other way
    assert (rotate_pairs(x.float(), pairs, 4) - exact).abs().max() < 1e-6
    assert (rotate_pairs(x.double(), pairs, 4) - exact).abs().max() < 1e-14
