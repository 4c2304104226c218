"""How a strict convolution's way is found and used, without a GPU: torch stands for cuDNN's engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed.decoding.tiny import make_vae
from wanshim.core.decoding import ParallelVae, read_graph
from wanshim.core.decoding.model.graph import Conv, Norm
from wanshim.core.decoding.operators import strict_checks, strict_convolutions, strict_kernels
from wanshim.core.decoding.operators.convolution import torch_convolve
from wanshim.core.decoding.operators.strict_checks import Checks, Sizes
from wanshim.core.decoding.operators.strict_convolutions import FRAMEWORK, Way, Ways
from wanshim.core.decoding.operators.strict_cuda import StrictCudaOperators

VIDEO = Conv(name="of videos", module=nn.Conv3d(3, 8, 3).to(memory_format=torch.channels_last_3d))
PICTURES = Conv(name="of pictures", module=nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last))
X = torch.randn(3, 3, 2, 4, 6, generator=torch.Generator().manual_seed(0))


def shape_read(conv: Conv) -> tuple[int, ...]:
    return (3, 3, 4, 4, 6) if len(conv.kernel) == 3 else (6, 3, 4, 6)


def expected(conv: Conv) -> torch.Tensor:
    module = conv.module
    if conv is VIDEO:
        return module(F.pad(X, (1, 1, 1, 1, 2, 0)))
    frames = X.transpose(1, 2).flatten(0, 1).contiguous()
    return F.conv2d(frames, module.weight, module.bias, padding=1).unflatten(0, (3, 2)).transpose(1, 2)


@pytest.fixture(autouse=True)
def relaid_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    monkeypatch.setattr(strict_kernels, "channels_last", lambda x: x.contiguous(memory_format=layouts[x.dim()]))


def operators(way: Way) -> tuple[StrictCudaOperators, list[tuple[Any, ...]]]:
    asked: list[tuple[Any, ...]] = []
    checks = Checks()

    def of(conv: Conv, shape: tuple[int, ...], padding: tuple[int, int], like: torch.Tensor) -> Way:
        asked.append((conv, shape, padding))
        return way

    checks.ways.of = of  # type: ignore[method-assign]
    return StrictCudaOperators(checks), asked


@pytest.mark.parametrize("conv", [VIDEO, PICTURES], ids=lambda conv: conv.name)
@pytest.mark.parametrize("equal", [False, True], ids=["as the framework", "channels last"])
def test_window_lies_as_its_convolution_reads_it(conv: Conv, equal: bool) -> None:
    read: list[int] = []

    def relaid(x: torch.Tensor, *args: Any) -> torch.Tensor:
        read.append(x.stride(1))
        return torch_convolve(x, *args)

    ops, asked = operators(Way(relaid=relaid) if equal else Way(padded=False, biased=False))
    window = ops.plain_window(conv, X)
    assert torch.equal(window.own(), X)
    assert (window.data.stride(1) == 1) is equal
    if conv.history:
        window.past().zero_()
    main, bias, skip = ops.conv(window).take()
    assert main is not None
    assert bias is conv.module.bias
    assert skip is None
    assert read == ([1] if equal else [])
    assert set(asked) == {(conv, shape_read(conv), (1, 1))}
    torch.testing.assert_close(main + bias.view(1, -1, 1, 1, 1), expected(conv))


@pytest.mark.parametrize("conv", [VIDEO, PICTURES], ids=lambda conv: conv.name)
def test_window_of_the_framework_s_way_has_its_zeros_in_memory(conv: Conv) -> None:
    ops, asked = operators(FRAMEWORK)
    window = ops.plain_window(conv, X)
    assert window.data.shape[-2:] == ((6, 8) if conv is VIDEO else (4, 6))
    window.data[:, :, : window.history] = 0
    main, bias, _ = ops.conv(window).take()
    assert bias is None
    assert torch.equal(main, expected(conv))
    assert set(asked) == {(conv, shape_read(conv), (1, 1))}  # one question, however the window lies


def test_shortcut_is_computed_channels_last_where_that_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    shortcut = Conv(name="shortcut", module=nn.Conv3d(3, 8, 1).to(memory_format=torch.channels_last_3d))
    given = X.contiguous(memory_format=torch.channels_last_3d)
    read: list[torch.Tensor] = []

    def relaid(x: torch.Tensor, *args: Any) -> torch.Tensor:
        read.append(x)
        return torch_convolve(x, *args)

    def sum_into(main: torch.Tensor, bias: torch.Tensor, skip: None, out: torch.Tensor) -> None:
        out.copy_(main + bias.view(1, -1, 1, 1, 1))

    monkeypatch.setattr(strict_kernels, "sum_into", sum_into)
    ops, _ = operators(Way(relaid=relaid))
    torch.testing.assert_close(ops.pointwise(shortcut, given), shortcut.module(X))
    assert [x.data_ptr() for x in read] == [given.data_ptr()]


class Engine:
    """In place of cuDNN's engines, one: torch's convolution, changed by `spoil`."""

    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor] = lambda out: out) -> None:
        self.spoil = spoil

    def convolve(self, *args: Any) -> torch.Tensor:
        return self.spoil(torch_convolve(*args))

    def equal(self, *args: Any) -> Any:
        *layer, same = args
        return self.convolve if same(self.convolve(*layer)) else None


def found(conv: Conv, engines: Any) -> Way:
    ways = Ways()
    ways.engines = engines
    return ways.of(conv, shape_read(conv), (1, 1), X)


def without_bias(conv: Conv, value: float | None = None) -> Conv:
    """The CPU rounds a bias inside a convolution in another way than outside."""
    module = type(conv.module)(3, 8, 3, bias=False)
    if value is not None:
        nn.init.constant_(module.weight, value)
    return Conv(name="without bias", module=module)


@pytest.mark.parametrize("conv", [VIDEO, PICTURES], ids=lambda conv: conv.name)
def test_engine_with_the_framework_s_bits_is_taken(conv: Conv) -> None:
    engine = Engine()
    assert found(without_bias(conv), engine).relaid == engine.convolve


@pytest.mark.parametrize("value", [None, 0.0], ids=["weights drawn", "weights zero"])
def test_engine_with_other_bits_is_not_taken_whatever_the_model_holds(value: float | None) -> None:
    conv = without_bias(VIDEO, value)
    spoiled = Engine(lambda out: out * (1 + 2**-23))
    assert found(conv, spoiled).relaid is torch_convolve  # channels last, by torch
    assert found(conv, Engine()).relaid is not torch_convolve


def test_way_found_gives_the_framework_s_bits() -> None:
    for conv in (VIDEO, PICTURES):
        way, module = found(conv, None), conv.module
        assert way.relaid is None
        x = torch.randn(shape_read(conv), generator=torch.Generator().manual_seed(1))
        args = (x, module.weight, module.bias, module.stride, (1, 1))
        (out, late), (framework, none) = way(*args), FRAMEWORK(*args)
        assert none is None
        assert torch.equal(out if late is None else out + late.view(-1, *[1] * (out.dim() - 2)), framework)


@pytest.mark.parametrize("bad", [(), ("relaid",), ("relaid", "late"), ("relaid", "late", "unpadded")])
def test_first_way_that_is_equal_is_taken_from_the_fastest_to_the_framework_s(
    bad: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Way] = []

    def gives(sample: object, way: Way) -> bool:
        tried.append(way)
        kinds = (way.relaid is not None, not way.biased, not way.padded)
        return not any(kind and name in bad for kind, name in zip(kinds, ("relaid", "late", "unpadded")))

    monkeypatch.setattr(strict_convolutions._Sample, "gives", gives)
    last = [Way(relaid=torch_convolve)]
    first = [Way(padded=False, biased=False), Way(biased=False), Way(padded=False), FRAMEWORK]
    way = found(VIDEO, Engine(lambda out: out + 1))
    expected = {0: last[0], 1: first[0], 2: first[2], 3: FRAMEWORK}[len(bad)]
    assert way == expected
    order = last + first
    assert list(dict.fromkeys(tried)) == order[: order.index(expected) + (expected != FRAMEWORK)]


def test_convolutions_of_the_same_sizes_share_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[Any] = []
    find = strict_convolutions._find
    monkeypatch.setattr(strict_convolutions, "_find", lambda *args: sizes.append(args[1:3]) or find(*args))  # type: ignore[func-returns-value]
    ways, other = Ways(), Conv(name="other", module=nn.Conv3d(3, 8, 3))
    assert ways.of(VIDEO, (1, 3, 4, 4, 6), (1, 1), X) is ways.of(other, (1, 3, 4, 4, 6), (1, 1), X)
    ways.of(other, (1, 3, 4, 4, 6), (0, 1), X)  # another padding
    ways.of(without_bias(VIDEO), (1, 3, 4, 4, 6), (1, 1), X)
    ways.of(VIDEO, (1, 3, 4, 4, 6), (1, 1), X.double().half())
    assert sizes == [((1, 3, 4, 4, 6), padding) for padding in ((1, 1), (0, 1), (1, 1), (1, 1))]


def test_memory_that_does_not_suffice_leaves_the_framework_s_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError

    conv = without_bias(VIDEO)
    assert found(conv, Engine(full)).relaid is None
    assert found(VIDEO, Engine(full)) == found(VIDEO, None) != FRAMEWORK  # the other comparisons stand
    monkeypatch.setattr(F, "conv3d", full)
    assert found(VIDEO, None) is FRAMEWORK


def test_cudnn_that_finds_no_engine_in_the_memory_left_leaves_the_framework_s_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_found(*args: Any) -> Any:
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    assert found(VIDEO, Engine(none_found)) == found(VIDEO, None)
    monkeypatch.setattr(F, "conv3d", none_found)
    assert found(VIDEO, None) is FRAMEWORK


def test_small_sizes_are_compared_on_more_than_one_draw() -> None:
    calls: list[torch.Tensor] = []

    def spoil(out: torch.Tensor) -> torch.Tensor:
        calls.append(out.clone())
        return out if len(calls) == 1 else out * (1 + 2**-23)

    assert found(without_bias(VIDEO), Engine(spoil)).relaid is torch_convolve
    assert not torch.equal(calls[0], calls[1])


def added(sample: Any, at_once: int, *, first_channels: bool) -> torch.Tensor:
    """The sums of a convolution without padding, so many terms at a time, taps or channels innermost: as a tensor
    core does it, which is not here. In the dtype of the values, without the bias."""
    dims = sample.x.dim() - 2
    windows = sample.x.double()
    for dim, size in enumerate(sample.weight.shape[2:], 2):
        windows = windows.unfold(dim, size, 1)
    places, taps = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
    order = (*taps, 1) if first_channels else (1, *taps)
    windows = windows.permute(0, *places, *order).flatten(1 + dims)
    weight = sample.weight.double().permute(0, *((*range(2, 2 + dims), 1) if first_channels else range(1, 2 + dims)))
    total = torch.zeros(())
    for terms, factors in zip(windows.split(at_once, -1), weight.flatten(1).split(at_once, -1), strict=True):
        total = (total + terms @ factors.T).float()
    return total.movedim(-1, 1).to(sample.x.dtype)


@pytest.mark.parametrize("channels", [3, 12, 16, 32, 33, 96])
@pytest.mark.parametrize("layer", [nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_order_of_adding_shows_in_few_outputs(dtype: torch.dtype, layer: Any, channels: int) -> None:
    """It shows in one of ten thousand outputs of normal values, of which small sizes have too few."""
    module = layer(channels, 8, 3, bias=False).to(dtype)
    shape = (1, channels, *[3] * (module.weight.dim() - 4), 5, 16)
    sample = strict_convolutions._Sample.of(module, shape, (0, 0), torch.empty(0, dtype=dtype), 0)
    assert sample.expected.isfinite().all()
    assert float(sample.x.float().abs().max()) < 2**15, "fp16 ends at 2**16"
    one, other = (added(sample, 16, first_channels=first) for first in (True, False))
    assert one.shape == sample.expected.shape
    assert one.numel() < 500
    assert (one != other)[..., :6].float().mean() > 0.05
    right = sample.x[..., 8:].float()
    assert right.std() == pytest.approx(1.0, abs=0.2), "as a model may have it"
    assert (one != other)[..., 8:].float().mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 2, 6])
def test_bias_that_is_added_late_shows_at_every_width(width: int, dtype: torch.dtype) -> None:
    """The CPU adds it before it rounds; at each width some biases are not zero where terms do not cancel."""
    module = nn.Conv3d(32, 32, 3).to(dtype)
    way, _ = strict_convolutions._find(module, (1, 32, 5, 2, width), (1, 1), torch.empty(0, dtype=dtype), None)
    assert way.biased
    biases = [
        strict_convolutions._Sample.of(module, (1, 32, 5, 2, width), (1, 1), torch.empty(0, dtype=dtype), seed).bias
        for seed in (0, 1)
    ]
    assert all(bias is not None and bias.ne(0).tolist() == [False, True] * 16 for bias in biases)


def test_host_settles_with_the_peers_before_it_waits_for_a_comparison() -> None:
    ways, settled = Ways(), []
    ways.settle = lambda: settled.append(len(ways._found))
    for _ in range(2):
        ways.of(VIDEO, (1, 3, 4, 4, 6), (1, 1), X)
    ways.of(PICTURES, (2, 3, 4, 6), (1, 1), X)
    assert settled == [0, 1]  # before each, and for none that is known


@pytest.mark.parametrize("flag", ["enabled", "benchmark", "deterministic"])
def test_flags_that_change_torch_s_engine_are_compared_for(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Ways()
    ways.of(VIDEO, (1, 3, 4, 4, 6), (1, 1), X)
    monkeypatch.setattr(torch.backends.cudnn, flag, not getattr(torch.backends.cudnn, flag))
    ways.of(VIDEO, (1, 3, 4, 4, 6), (1, 1), X)
    assert len(ways._found) == 2


def test_strided_window_too_short_for_an_output_is_only_kept() -> None:
    ops, asked = operators(FRAMEWORK)
    strided = Conv(name="strided", module=nn.Conv3d(3, 3, (3, 1, 1), stride=(2, 1, 1)))
    ops._empty_window(strided, (1, 3, 2, 4, 6), X, history=0)
    assert asked == []
    ops._empty_window(strided, (1, 3, 3, 4, 6), X, history=0)
    assert [shape for _, shape, _ in asked] == [(1, 3, 3, 4, 6)]


def test_weights_that_are_not_aligned_are_convolved_as_the_framework_does() -> None:
    """cuDNN takes another kernel for them, and so may round in another way."""
    conv = without_bias(VIDEO)
    storage = torch.empty(conv.module.weight.numel() + 1)
    conv.module.weight = nn.Parameter(storage[1:].view_as(conv.module.weight))
    assert found(conv, Engine()) is FRAMEWORK


def test_comparing_leaves_torch_s_random_numbers_as_they_were() -> None:
    state = torch.get_rng_state()
    found(VIDEO, Engine())
    assert torch.equal(torch.get_rng_state(), state)


def test_names_that_stay_channels_first_are_known_once_an_input_of_that_shape_has_been_through() -> None:
    ways, conv = Ways(), without_bias(VIDEO)
    ways.engines = Engine()  # type: ignore[assignment]
    ways.of(conv, (1, 3, 4, 4, 6), (1, 1), X)
    assert ways.channels_first((1, 16, 3, 8, 8)) is None
    ways.finished((1, 16, 3, 8, 8))
    assert ways.channels_first((1, 16, 3, 8, 8)) == []
    assert ways.channels_first((1, 16, 5, 8, 8)) is None
    ways.engines = None
    ways.of(PICTURES, (2, 3, 4, 6), (1, 1), X)
    assert ways.channels_first((1, 16, 3, 8, 8)) is None  # a size that was not there before: another mode or dtype
    ways.finished((1, 16, 3, 8, 8))
    assert ways.channels_first((1, 16, 3, 8, 8)) == [PICTURES.name]


@pytest.mark.parametrize("conv", [VIDEO, PICTURES], ids=lambda conv: conv.name)
def test_sum_lies_as_the_framework_s_own_call_leaves_it(conv: Conv, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN leaves some of two videos channels last, and a norm adds in the order of memory; the CPU leaves none so."""

    def last(own: Callable[..., torch.Tensor], layout: torch.memory_format) -> Callable[..., torch.Tensor]:
        return lambda *args: own(*args).contiguous(memory_format=layout)

    monkeypatch.setattr(F, "conv2d", last(F.conv2d, torch.channels_last))
    monkeypatch.setattr(F, "conv3d", last(F.conv3d, torch.channels_last_3d))
    monkeypatch.setattr(strict_kernels, "sum_into", lambda main, bias, skip, out: out.copy_(main))
    for engines in (Engine(), None):
        ops = StrictCudaOperators(Checks())
        ops.checks.ways.engines = engines  # type: ignore[assignment]
        window = ops.plain_window(without_bias(conv), X)
        window.past().zero_()
        assert ops.resolve(ops.conv(window)).stride(1) == 1


