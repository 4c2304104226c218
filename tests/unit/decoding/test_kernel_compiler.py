"""Kernels compiled ahead: the table is what the operators launch, and calls are the framework's until they are there.

There is no GPU here: Triton compiles for one without it, and doubles stand for its driver and for slow compilations.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from threading import Event, Timer
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import kernel_table as recorded
from tests.distributed.decoding.tiny import make_latent, make_vae
from wanshim.core.decoding import ParallelVae, VaeFallback, VaeOptions, call, parallelize_decode, read_graph, run
from wanshim.core.decoding.operators import kernel_compiler, strict_checks
from wanshim.core.decoding.operators.convolution import torch_convolve
from wanshim.core.decoding.operators.kernel_compiler import (
    ACTIVATIONS,
    BY_ANY,
    BY_TORCH,
    NUMBERS,
    UNALIGNED,
    Kernel,
    KernelCompiler,
    Launch,
    by_engines,
    calls_seen,
    is_usual,
    kernel_set,
    kernel_table,
    missing,
    needed,
    patience,
)
from wanshim.core.decoding.operators.layout import used_strides
from wanshim.core.decoding.operators.strict_checks import Checks, Sizes, sizes_of
from wanshim.core.decoding.proof import CompareState

triton = pytest.importorskip("triton", reason="this torch comes without Triton")
LAUNCH = Launch(of={"torch": ("decode",)}, kernel="strict_kernels._norm", arguments={}, options={})
CALL = ("decode", BY_TORCH)
CUDA = torch.device("cuda", 0)
RECORDS = [json.loads(path.read_text(encoding="utf-8")) for path in recorded.RECORDS]


def started(compiler: KernelCompiler, *launches: Launch, dtype: torch.dtype = torch.bfloat16) -> list[Kernel]:
    return compiler.start({CALL: launches}, CUDA, dtype)[CALL]


def kernel(**changed: Any) -> Kernel:
    return Kernel(LAUNCH, CUDA, torch.bfloat16, **changed)


def compiling() -> Kernel:
    """Longer than it takes to load a kernel from disk."""
    return kernel(began=1e-9)


def test_table_names_kernels_and_their_arguments() -> None:
    assert len(kernel_table()) > 50
    for launch in kernel_table():
        module, name = launch.kernel.split(".")
        found = getattr(import_module(f"wanshim.core.decoding.operators.{module}"), name)
        assert list(launch.arguments) == found.arg_names
        for parameter in found.params:
            value = launch.arguments[parameter.name]
            assert parameter.is_constexpr is not isinstance(value, str), (launch.kernel, parameter.name)
            if isinstance(value, str) and value not in NUMBERS:
                dtype = value.removesuffix(UNALIGNED)
                assert dtype == ACTIVATIONS or isinstance(getattr(torch, dtype), torch.dtype)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(2400)
def test_table_is_what_the_operators_launch() -> None:
    table = recorded.numbered(recorded.make_table())
    assert recorded.text_of(table) == kernel_compiler.TABLE.read_text(encoding="utf-8"), (
        "python benchmarks/kernel_table.py writes the table"
    )


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("size", [(44, 80), (30, 52)], ids=str)
@pytest.mark.parametrize("verb", ["decode", "encode"])
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
def test_table_has_what_any_mixture_of_ways_launches(layout: str, verb: str, size: tuple[int, int]) -> None:
    """What cuDNN allows differs from convolution to convolution: channels last, zeros and bias left to it."""
    (channels, pixels), (height, width) = (48, 16) if layout == "2.2" else (16, 8), size
    latent = (1, channels, 3, height, width)
    listed, plain = (
        {
            json.dumps([each.kernel, each.arguments, each.options])
            for each in kernel_table()
            if not set(by).isdisjoint(each.of)
        }
        for by in (BY_ANY, BY_TORCH)
    )
    launched: set[str] = set()

    def note(name: str, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        launched.add(json.dumps([name, arguments, options]))

    given_shape = latent if verb == "decode" else (1, 3, 9, pixels * height, pixels * width)
    for ways, expected in (((*recorded.FIRST, None), listed), (recorded.FIRST, plain)):
        launched.clear()
        for seed in range(recorded.MIXTURES, recorded.MIXTURES + 12):
            draw = partial(recorded.drawn, ways, seed)
            graph, mode = recorded.fake_graph(layout, verb)
            with recorded.patched(note), mode, torch.no_grad():
                given = torch.empty(given_shape, dtype=torch.bfloat16, device="cuda")
                with recorded.strict_operators(graph, draw) as ops:
                    recorded.run(graph, ops, given, latent, 1)
        assert len(launched) > 10
        assert launched <= expected


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dims", [2, 3])
def test_convolution_noted_channels_last_lies_as_a_real_one(dims: int, stride: int) -> None:
    """As a CPU's does. A fake one of torch lies channels first where torch has no CUDA, and kernels were missing."""
    x, weight = (torch.randn(6, 5, *[8] * dims), torch.randn(7, 5, *[3] * dims))
    layout = torch.channels_last if dims == 2 else torch.channels_last_3d
    x, weight = x.to(memory_format=layout), weight.to(memory_format=layout)
    real = torch_convolve(x, weight, (stride,) * dims, (1,) * dims)
    noted = recorded.convolve_channels_last(x, weight, (stride,) * dims, (1,) * dims)
    assert noted.stride(1) == 1
    assert (noted.shape, noted.stride()) == (real.shape, real.stride())


