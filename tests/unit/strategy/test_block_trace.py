"""What a block keeps and needs, in bytes that a reader can add up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from wanshim.core.strategy import block_trace, trace_block
from wanshim.core.strategy.block_trace import trace_forward

N = 2**20  # elements of the activation: large against the few bytes of a scalar


class Doubled(nn.Module):
    """Keeps its product with a parameter, and has a temporary four times as large as it."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(N), requires_grad=trained)
        self.register_buffer("shift", torch.ones(N))

    def forward(self, x: torch.Tensor, *, shift: bool = False) -> torch.Tensor:
        if shift:
            x = x + self.shift
        return x * self.scale


def test_inputs_parameters_and_buffers_do_not_count() -> None:
    working = trace_block(Doubled(), (torch.empty(N),))
    assert working.kept == 4 * N  # the product
    assert working.peak == 4 * 4 * N  # with its gradient, and those of x and of the parameter


def test_gradient_of_a_frozen_parameter_is_not_computed() -> None:
    assert trace_block(Doubled(trained=False), (torch.empty(N),)).peak == 3 * 4 * N


def test_arguments_by_name_reach_the_block() -> None:
    shifted = trace_block(Doubled(), (torch.empty(N),), {"shift": True})
    assert shifted.kept == 2 * 4 * N  # the sum is kept for the parameter's gradient


def test_peak_names_the_operator_that_makes_it() -> None:
    class Bulge(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.repeat(8).sin()[:N] * 2

    working = trace_block(Bulge(), (torch.empty(N),))
    assert working.peak_at.startswith("aten.")
    assert working.peak >= 16 * 4 * N


def test_temporary_counts_until_it_is_gone_and_a_view_never() -> None:
    class Temporary(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wide = x.double()
                del wide
            return x.view(2, -1).t().reshape(-1)[:1] * 2

    working = trace_block(Temporary(), (torch.empty(N),))
    assert working.kept < N
    assert working.peak >= 8 * N


class Attend(nn.Module):
    """Self-attention of meta tensors, the way blocks call it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, **self.options)


def test_attention_keeps_its_output_and_a_number_a_row() -> None:
    """Queries, keys and values are inputs here. Backward: the output's gradient, fp32 queries, three gradients."""
    batch, heads, tokens, width = 1, 2, 512, 64
    q, k = torch.empty(batch, heads, tokens, width).bfloat16(), torch.empty(batch, heads, 2 * tokens, width).bfloat16()
    working = trace_block(Attend(), (q, k, k.clone()))
    rows, one = batch * heads * tokens, batch * heads * tokens * width
    assert working.kept == 2 * one + 4 * rows
    gathered, back = 4 * one, 2 * one + 2 * (2 * 2 * one)
    assert working.peak == working.kept + 2 * one + gathered + back


def test_block_s_parameters_are_left_where_and_as_they_are() -> None:
    block = Doubled()
    trace_block(block, (torch.empty(N),))
    assert block.scale.device.type == "cpu"
    assert block.scale.grad is None


def test_a_block_that_the_program_compiles_is_compiled_after_it_as_before() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append([tensor.device.type for tensor in inputs])
        return graph.forward

    compiled: list[list[str]] = []
    torch._dynamo.reset()
    block = Doubled()
    block.compile(backend=backend)
    assert trace_block(block, (torch.empty(N),)).kept == 4 * N
    trace_forward(block, {"block": block}, (torch.empty(N),), {})
    assert not compiled
    block(torch.ones(N))
    assert [set(devices) for devices in compiled] == [{"cpu"}]


def test_traces_of_two_threads_leave_the_compiler_on() -> None:
    class Waiting(Doubled):
        """Ends its forward after that of the other one has begun or, once it has waited for that, without it."""

        def __init__(self, begun: threading.Event, other: threading.Event) -> None:
            super().__init__()
            self.call = lambda: (begun.set(), other.wait(0.3))

        def forward(self, x: torch.Tensor, *, shift: bool = False) -> torch.Tensor:
            self.call()
            return super().forward(x, shift=shift)

    compiled: list[object] = []
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    begun = threading.Event(), threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(trace_block, Waiting(begun[0], begun[1]), (torch.empty(N),))
        begun[0].wait(10)
        second = pool.submit(trace_block, Waiting(begun[1], begun[2]), (torch.empty(N),))
        assert first.result() == second.result()
    double(torch.ones(1))
    assert len(compiled) == 1


class Moved(nn.Module):
    """Keeps a tensor that is no buffer, and moves it to where its input is, as Qwen-Image's rotary embedding did."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(N))
        self.angles = torch.ones(N)
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.angles = self.angles.to(x.device)
        self.seen["x"] = x * self.scale
        return self.seen["x"] + self.angles


def test_forward_is_traced_on_a_copy() -> None:
    model = Moved()
    assert trace_forward(model, {"model": model}, (torch.empty(N),), {}) == 3 * 4 * N  # product, sum, moved angles
    assert model.angles.device.type == "cpu"
    assert not model.seen
    assert isinstance(model.scale, nn.Parameter)
    assert model.scale.device.type == "cpu"


class Repeated(nn.Module):
    """The same operators on the same shapes: with another scalar type, in place, and on what keeps its memory."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        kept = []
        for _ in range(3):
            whole = x * 2  # int64
            kept += [whole, x * 2.0, x * True]  # and fp32
            whole.add_(1)
            kept.append(torch.ops.aten._unsafe_view(whole, [N // 2, 2]))
            kept += torch.ops.aten.native_layer_norm(bias, [N], None, None, 1e-5)
        return kept


def test_what_alike_operators_make_counts_each_time() -> None:
    x, bias = torch.ones(N, dtype=torch.int64), torch.ones(N)
    made = 3 * ((8 + 4 + 8) * N + 4 * N + 2 * 4)
    assert trace_forward(Repeated(), {}, (x, bias), {}) == made


@torch.library.custom_op("wanshim_test::half_of_its_memory", mutates_args=())
def half_of_its_memory(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(2)[: x.numel()]


@half_of_its_memory.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(2 * x.numel())[: x.numel()]


def test_memory_beside_a_result_counts_each_time() -> None:
    assert trace_forward(half_twice, {}, (torch.empty(N),), {}) == 2 * 2 * 4 * N


def half_twice(x: torch.Tensor) -> list[torch.Tensor]:
    return [half_of_its_memory(x) for _ in range(2)]


class Masked(nn.Module):
    """Masks of one shape, which are no buffers, choose different numbers of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = [torch.arange(4) < count for count in (1, 3)]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x[mask] for mask in self.masks]


def test_elements_that_a_mask_on_the_cpu_chooses_are_counted_for_each_mask() -> None:
    model = Masked()
    assert trace_forward(model, {"model": model}, (torch.empty(4, N),), {}) == (1 + 3) * 4 * N


def test_blocks_that_are_alike_run_their_operators_once(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[int] = []

    def maker(result: Any) -> Callable[[], Any]:
        make = own(result)
        return lambda: (again.append(1), make())[1]

    own = block_trace._maker
    monkeypatch.setattr(block_trace, "_maker", maker)
    peaks, counts, width = [], [], 64
    for depth in (2, 6):
        again.clear()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))
        peaks.append(trace_forward(model, {"model": model}, (torch.empty(2, 3, width),), {}))
        counts.append(len(again))
    assert counts == [2, 10]  # all but those of the first block
    assert peaks == [3 * 4 * 2 * 3 * width] * 2  # a block has its input, what it multiplies and its result
