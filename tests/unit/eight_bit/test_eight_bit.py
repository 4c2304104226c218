"""Frozen Linears that multiply in eight bits: what numbers they compute, which ones change, and what stays."""

from __future__ import annotations

import copy
import io
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.compiling import use_aot_eager
from wanshim.core.compile import CompiledBlocks
from wanshim.core.eight_bit import compute_in_eight_bits, product, refusal
from wanshim.core.eight_bit.linear import EightBitCount
from wanshim.core.eight_bit.product import FORMATS
from wanshim.core.model_split.quantize import quantize_base
from wanshim.errors import PlacementInvalid
from wanshim.undo import Undo

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(bool(refusal(name, CPU)), reason=str(refusal(name, CPU))))
        for name in FORMATS
    ],
)


def store(blocks: nn.Module, base: str) -> None:
    pytest.importorskip("torchao", reason="a quantised base is an extra: pip install 'wanshim[torchao]'")
    quantize_base(blocks, base)


class Block(nn.Module):
    """A feed-forward block with a LoRA beside its first Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.lora_a, self.lora_b = nn.Linear(64, 4, bias=False), nn.Linear(4, 96, bias=False)
        for linear in (self.up, self.down):
            linear.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x) + self.lora_b(self.lora_a(x))
        return x + self.down(nn.functional.gelu(hidden))


@pytest.fixture
def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Block() for _ in range(3)]).bfloat16()


@pytest.fixture
def undo() -> Iterator[Undo]:
    with Undo() as undo:
        yield undo


def step(blocks: nn.ModuleList, tokens: int = 37) -> list[torch.Tensor]:
    """The loss and every gradient."""
    x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(1)).to(blocks[0].up.bias.dtype)
    blocks.zero_grad()
    for block in blocks:
        x = block(x)
    loss = x.float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in blocks.parameters() if p.requires_grad)]


def smallest_cosine(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(found[1:], expected[1:], strict=True)
    return min(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item() for a, b in pairs)


def rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    """What a row's eight-bit numbers stand for."""
    codes, scale = product.quantize_rows(x, FORMATS[name])
    return codes.float() * scale


@BOTH
def test_product_and_gradient_are_those_of_the_rounded_rows(name: str, undo: Undo) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48).requires_grad_(False)
    x = torch.randn(3, 5, 64).requires_grad_()
    compute_in_eight_bits([linear], name, undo)
    out = linear(x)
    gradient = torch.randn(3, 5, 48)
    out.backward(gradient)
    weight = rounded(linear.weight, name)
    expected = rounded(x.detach().flatten(0, 1), name) @ weight.t() + linear.bias
    codes, scales = product.quantize_rows(linear.weight, FORMATS[name])
    back = rounded(gradient.flatten(0, 1) * scales.t(), name) @ codes.float()
    tolerance = {"rtol": 8e-3, "atol": 8e-3} if name == "float8" else {"rtol": 1e-4, "atol": 1e-4}  # float8's is bf16
    torch.testing.assert_close(out.flatten(0, 1), expected, **tolerance)
    torch.testing.assert_close(x.grad.flatten(0, 1), back, **tolerance)


@BOTH
def test_gradients_of_lora_stay_close_and_return_to_the_same_bits(name: str, blocks: nn.ModuleList) -> None:
    expected = step(blocks)
    with Undo() as undo:
        assert compute_in_eight_bits(blocks, name, undo) == EightBitCount(changed=6, left=6)
        found = step(blocks)
    assert smallest_cosine(found, expected) > 0.999
    assert not torch.equal(found[0], expected[0])
    assert type(blocks[0].up) is nn.Linear
    assert all(map(torch.equal, step(blocks), expected))