def test_lengths_are_cast_inside_only_where_every_one_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared for each size, stride and alignment: on a GPU, torch's reduction takes its order from them."""
    asked: list[tuple[Any, ...]] = []

    def adds_alike(x: torch.Tensor) -> bool:
        asked.append((tuple(x.shape), x.stride(), x.data_ptr() % 16))
        return bool(x.shape[0] == 1)

    norm = Norm(module=nn.Identity(), scale=1.0, eps=1e-12)
    checks, settled = Checks(), []
    checks.ways.settle = lambda: settled.append(True)
    monkeypatch.setattr(strict_checks, "_adds_alike", adds_alike)
    monkeypatch.setattr(strict_checks, "_lengths", lambda x, dtype=None: x[:, :1] * (1 if dtype is None else 2))
    one, two = torch.ones(1, 4, 2, 3, 3).bfloat16(), torch.ones(2, 4, 2, 3, 3).bfloat16()
    apart, late = two.transpose(1, 2).contiguous().transpose(1, 2), torch.ones(73).bfloat16()[1:].view(1, 4, 2, 3, 3)
    found = [checks.sizes(norm, x, Sizes.WIDE).unique().item() for x in (one, two, apart, late, one, two)]
    assert found == [2.0, 1.0, 1.0, 2.0, 2.0, 1.0]
    assert len(set(asked)) == len(asked) == len(settled) == 4
    assert checks.sizes(norm, two, Sizes.NARROW).dtype == torch.bfloat16
    assert checks.sizes(norm, two, Sizes.WIDE).dtype == torch.float32