def test_table_has_sums_of_convolutions_that_lie_channels_last() -> None:
    """A convolution's result and its shortcut's lie channels last or first, each for itself."""
    sums = [each for each in kernel_table() if each.kernel == "strict_kernels._sum" and each.arguments["HAS_SKIP"]]
    lie = {tuple(each.arguments[f"{tensor}c"] == "1" for tensor in "xs") for each in sums}
    assert lie == {(False, False), (False, True), (True, False), (True, True)}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> SimpleNamespace:
    """Triton's driver of an H100 that is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda source, metadata: None,
    )
    monkeypatch.setattr(type(driver), "active", made)
    return made


def launches_of(name: str) -> list[Launch]:
    return [each for each in kernel_table() if each.kernel == name]


def test_what_is_compiled_is_what_a_launch_looks_up(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from wanshim.core.decoding.operators.strict_kernels import _transpose

    _transpose.device_caches.clear()
    first = next(each for each in launches_of("strict_kernels._transpose") if each.arguments["columns"] == "i32")
    first.compile(torch.bfloat16)
    cache = _transpose.device_caches[0][0]
    assert len(cache) == 1
    x = torch.empty(64, dtype=torch.bfloat16)
    _transpose.warmup(x, x, 96, 27, SIDE=64, grid=(1,), num_warps=4)
    assert len(cache) == 1
    _transpose.warmup(x, x, 96, 32, SIDE=64, grid=(1,), num_warps=4)
    assert len(cache) == 2
    _transpose.device_caches.clear()


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_every_launch_compiles(driver: Any) -> None:
    for launch in kernel_table():
        launch.compile(torch.bfloat16)


def test_graphs_of_wans_vaes_are_known_and_others_are_not() -> None:
    ways, sizes = (("engines",), BY_TORCH, BY_ANY), [each.name for each in Sizes]
    for layout, verb, strict in product(("2.1", "2.2"), ("decode", "encode"), (True, False)):
        graph, _ = recorded.fake_graph(layout, verb)
        calls = needed(graph, torch.float16, strict=strict, ways=ways, sizes=sizes)
        assert set(calls) == set(product(kernel_compiler.kernel_sets(graph, strict=strict), ways))
        for (name, _), launches in calls.items():
            assert len(launches) > 5
            assert {*map(id, launches)} <= {*map(id, calls[name, BY_ANY])}
        assert needed(graph, torch.float32, strict=strict, ways=ways, sizes=sizes) == {}
    tiny = read_graph(make_vae("2.1"))
    assert needed(tiny, torch.bfloat16, strict=True, ways=ways, sizes=sizes) == {}


def test_kernels_that_only_engines_lead_to_are_told_apart() -> None:
    """Without engines strict convolutions lie channels first, and fast ones do not use Winograd's method."""
    for each in kernel_table():
        if each.kernel in ("winograd._split", "fast_kernels._sum_of_products"):
            assert "torch" not in each.of
        if each.kernel == "strict_kernels._sum" and "1" in (each.arguments["xc"], each.arguments["oc"]):
            assert "torch" not in each.of, each.arguments
        if each.kernel == "attention_kernel._attend":
            assert "torch" in each.of