@BOTH
def test_base_stored_in_the_format_is_multiplied_as_it_is(
    name: str, blocks: nn.ModuleList, undo: Undo, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step(blocks)
    store(blocks, name)
    compute_in_eight_bits(blocks, name, undo)
    monkeypatch.setattr(type(blocks[0].up.weight), "dequantize", lambda _: pytest.fail("a weight was unpacked"))
    assert smallest_cosine(step(blocks), expected) > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("stored", [None, "int8"])
def test_changed_blocks_compile_as_one_graph(
    stored: str | None, blocks: nn.ModuleList, undo: Undo, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    expected = step(blocks)
    if stored:
        store(blocks, stored)
        use_aot_eager(monkeypatch)  # inductor has the same products in the other case
    compute_in_eight_bits(blocks, "int8", undo)
    compiled = CompiledBlocks(blocks, undo)
    assert smallest_cosine(step(blocks), expected) > 0.999
    assert compiled.count.graphs == 1


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_linear_passes_the_gradient_on(name: str, dtype: torch.dtype, undo: Undo) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear = nn.Linear(32, 48, dtype=dtype).requires_grad_(False)
    compute_in_eight_bits([linear], name, undo)

    def gradient(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        call(x).float().square().sum().backward()
        return x.grad

    compiled = torch.compile(lambda x: linear(x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled), gradient(linear))


@BOTH
def test_gradient_of_a_gradient_is_close_to_the_plain_one(name: str, undo: Undo) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(64, 96).requires_grad_(False), nn.Linear(96, 64).requires_grad_(False)
    x = torch.randn(5, 64, requires_grad=True)

    def penalty() -> torch.Tensor:
        (slope,) = torch.autograd.grad(second(first(x).tanh()).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    expected = penalty()
    compute_in_eight_bits([first, second], name, undo)
    assert torch.cosine_similarity(penalty().flatten(), expected.flatten(), dim=0) > 0.99
    torch.testing.assert_close(penalty().norm(), expected.norm(), rtol=0.05, atol=0)


@BOTH
def test_weight_that_is_trained_later_multiplies_as_before_and_has_its_gradient(name: str, undo: Undo) -> None:
    linear, x = nn.Linear(32, 48).requires_grad_(False), torch.randn(4, 32)
    compute_in_eight_bits([linear], name, undo)
    expected = nn.functional.linear(x, linear.weight, linear.bias)
    assert not torch.equal(linear(x), expected)
    linear.weight.requires_grad_()
    assert torch.equal(linear(x), expected)
    linear(x).sum().backward()
    assert torch.equal(linear.weight.grad, x.sum(0).expand(48, 32))


def test_copies_are_plain_linears(undo: Undo) -> None:
    linear, x = nn.Linear(32, 48).requires_grad_(False), torch.randn(4, 32)
    expected = linear(x)
    compute_in_eight_bits([linear], "int8", undo)
    file = io.BytesIO()
    torch.save(nn.Sequential(linear), file)
    names = [argument for _, argument, _ in pickletools.genops(zipfile.ZipFile(file).read("archive/data.pkl"))]
    assert not [name for name in names if "wanshim" in str(name)]
    file.seek(0)
    for twin in (copy.deepcopy(nn.Sequential(linear)), torch.load(file, weights_only=False)):
        assert type(twin[0]) is nn.Linear
        assert torch.equal(twin(x), expected)
        assert twin[0].weight is not linear.weight
    assert not torch.equal(linear(x), expected)


@BOTH
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=["one row", "no rows", "two dimensions"])
def test_rows_may_have_any_leading_dimensions(name: str, shape: tuple[int, ...], undo: Undo) -> None:
    linear, x = nn.Linear(32, 48).requires_grad_(False), torch.randn(*shape, 32, requires_grad=True)
    expected = linear(x)
    compute_in_eight_bits([linear], name, undo)
    torch.testing.assert_close(linear(x), expected, rtol=0.1, atol=0.1)
    linear(x).sum().backward()
    assert x.grad.shape == x.shape


def test_one_token_is_enough(blocks: nn.ModuleList, undo: Undo) -> None:
    expected = step(blocks, tokens=1)
    compute_in_eight_bits(blocks, "int8", undo)
    assert smallest_cosine(step(blocks, tokens=1), expected) > 0.99


def test_autocast_decides_the_output(undo: Undo) -> None:
    linear = nn.Linear(32, 16).requires_grad_(False)
    compute_in_eight_bits([linear], "int8", undo)
    x = torch.randn(2, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x)
    out.float().sum().backward()
    assert (out.dtype, x.grad.dtype, linear(x).dtype) == (torch.bfloat16, torch.float32, torch.float32)


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_not_hidden(name: str, bad: float, undo: Undo) -> None:
    linear = nn.Linear(32, 16).requires_grad_(False)
    compute_in_eight_bits([linear], name, undo)
    x = torch.randn(4, 32)
    x[1, 5] = bad
    finite = linear(x).isfinite().all(dim=1)
    assert finite.tolist() == [True, False, True, True]


def test_zeros_stay_zeros(undo: Undo) -> None:
    linear = nn.Linear(32, 16, bias=False).requires_grad_(False)
    compute_in_eight_bits([linear], "int8", undo)
    assert torch.equal(linear(torch.zeros(4, 32)), torch.zeros(4, 16))


def test_what_cannot_multiply_so_is_left_and_nothing_else_is_an_error(undo: Undo) -> None:
    odd, trained = nn.Linear(40, 32).requires_grad_(False), nn.Linear(32, 32)
    kin = nn.modules.linear.NonDynamicallyQuantizableLinear(32, 32).requires_grad_(False)
    for left in (odd, trained, kin):
        with pytest.raises(PlacementInvalid, match="no frozen Linear that could multiply in float8"):
            compute_in_eight_bits([left], "float8", undo)
    plain = nn.Linear(32, 32).requires_grad_(False)
    assert compute_in_eight_bits([odd, plain], "float8", undo) == EightBitCount(changed=1, left=1)


def test_narrow_linears_are_left_and_without_gradients_every_weight_is_frozen(undo: Undo) -> None:
    base, rank = nn.Linear(256, 128), nn.Linear(256, 16)
    with torch.no_grad():
        assert compute_in_eight_bits([base, rank], "int8", undo) == EightBitCount(changed=1, left=1)
        assert type(rank) is nn.Linear
        x, exact = torch.randn(4, 256), nn.functional.linear
        rounded = base(x)
        assert not torch.equal(rounded, exact(x, base.weight, base.bias))
    assert torch.equal(base(x), exact(x, base.weight, base.bias)), "with gradients it trains"


def test_weight_stored_in_the_other_format_is_left(undo: Undo) -> None:
    stored, plain = nn.ModuleList([nn.Linear(32, 32).requires_grad_(False)]), nn.Linear(32, 32).requires_grad_(False)
    store(stored, "int8")
    with pytest.raises(PlacementInvalid, match="no frozen Linear that could multiply in float8"):
        compute_in_eight_bits([stored], "float8", undo)
    assert compute_in_eight_bits([stored, plain], "float8", undo) == EightBitCount(changed=1, left=1)


@BOTH
def test_device_without_the_product_is_refused_by_its_message(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(*_: object) -> torch.Tensor:
        raise RuntimeError("only on devices with compute capability 8.9\nC++ trace")

    monkeypatch.setattr(product, "FORMATS", {name: replace(FORMATS[name], multiply=multiply)})
    expected = f"cpu multiplies no {name} in this torch: only on devices with compute capability 8.9"
    assert refusal(name, torch.device("cpu")) == expected