def test_norm_with_a_faster_forward_of_its_framework_is_compared_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With vLLM-Omni's lossless fast path every norm of the decoder has one."""
    asked: list[tuple[bool, bool]] = []

    def same_norm(norm: Norm, like: torch.Tensor, way: Sizes) -> bool:
        asked.append(("forward" in norm.module.__dict__, torch.is_autocast_enabled("cpu")))
        return way is Sizes.WIDE

    monkeypatch.setattr(strict_checks, "_same_norm", same_norm)
    vae, like = make_vae("2.1", torch.bfloat16), torch.empty(0, dtype=torch.bfloat16)
    graph = read_graph(vae, rebound=lambda module: module is vae.decoder.norm_out)
    checks = ParallelVae(graph).operators.checks
    faster, strange = graph.norm_out, graph.stages[0].blocks[0].norm1  # type: ignore[union-attr]
    assert checks.norm(faster, like) is Sizes.WIDE
    for norm in (faster, strange):
        norm.module.forward = partial(type(norm.module).forward, norm.module)
    assert checks.norm(faster, like) is Sizes.WIDE
    assert checks.norm(strange, like) is Sizes.OWN
    with torch.autocast("cpu", torch.bfloat16):
        assert checks.norm(faster, like) is checks.norm(faster, like) is Sizes.WIDE
    assert asked == [(False, False), (True, False), (True, True)]
    assert Checks().norm(faster, like) is Sizes.OWN


@pytest.mark.parametrize("offset", [0, 3])
def test_comparison_of_lengths_is_of_values_that_lie_as_those_at_hand(
    offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    own = strict_checks._lengths

    def lengths(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        seen.append((tuple(x.shape), x.stride(), x.data_ptr() % 16, bool((x != 0).any())))
        return own(x, dtype)

    monkeypatch.setattr(strict_checks, "_lengths", lengths)
    x = torch.zeros(offset + 2 * 2 * 5 * 6).bfloat16()[offset:].view(2, 2, 5, 6).transpose(1, 2)[:, :, None]
    assert strict_checks._adds_alike(x)
    assert seen[0] == (tuple(x.shape), x.stride(), x.data_ptr() % 16, True)