def test_calls_wait_for_all_that_a_gpu_was_seen_to_launch() -> None:
    """Of a usual size for what calls of that kind launched, whatever the size; others for that and for more."""
    assert {record["capability"] for record in RECORDS} == {"sm90"}
    launched: dict[str, set[str]] = {}
    for launch in (dict(launch) for record in RECORDS for launch in record["launches"]):
        for name in launch.pop("of"):
            launched.setdefault(name, set()).add(json.dumps(launch))
    assert set(launched) == calls_seen("sm90")
    for name, keys in launched.items():
        awaited, any_size = (
            {
                json.dumps({"kernel": each.kernel, "arguments": each.arguments, "options": each.options})
                for each in kernel_table()
                if each.is_of(name, by) and each.sizes != Sizes.NARROW.name
            }
            for by in (by_engines("sm90"), BY_ANY)
        )
        assert keys <= awaited <= any_size, name
        assert len(awaited) <= len(keys) + 8, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_which_lengths_a_framework_computes_shows_without_a_comparison(verb: str, dtype: torch.dtype) -> None:
    """diffusers casts to fp32 before, other frameworks do not."""
    vae = make_vae("2.1", dtype)
    graph = read_graph(vae, verb)
    assert sizes_of(graph, dtype) == {Sizes.WIDE}
    norm = next(iter(graph.norms())).module
    other = type("Other", (type(norm),), {"forward": lambda self, x: F.normalize(x, dim=1) * self.scale * self.gamma})
    norm.__class__ = other
    norm.register_forward_pre_hook(lambda module, args: pytest.fail("hooks are for the user's calls"))
    assert sizes_of(graph, dtype) == set(Sizes) - {Sizes.OWN}, "one so and the others so"
    under_autocast: list[bool] = []
    other.forward = lambda self, x: under_autocast.append(torch.is_autocast_enabled("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        sizes_of(graph, dtype)
    assert set(under_autocast) == {False}, "a call under it is another one"
    other.forward = lambda self, x: x
    assert sizes_of(graph, dtype) == set(Sizes)
    other.forward = None
    assert sizes_of(graph, dtype) == set(Sizes)


@pytest.mark.parametrize("size", [Sizes.WIDE, Sizes.NARROW])
def test_norms_are_compared_by_kernels_that_are_compiled_ahead(size: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a framework of either kind; the norms are compared one way after the other."""
    launched: list[tuple[str, dict[str, Any]]] = []

    def same_norm(norm: Any, like: torch.Tensor, way: Sizes) -> bool:
        x = like.new_empty((2, norm.gamma.numel(), 2, 16, 24))
        strict_checks.kernels.norm_into(
            x, strict_checks.sizes(norm, x, way), norm.gamma, norm.scale, torch.empty_like(x), silu=False
        )
        return way is size

    graph, mode = recorded.fake_graph("2.1", "decode")
    with recorded.patched(lambda name, arguments, options: launched.append((name, arguments))), mode:
        monkeypatch.setattr(strict_checks, "_same_norm", same_norm)
        assert Checks().prepare(graph, torch.empty(0, dtype=torch.bfloat16, device="cuda"), None)
    calls = needed(graph, torch.bfloat16, strict=True, ways=[by_engines("sm90"), BY_ANY], sizes=[size.name])
    assert len(launched) >= 2
    for launches in calls.values():
        ahead = [(each.kernel, dict(each.arguments)) for each in launches]
        assert [each for each in launched if each not in ahead] == []


def awaited(
    parallel: ParallelVae, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Launch], list[Launch]]:
    """What a call waits for, and all that is compiled, in order. Without a call's kernels it is the framework's."""
    asked: list[Launch] = []
    waited: list[Kernel] = []

    def start(calls: Any, device: torch.device, dtype: torch.dtype) -> Any:
        asked.extend({id(each): each for launches in calls.values() for each in launches}.values())
        return {call: [Kernel(each, device, dtype) for each in launches] for call, launches in calls.items()}

    monkeypatch.setattr(run.COMPILER, "start", start)
    monkeypatch.setattr(run, "missing", lambda kernels, *seconds: waited.extend(kernels) or True)
    parallel.operators._kernels.clear()
    with FakeTensorMode():
        given = torch.empty(shape, dtype=dtype, device="cuda")
    assert parallel._why_left(given, CompareState(dtype=dtype), casts=False) == call.NOT_COMPILED
    return [each.launch for each in waited], asked


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("verb", ["decode", "encode"])
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
@pytest.mark.parametrize(
    ("engines", "gpu", "latent", "by"),
    [
        (True, (9, 0), (1, 3, 88, 160), by_engines("sm90")),
        (True, (9, 0), (1, 3, 8, 16), BY_ANY),
        (True, (9, 0), (1, 1, 88, 160), BY_ANY),
        (True, (8, 0), (1, 3, 88, 160), BY_ANY),
        (False, (9, 0), (1, 3, 88, 160), BY_TORCH),
        (False, (9, 0), (1, 3, 16, 16), BY_TORCH),
    ],
)
def test_call_waits_for_what_its_convolutions_lead_to_on_this_gpu(
    engines: bool,
    gpu: tuple[int, int],
    latent: tuple[int, int, int, int],
    by: tuple[str, ...],
    layout: str,
    verb: str,
    strict: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the others are compiled behind, where a convolution of an unlike size may lead to them."""
    vae = recorded.make_vae(layout, torch.device("meta"), torch.bfloat16)  # a graph does not keep it
    graph = read_graph(vae, verb)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    monkeypatch.setattr(run, "engines_on", lambda *about: object() if engines else None)
    monkeypatch.setattr(run, "sizes_of", lambda graph, dtype: {Sizes.WIDE})
    parallel = ParallelVae(graph, options=VaeOptions(strict=strict))
    batch, frames, height, width = latent
    pixels = recorded.LAYOUTS[layout].factor
    video = (batch, 3, 4 * frames - 3, pixels * height, pixels * width)
    shape = (batch, graph.input_channels, frames, height, width) if verb == "decode" else video
    waited, asked = awaited(parallel, shape, monkeypatch)
    name = kernel_set(graph, shape, strict=strict)
    wide = [each for each in kernel_table() if each.sizes in ("", Sizes.WIDE.name)]
    assert {*map(id, waited)} == {id(each) for each in wide if each.is_of(name, by)}
    every = by if by == BY_TORCH else (*BY_ANY, *by)
    names = kernel_compiler.kernel_sets(graph, strict=strict)
    assert {*map(id, asked)} == {id(each) for each in wide if any(each.is_of(each_name, every) for each_name in names)}
    if engines and gpu == (9, 0):
        seen = calls_seen("sm90").intersection(names)
        known = {id(each) for each in wide if any(each.is_of(name, by_engines("sm90")) for name in seen)}
        usual = [id(each) in known for each in asked]
        assert usual == sorted(usual, reverse=True), "the others come last"
        assert set(usual) == {True, False} or not strict  # one kernel serves fast calls either way
    with FakeTensorMode():
        given = torch.empty(shape[1:], dtype=torch.bfloat16, device="cuda")
        assert parallel._why_left(given, CompareState(dtype=torch.bfloat16), casts=False) is None


@pytest.mark.parametrize(
    "other",
    ["cudnn.benchmark", "cudnn.deterministic", "cudnn.enabled", "deterministic", "fp16", "a kind of call not seen"],
)
def test_what_a_gpu_was_seen_to_launch_holds_for_nothing_else(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vae = recorded.make_vae("2.1", torch.device("meta"), torch.bfloat16)  # a graph does not keep it
    graph = read_graph(vae)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(run, "engines_on", lambda *about: object())
    monkeypatch.setattr(run, "sizes_of", lambda graph, dtype: {Sizes.WIDE})
    parallel, shape = ParallelVae(graph), (1, 16, 3, 88, 160)
    usual, _ = awaited(parallel, shape, monkeypatch)
    dtype = torch.float16 if other == "fp16" else torch.bfloat16
    if other.startswith("cudnn"):
        name = other.removeprefix("cudnn.")
        monkeypatch.setattr(torch.backends.cudnn, name, not getattr(torch.backends.cudnn, name))
    elif other == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    elif dtype == torch.bfloat16:
        monkeypatch.setattr(kernel_compiler, "calls_seen", lambda gpu: frozenset({"another one"}))
    waited, _ = awaited(parallel, shape, monkeypatch, dtype)
    assert len(waited) > len(usual)
    assert len(waited) == sum(
        each.is_of(kernel_set(graph, shape, strict=True), BY_ANY) and each.sizes != Sizes.NARROW.name
        for each in kernel_table()
    )


def test_sizes_of_which_the_launches_are_known() -> None:
    assert len(calls_seen("sm90")) > 20
    assert not calls_seen("sm80")
    decoder, encoder = read_graph(make_vae("2.1")), read_graph(make_vae("2.1"), "encode")
    for graph, pixels in ((decoder, 1), (encoder, 8)):
        channels = graph.input_channels
        for frames, height, width, usual in ((3, 48, 80, True), (3, 48, 79, False), (2, 88, 160, False)):
            given = 4 * frames - 3 if pixels > 1 else frames
            assert is_usual(graph, (1, channels, given, pixels * height, pixels * width)) == usual


@pytest.mark.parametrize(
    ("height", "width", "lengths"),
    [
        (90, 160, "rows of 16, pictures of 16"),
        (60, 104, "rows of 8, pictures of 16"),
        (80, 44, "rows of 4, pictures of 16"),
        (30, 52, "rows of 4, pictures of 4"),
        (32, 54, "rows of 2, pictures of 16"),
        (62, 106, "rows of 2, pictures of 4"),
        (61, 104, "rows of 8, pictures of 16"),
        (61, 105, "rows of 2, pictures of 4"),
    ],
)
def test_sizes_of_one_set_of_kernels(height: int, width: int, lengths: str) -> None:
    decoder, encoder = read_graph(make_vae("2.1")), read_graph(make_vae("2.1"), "encode")
    kind = f"decode, 4 to {decoder.conv_in.out_channels} channels, strict"
    latent, video = (1, 4, 3, height, width), (1, 3, 9, 8 * height, 8 * width)
    assert kernel_set(decoder, latent, strict=True) == f"{kind}, {lengths}, one video"
    assert kernel_set(decoder, (2, *latent[1:]), strict=True) == f"{kind}, {lengths}, several videos"
    assert kernel_set(encoder, video, strict=True).endswith(f"strict, {lengths}, one video")
    assert kernel_set(encoder, video, strict=False).endswith("channels, fast")


def test_call_is_the_frameworks_while_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vae, latent, kernels = make_vae("2.1"), make_latent(2), [compiling()]
    expected = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    monkeypatch.setattr(handle.parallel.operators, "kernels_ahead", lambda device, dtype: {CALL: kernels})
    monkeypatch.setattr(run, "kernel_set", lambda *args, **mode: "decode")
    assert torch.equal(vae.decode(latent).sample, expected)
    assert handle.parallel.plan is None
    assert "left to the framework: its kernels are being compiled" in caplog.text
    kernels[0].done.set()
    assert torch.equal(vae.decode(latent).sample, expected)
    assert handle.parallel.plan is not None
    handle.remove()


@pytest.mark.parametrize("strict", [True, False])
def test_strict_call_that_asked_for_tiles_does_not_get_them_while_kernels_are_compiled(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have other frames than later ones."""
    vae, latent = make_vae("2.1"), make_latent(1)
    parallel = ParallelVae(read_graph(vae), options=VaeOptions(strict=strict))
    monkeypatch.setattr(parallel.operators, "kernels_ahead", lambda device, dtype: {CALL: [compiling()]})
    monkeypatch.setattr(run, "kernel_set", lambda *args, **mode: "decode")
    expected = vae.decode(latent).sample
    if strict:
        frames = parallel(latent, lean=True)
        assert frames is not None
        assert torch.equal(frames, expected)
    for lean in (False, *[True] * (not strict)):
        with pytest.raises(VaeFallback, match="kernels are being compiled"):
            parallel(latent, lean=lean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_call_that_autocast_casts_is_strict_without_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae, latent = make_vae("2.1", dtype), make_latent(1, dtype=dtype)
    handle = parallelize_decode(vae)
    monkeypatch.setattr(handle.parallel.operators, "kernels_ahead", lambda device, dtype: {CALL: [compiling()]})
    monkeypatch.setattr(run, "kernel_set", lambda *args, **mode: "decode")
    with torch.autocast("cpu", torch.bfloat16):
        vae.decode(latent)
    waits_for_kernels = handle.parallel.plan is None
    assert waits_for_kernels == (dtype == torch.bfloat16)
    handle.remove()


def test_kernels_that_may_be_on_disk_are_waited_for() -> None:
    loading = kernel()
    timer = Timer(0.05, loading.done.set)
    timer.start()
    assert not missing([loading], 60)
    timer.join()
    assert missing([loading, compiling()], 60) is True


@pytest.mark.parametrize(
    ("took", "left", "seconds", "waits"),
    [(0.05, 1, 0.1, True), (0.05, 3, 0.1, False), (0.2, 1, 0.1, False), (0.05, 1, 0.0, False), (None, 1, 0.1, False)],
)
def test_call_waits_for_what_will_be_compiled_soon(
    took: float | None, left: int, seconds: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the others took; a call that would wait for longer is the framework's at once."""
    monkeypatch.setattr(kernel_compiler, "_threads", lambda: 1)
    compiler = KernelCompiler()
    monkeypatch.setattr(kernel_compiler, "COMPILER", compiler)
    monkeypatch.setattr(KernelCompiler, "loads", False)
    compiler._kernels = {(0, CUDA, torch.bfloat16): kernel(took=took or 0.0)}
    if took is not None:
        compiler._kernels[0, CUDA, torch.bfloat16].done.set()
    under_way = [kernel(began=perf_counter()) for _ in range(left)]
    for each in under_way:
        each.done.wait = lambda timeout, done=each.done: done.set() or True  # type: ignore[method-assign]
    assert missing(under_way, 60, seconds) is not waits
    assert all(each.awaited for each in under_way)
    assert under_way[0].done.is_set() is waits


@pytest.mark.parametrize("slowest", [0.4, 0.2])
def test_pace_is_of_what_was_compiled_and_counts_what_is_under_way(
    slowest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_compiler, "_threads", lambda: 1)
    compiler, ended = KernelCompiler(), [kernel(began=1.0, took=slowest), kernel(began=1.0, took=0.01)]
    compiler._kernels = {(at, CUDA, torch.bfloat16): each for at, each in enumerate(ended)}
    for each in ended:
        each.done.set()
    # A kernel that was loaded says nothing of one that is compiled; on a fast machine they cannot be told apart.
    mean = slowest if slowest > 0.3 else (slowest + 0.01) / 2
    asked = [kernel()]
    assert compiler.soon(asked, mean + 0.01)
    assert not compiler.soon(asked, mean - 0.01)
    asked[0].began = 1.0
    compiler._kernels |= {(2, CUDA, torch.bfloat16): asked[0], (3, CUDA, torch.bfloat16): kernel()}
    assert compiler.soon(asked, mean + 0.01), "it is counted once, and what has not begun comes later"
    compiler._kernels[4, CUDA, torch.bfloat16] = kernel(began=1.0)
    assert not compiler.soon(asked, mean + 0.01), "another one is under way"
    assert compiler.soon(asked, 2 * mean + 0.01)


def test_call_that_has_waited_in_vain_is_the_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = KernelCompiler()
    monkeypatch.setattr(kernel_compiler, "COMPILER", compiler)
    monkeypatch.setattr(KernelCompiler, "loads", False)
    monkeypatch.setattr(compiler, "soon", lambda kernels, seconds: True)
    began = perf_counter()
    assert missing([kernel()], 60, 0.05)
    assert missing([kernel()], 0.05, 60), "other ranks wait, too"
    assert 0.1 <= perf_counter() - began < 20


def test_patience_is_a_share_of_what_the_framework_takes() -> None:
    decoder, encoder = read_graph(make_vae("2.1")), read_graph(make_vae("2.1"), "encode")
    seconds = patience(decoder, (1, 4, 21, 88, 160))
    assert 0.3 < seconds < 0.5, "diffusers takes 2.9 to 4.7 s on an H100"
    assert patience(encoder, (1, 3, 81, 704, 1280)) == seconds
    assert patience(decoder, (2, 4, 21, 88, 160)) == 2 * seconds


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that can be entered."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


@pytest.mark.usefixtures("driver", "here")
def test_kernels_that_a_process_has_compiled_are_waited_for_in_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = launches_of("strict_kernels._transpose")[:2]

    def later(kernels: list[Kernel]) -> bool:
        """Of a process in which they take long to load: are they missing?"""
        slow = [replace(each, done=Event(), began=1e-9, took=0.0) for each in kernels]
        timer = Timer(0.05, lambda: [each.done.set() for each in slow])
        timer.start()
        found = missing(slow, 60)
        timer.join()
        return found

    compiler = KernelCompiler()
    kernels = started(compiler, launches[0])
    assert kernels[0].done.wait(60)
    both = [*kernels, Kernel(launches[1], CUDA, torch.bfloat16)]
    assert later(both), "one of two was never compiled"
    both = started(compiler, *launches)
    assert both[1].done.wait(60)
    for thread in list(compiler._threads):
        thread.join(20)
    assert not later(both)
    assert not later(both[::-1])
    assert not later(both[:1]), "a call that launches the first alone"
    assert later(both[1:]), "no call launches the second alone"
    assert later([replace(each, dtype=torch.float16) for each in both]), "another dtype is another kernel"
    monkeypatch.setattr(triton, "__version__", "0")
    assert later(both), "another Triton compiles anew"


def test_nothing_is_begun_while_a_call_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    vae, latent = make_vae("2.1"), make_latent(1)
    compiler, begun = KernelCompiler(), []
    monkeypatch.setattr(call, "COMPILER", compiler)
    compiler.started = True  # another VAE has asked for kernels
    monkeypatch.setattr(Kernel, "compile", lambda self: (begun.append(self), self.done.set()))
    handle = parallelize_decode(vae)
    own = run.CallRun.run

    def run_plans(*args: Any) -> Any:
        (asked,) = started(compiler, LAUNCH)
        assert not asked.done.wait(0.2)
        return own(*args)

    monkeypatch.setattr(run.CallRun, "run", run_plans)
    vae.decode(latent)
    (asked,) = started(compiler, LAUNCH)
    assert asked.done.wait(20)
    assert begun == [asked]
    handle.remove()
    with compiler.paused():
        (other,) = started(compiler, LAUNCH, dtype=torch.float16)
        assert not other.done.wait(0.1)
        compiler.first([other])  # a call of another thread awaits it
        assert other.done.wait(20)
        started(compiler, LAUNCH, dtype=torch.float32)
        compiler.stop()
    assert begun == [asked, other]


def test_call_whose_kernels_another_one_has_compiled_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[list[Kernel]] = []
    cache = SimpleNamespace(put=lambda *args, **kinds: None)
    monkeypatch.setattr(kernel_compiler, "_note_of", lambda kernels: noted.append(kernels) or cache)
    monkeypatch.setattr(KernelCompiler, "_work", lambda self: None)
    compiler = KernelCompiler()
    first, second = started(compiler, LAUNCH, replace(LAUNCH, kernel="another"))
    assert noted == []
    first.on_disk = second.on_disk = True
    for _ in range(2):
        started(compiler, LAUNCH)
    assert noted == [[first]]


def test_what_is_asked_for_while_a_kernel_is_noted_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelCompiler, "_work", lambda self: None)
    compiler = KernelCompiler()
    kernels = started(compiler, LAUNCH)
    kernels[0].on_disk = True

    def note_of(noted: list[Kernel]) -> Any:
        """Others are asked for once it is looked up."""
        started(compiler, replace(LAUNCH, kernel="another"), dtype=torch.float16)
        return SimpleNamespace(put=lambda *args, **kinds: done.append(noted))

    done: list[list[Kernel]] = []
    monkeypatch.setattr(kernel_compiler, "_note_of", note_of)
    compiler._note(kernels[0])
    assert done == [kernels]
    compiler.stop()


def test_what_a_call_needs_is_compiled_before_the_others() -> None:
    compiler = KernelCompiler()
    kernels = [kernel() for _ in range(4)]
    compiler._waiting.extend(kernels)
    compiler.first(kernels[3:])
    assert list(compiler._waiting) == [kernels[3], *kernels[:3]]
    compiler.first(kernels[1:2])
    assert list(compiler._waiting) == [kernels[1], kernels[3], kernels[0], kernels[2]], "of the last call, of others"


@pytest.mark.parametrize("found", [None, "folder", "kernel"])
def test_on_a_machine_that_has_compiled_no_kernel_a_call_does_not_wait_to_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    cache = tmp_path / "triton"
    if found:
        cache.mkdir()
    if found == "kernel":
        (cache / "ABC").mkdir()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(cache))
    monkeypatch.setattr(Kernel, "compile", lambda self: None)
    compiler, asked = KernelCompiler(), []
    monkeypatch.setattr(kernel_compiler, "COMPILER", compiler)
    monkeypatch.setattr(kernel_compiler, "_are_on_disk", lambda kernels: asked.append(kernels))
    started(compiler)
    (cache / "DEF").mkdir(parents=True)  # by this process
    started(compiler)
    assert missing([compiling()], 60)
    assert bool(asked) == (found == "kernel")


def test_kernel_that_never_begins_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_compiler, "_MOST", 0.05)
    assert missing([kernel()], 60)


def test_kernels_on_disk_are_waited_for_no_longer_than_other_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Never(Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.0
            return False

    monkeypatch.setattr(kernel_compiler, "perf_counter", lambda: now[0])
    monkeypatch.setattr(kernel_compiler, "_are_on_disk", lambda kernels: True)
    assert missing([kernel(done=Never())], 2.0)
    assert 2.0 <= now[0] < 3.0


def test_compilation_that_fails_is_left_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(Launch, "compile", fail)
    failed = kernel()
    failed.compile()
    assert failed.done.is_set()
    assert not missing([failed], 60)


@pytest.mark.parametrize("works", [True, False])
def test_compiler_takes_each_launch_once_and_survives_a_triton_that_does_not_load(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    active = SimpleNamespace(get_current_target=lambda: None) if works else None
    monkeypatch.setattr(kernel_compiler, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=active)))
    monkeypatch.setattr(Kernel, "compile", lambda self: (taken.append(self.launch.kernel), self.done.set()))
    compiler = KernelCompiler()
    launches = [replace(LAUNCH, kernel=name) for name in "ab"]
    first = started(compiler, *launches)
    assert started(compiler, launches[0])[0] is first[0]
    other = started(compiler, launches[0], dtype=torch.float16)
    for each in (*first, *other):
        assert each.done.wait(20)
    assert sorted(taken) == ["a", "a", "b"]


ENDS = """
import time, torch
from types import SimpleNamespace
from wanshim.core.decoding.operators import kernel_compiler as k

k.triton = SimpleNamespace()
class Slow:
    kernel = "slow"
    def compile(self, dtype):
        print("begun", flush=True)
        time.sleep(1)
        print("ended", flush=True)

class Here:
    def __init__(self, device): pass
    def __enter__(self): pass
    def __exit__(self, *error): pass

torch.cuda.device = Here
k.COMPILER.start({"a call": [Slow() for _ in range(50)]}, torch.device("cuda", 0), torch.bfloat16)
time.sleep(0.3)
print("the program ends", flush=True)
"""


@pytest.mark.slow
def test_process_ends_after_the_kernel_under_way() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], text=True, capture_output=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["begun", "the program ends", "ended"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("framework", "learning", "device", "started"),
    [(True, 0.1, "cuda:0", 1), (True, None, "cuda:0", 0), (False, 0.1, "cuda:0", 0), (True, 0.1, "cpu", 0)],
)
def test_kernels_are_compiled_ahead_where_a_framework_can_step_in(
    framework: bool, learning: float | None, device: str, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    compiler = SimpleNamespace(start=lambda calls, device, dtype: asked.append(device) or {})  # type: ignore[func-returns-value]
    monkeypatch.setattr(run, "COMPILER", compiler)
    monkeypatch.setattr(run, "engines_on", lambda *about: None)  # they ask the GPU
    vae = make_vae("2.1", torch.bfloat16)
    graph = parallelize_decode(vae).binding.graph if framework else replace(read_graph(vae), framework=None)
    parallel = ParallelVae(graph, None, VaeOptions(), learning)
    for _ in range(2):
        parallel.operators.kernels_ahead(torch.device(device), torch.bfloat16)
    assert len(asked) == started
    parallel.operators.wait_for_kernels()


def test_strides_that_are_not_used_compile_no_kernel_of_their_own() -> None:
    x = torch.empty((2, 3, 4, 5, 6), device="meta")
    assert used_strides(x) == x.stride()
    assert used_strides(x[:1, :, :1]) == (0, 120, 0, 6, 1)
