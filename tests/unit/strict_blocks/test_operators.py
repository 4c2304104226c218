"""The choice between a block's kernel and the framework's own steps, with functions in place of kernels."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from wanshim.core.shared.kernel_compiler import Kernel
from wanshim.core.strict_blocks import StrictOperators, kernels

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


class Count:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        return self.function(*given)


@pytest.fixture
def rejections() -> list[str]:
    return []


@pytest.fixture
def operators(rejections: list[str]) -> StrictOperators:
    return StrictOperators(rejections.append)


def test_kernel_that_gives_the_same_bits_is_compared_at_calls_of_powers_of_two(
    operators: StrictOperators, rejections: list[str]
) -> None:
    kernel, steps = Count(lambda x: x * 2), Count(lambda: X + X)
    for number in range(1, 21):
        assert torch.equal(operators._either("twice", kernel, steps, (X,)), X * 2)
        assert (kernel.calls, steps.calls) == (number, number.bit_length())
    assert rejections == []


def test_each_size_dtype_and_layout_is_compared_by_itself(operators: StrictOperators) -> None:
    for x in (X, X[:1], X.double(), X.transpose(0, 1)):
        steps = Count(lambda x=x: x + 1)
        for _ in range(3):
            operators._either("more", lambda x: x + 1, steps, (x,))
        assert steps.calls == 2


def broken(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("Failed to find C compiler.\nSet CC")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (lambda x: x.nextafter(x + 1), "its kernel gives other bits"),
        (lambda x: x.double(), "its kernel gives other bits"),
        (broken, "RuntimeError: Failed to find C compiler."),
    ],
)
def test_kernel_that_differs_or_fails_is_not_used_again_for_that_size(
    kernel: Callable[..., torch.Tensor], reason: str, operators: StrictOperators, rejections: list[str]
) -> None:
    counted, steps = Count(kernel), Count(lambda: X)
    for _ in range(9):
        assert operators._either("step", counted, steps, (X,)) is X
    assert (counted.calls, steps.calls) == (1, 9)
    assert rejections == [f"step of 2 x 3 x 8 float32 by the framework's own steps: {reason}"]


def test_kernel_that_differs_later_is_found_and_its_result_is_not_used(
    operators: StrictOperators, rejections: list[str]
) -> None:
    apart = [0.0] * 3 + [1.0] * 9
    made = [operators._either("step", lambda x: x + apart.pop(0), lambda: X, (X,)) for _ in range(6)]
    assert all(torch.equal(each, X) for each in made)
    assert len(rejections) == 1


def test_nothing_is_compared_while_a_graph_is_captured(
    operators: StrictOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    x, computed = X.as_subclass(OnGpu), []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        computed.append(x.device.type)
        return x

    monkeypatch.setattr("wanshim.core.strict_blocks.operators._on_device_of", lambda x: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(3):
        assert operators._either("step", kernel, lambda: X, (x,)) is X
    assert computed == ["meta"], "to see which kernels it launches"


def test_steps_are_the_frameworks_until_their_kernels_are_compiled(
    operators: StrictOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = Kernel(None, X.device)  # type: ignore[arg-type]
    monkeypatch.setattr(operators, "_not_compiled", lambda kernel, given: [launched])
    kernel, steps = Count(lambda x: x + 1), Count(lambda: X + 1)
    for _ in range(5):
        assert torch.equal(operators._either("step", kernel, steps, (X,)), X + 1)
    assert (kernel.calls, steps.calls) == (0, 5)
    launched.done.set()
    for _ in range(5):
        assert torch.equal(operators._either("step", kernel, steps, (X,)), X + 1)
    assert (kernel.calls, steps.calls) == (5, 8), "compared at calls 1, 2 and 4 of the kernel"


def test_block_is_the_frameworks_until_its_kernels_are_compiled_and_compared_then(operators: StrictOperators) -> None:
    block = nn.Sequential(nn.Linear(8, 8))
    launched = Kernel(None, X.device)  # type: ignore[arg-type]
    ours, theirs = Count(lambda: X), Count(lambda: X)
    operators._compiling.append(launched)
    for _ in range(3):
        operators.whole(block, ours, theirs, X)
    assert (ours.calls, theirs.calls) == (1, 3), "the first call sees which kernels it needs"
    launched.done.set()
    for _ in range(3):
        operators.whole(block, ours, theirs, X)
    assert (ours.calls, theirs.calls) == (4, 4)


def test_block_in_which_a_kernel_was_asked_for_is_compared_again(operators: StrictOperators) -> None:
    block = nn.Sequential(nn.Linear(8, 8))
    launched = [Kernel(None, X.device)]  # type: ignore[arg-type]

    def ours() -> torch.Tensor:
        operators._compiling += launched
        return X

    theirs = Count(lambda: X)
    operators.whole(block, ours, theirs, X)
    launched.pop().done.set()
    for _ in range(3):
        operators.whole(block, ours, theirs, X)
    assert theirs.calls == 2


def test_block_is_compared_once_a_size_and_one_with_hooks_not_at_all(operators: StrictOperators) -> None:
    block = nn.Sequential(nn.Linear(8, 8))
    ours, theirs = Count(lambda: (X, None)), Count(lambda: (X, None))
    for _ in range(5):
        operators.whole(block, ours, theirs, X)
    assert (ours.calls, theirs.calls) == (5, 1)
    hooked = nn.Sequential(nn.Linear(8, 8))
    hooked[0].register_forward_hook(lambda *_: None)
    for _ in range(5):
        operators.whole(hooked, ours, theirs, X[:1])
    assert (ours.calls, theirs.calls) == (10, 1)


class Hooked(nn.LayerNorm):
    pass


@pytest.mark.parametrize("by", ["hook", "forward"])
def test_norm_with_something_around_it_is_called_as_it_is(by: str, operators: StrictOperators) -> None:
    seen = []
    norm = Hooked(8, elementwise_affine=False)
    if by == "hook":
        norm.register_forward_hook(lambda *_: seen.append(1))
    else:
        norm.forward = lambda x: (seen.append(1), nn.LayerNorm.forward(norm, x))[1]  # type: ignore[assignment]
    scale = shift = torch.zeros(2, 1, 8)
    for number in range(1, 4):
        operators.normalized(X, norm, scale, shift)
        assert len(seen) == number


def test_what_is_served(operators: StrictOperators, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not operators.serve(X)  # on the CPU there are no kernels
    monkeypatch.setattr(kernels, "available", lambda x: True)
    served: list[bool] = []
    with torch.no_grad():
        assert operators.serve(X)
        assert not operators.serve(nn.Parameter(X))
        assert not operators.serve(None)  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not operators.serve(X)
        with FlopCounterMode(display=False):
            assert not operators.serve(X)
            with ThreadPoolExecutor(1) as other:
                assert other.submit(torch.no_grad()(operators.serve), X).result(), "the mode is this thread's"
        torch.jit.trace(lambda x: served.append(operators.serve(x)) or x, X, check_trace=False)
    assert served == [False], "a trace would hold what a kernel returns as a constant"
    assert not operators.serve(X)  # with gradients


def test_call_during_the_first_comparison_does_not_use_the_kernel(
    operators: StrictOperators, rejections: list[str]
) -> None:
    """As of another thread."""
    inside: list[torch.Tensor] = []

    def steps() -> torch.Tensor:
        if not inside:
            inside.append(X)
            inside.extend(operators._either("step", lambda x: x + 1, steps, (X,)) for _ in range(3))
        return X

    assert operators._either("step", lambda x: x + 1, steps, (X,)) is X
    assert all(each is X for each in inside)
    assert rejections
