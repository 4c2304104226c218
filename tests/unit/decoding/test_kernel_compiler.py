"""Kernels compiled beside the program: calls are the framework's until they are there.

There is no GPU here: Triton compiles for one without it, and doubles stand for its driver and for slow compilations.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from threading import Timer
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.decoding.tiny import make_latent, make_vae
from wanshim.cli import warm
from wanshim.core.decoding import ParallelVae, VaeFallback, VaeOptions, call, parallelize_decode, read_graph, run
from wanshim.core.decoding.dry_run import dry_run, usual_shapes
from wanshim.core.shared import kernel_compiler
from wanshim.core.shared.kernel_compiler import Kernel, KernelCompiler, missing
from wanshim.core.shared.kernel_launch import Launch, launch, noted

triton = pytest.importorskip("triton", reason="this torch comes without Triton")
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


def made(name: str = "a") -> Launch:
    return Launch(name, (), (), ())


def kernel(*, done: bool = False, on_disk: bool = False) -> Kernel:
    found = type("Known", (Kernel,), {"on_disk": on_disk})(made(), CUDA)
    if done:
        found.done.set()
    return found


def transposed(columns: int, dtype: torch.dtype = BF16) -> Launch:
    """A launch of the smallest kernel."""
    from wanshim.core.decoding.operators.strict_kernels import _transpose

    with noted() as launches:
        x = torch.empty(1, dtype=dtype, device="meta")
        launch(_transpose, (1,), x, x, 96, columns, SIDE=64, num_warps=4)
    return next(iter(launches))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[SimpleNamespace]:
    """Triton's driver of an H100 that is not there, and its device, which can be entered."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from wanshim.core.decoding.operators.strict_kernels import _transpose

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda source, metadata: None,
    )
    monkeypatch.setattr(type(driver), "active", made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _transpose.device_caches.clear()
    yield made
    _transpose.device_caches.clear()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelCompiler]:
    """In place of the process's."""
    made = KernelCompiler()
    for module in (kernel_compiler, run, call):
        monkeypatch.setattr(module, "COMPILER", made)
    yield made
    made.stop()


@pytest.mark.usefixtures("driver")
def test_what_is_compiled_is_what_a_launch_looks_up() -> None:
    from wanshim.core.decoding.operators.strict_kernels import _transpose

    transposed(27).compile()
    cache = _transpose.device_caches[0][0]
    assert len(cache) == 1
    x = torch.empty(64, dtype=BF16)
    _transpose.warmup(x, x, 96, 35, SIDE=64, grid=(1,), num_warps=4)
    assert len(cache) == 1
    _transpose.warmup(x, x, 96, 32, SIDE=64, grid=(1,), num_warps=4)
    assert len(cache) == 2


@pytest.mark.usefixtures("driver")
def test_launches_are_told_apart_as_triton_does() -> None:
    """By its own key, for the values that a kernel of ours may get."""
    from wanshim.core.decoding.operators.fast_kernels import _sum
    from wanshim.core.decoding.operators.strict_kernels import _norm

    memory = torch.empty(64, dtype=BF16), torch.empty(64, dtype=torch.float32)
    pointers = [*memory, memory[0][1:], memory[0][8:]]
    numbers = [0, 1, 2, 16, 24, 2**31 - 1, 2**31, 2**31 + 16, 2**32, 2**32 + 1]
    for function, tensors in (
        (_norm, ("X", "SIZE", "GAMMA", "OUT")),
        (_sum, ("MAIN", *["BIAS", "SKIP", "GAMMA", "SHIFT", "OUT", "KEPT"])),
    ):
        binder = function.device_caches[0][-1]
        given = dict.fromkeys(function.arg_names, 3) | dict.fromkeys(tensors, memory[0])
        for name in (tensors[0], "C" if function is _norm else "bias", "T", "W", "oy", "scale"):  # of each kind
            values = pointers if name in tensors else [0.5, 2.0] if name == "scale" else numbers
            pairs = set()
            for value in values:
                with noted() as launches:
                    launch(function, (1,), **given | {name: value})
                pairs.add((*launches, str(binder(**given | {name: value})[1])))
            ours, triton_s = ({pair[at] for pair in pairs} for at in (0, 1))
            assert len(pairs) == len(ours) == len(triton_s), name


@pytest.mark.slow
@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_every_launch_of_a_usual_call_compiles(strict: bool) -> None:
    graph = read_graph(warm.make_vae("2.1", torch.device("meta"), BF16))
    for each in dry_run(graph, usual_shapes(graph)[0], BF16, strict=strict, by="engines"):
        each.compile()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch, compiler: KernelCompiler) -> list[Launch]:
    """The launches that are compiled on a GPU that is not there, each in no time."""
    compiled: list[Launch] = []
    monkeypatch.setattr(Launch, "compile", lambda self: compiled.append(self))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(Kernel, "_entry", lambda self: SimpleNamespace(put=lambda *args, **kinds: None))
    monkeypatch.setattr(run, "engines_on", lambda *about: None)  # they ask the GPU
    return compiled


@pytest.mark.parametrize(
    ("framework", "learning", "device", "compiles"),
    [
        (True, 0.1, "cuda:0", True),
        (True, None, "cuda:0", False),
        (False, 0.1, "cuda:0", False),
        (True, 0.1, "cpu", False),
    ],
)
def test_kernels_are_compiled_ahead_where_a_framework_can_step_in(
    framework: bool, learning: float | None, device: str, compiles: bool, ahead: list[Launch]
) -> None:
    vae, shape = make_vae("2.1", BF16), (1, 4, 3, 8, 8)
    graph = read_graph(vae) if framework else replace(read_graph(vae), framework=None)
    operators = ParallelVae(graph, None, VaeOptions(), learning).operators
    found = [operators.kernels_of(shape, torch.device(device), BF16) for _ in range(2)]
    assert bool(found[0]) is compiles
    assert found[0] == found[1]
    operators.wait_for_kernels(None)
    assert {*ahead} == {each.launch for each in found[0]}
    assert len(ahead) == len(found[0]), "each once"


def test_call_that_cannot_be_run_dry_compiles_its_kernels_itself(ahead: list[Launch]) -> None:
    operators = ParallelVae(read_graph(make_vae("2.1", BF16))).operators
    assert operators.kernels_of((4, 3, 8, 8), CUDA, BF16) == []


@pytest.mark.usefixtures("ahead", "compiler")
@pytest.mark.parametrize("engines", [True, False])
def test_kernels_of_usual_sizes_are_compiled_before_the_first_call(
    engines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ways that cuDNN may take instead, too, and behind the likelier ones."""
    vae, device = make_vae("2.1", BF16), torch.device("cpu")  # a graph does not keep the VAE
    graph, asked = read_graph(vae), list[tuple[Any, str]]()

    def dry(graph: Any, shape: Any, dtype: torch.dtype, *, strict: bool, by: str) -> list[Launch]:
        asked.append((shape, by))
        return [made(f"{shape} {by}")]

    monkeypatch.setattr(run, "dry_run", dry)
    monkeypatch.setattr(run.VaeOperators, "_compiles_ahead", lambda self, device: True)
    monkeypatch.setattr(run, "engines_on", lambda *about: object() if engines else None)
    operators = ParallelVae(graph).operators
    operators.wait_for_kernels(None)
    usual = usual_shapes(graph)
    ways = ("engines", "either") if engines else ("torch",)
    assert sorted(asked) == sorted((shape, by) for shape in usual for by in ways)
    for shape in usual:
        assert all(each.done.is_set() for each in operators.kernels_of(shape, device, BF16))
    operators.wait_for_kernels((1, 4, 3, 5, 7))
    assert all(each.done.is_set() for each in operators.kernels_of((1, 4, 3, 5, 7), device, BF16))
    assert asked[-1] == ((1, 4, 3, 5, 7), ways[0])


def test_call_is_the_frameworks_while_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vae, latent, compiling = make_vae("2.1"), make_latent(2), kernel()
    expected = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    monkeypatch.setattr(handle.parallel.operators, "kernels_of", lambda *call: [compiling])
    assert torch.equal(vae.decode(latent).sample, expected)
    assert handle.parallel.plan is None
    assert "left to the framework: its kernels are being compiled" in caplog.text
    compiling.done.set()
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
    monkeypatch.setattr(parallel.operators, "kernels_of", lambda *call: [kernel()])
    expected = vae.decode(latent).sample
    if strict:
        frames = parallel(latent, lean=True)
        assert frames is not None
        assert torch.equal(frames, expected)
    for lean in (False, *[True] * (not strict)):
        with pytest.raises(VaeFallback, match="kernels are being compiled"):
            parallel(latent, lean=lean)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_call_that_autocast_casts_is_strict_without_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae, latent = make_vae("2.1", dtype), make_latent(1, dtype=dtype)
    handle = parallelize_decode(vae)
    monkeypatch.setattr(handle.parallel.operators, "kernels_of", lambda *call: [kernel()])
    with torch.autocast("cpu", BF16):
        vae.decode(latent)
    waits_for_kernels = handle.parallel.plan is None
    assert waits_for_kernels == (dtype == BF16)
    handle.remove()


def test_kernels_on_disk_are_waited_for_and_others_are_not() -> None:
    loading = kernel(on_disk=True)
    timer = Timer(0.05, loading.done.set)
    timer.start()
    assert not missing([loading, kernel(done=True)], 60)
    timer.join()
    began = perf_counter()
    assert missing([kernel(on_disk=True), kernel()], 60)
    assert perf_counter() - began < kernel_compiler._LOADING / 2
    assert not missing([], 60)


def test_kernels_on_disk_are_waited_for_no_longer_than_other_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    began = perf_counter()
    assert missing([kernel(on_disk=True)], 0.05)
    monkeypatch.setattr(kernel_compiler, "_LOADING", 0.05)
    assert missing([kernel(on_disk=True)], 60)
    assert 0.1 <= perf_counter() - began < 20


@pytest.mark.usefixtures("driver")
def test_kernel_that_a_process_has_compiled_is_on_disk_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Kernel(transposed(27), CUDA)
    assert not first.on_disk
    first.compile()
    assert first.done.is_set()
    assert Kernel(transposed(35), CUDA).on_disk
    assert not Kernel(transposed(32), CUDA).on_disk
    assert not Kernel(transposed(27, torch.float16), CUDA).on_disk, "another dtype is another kernel"
    monkeypatch.setattr(triton, "__version__", "0")
    assert not Kernel(transposed(27), CUDA).on_disk, "another Triton compiles anew"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: 1 / 0)
    assert not Kernel(transposed(27), CUDA).on_disk, "it cannot be seen"


def test_nothing_is_begun_while_a_call_computes(monkeypatch: pytest.MonkeyPatch, compiler: KernelCompiler) -> None:
    vae, latent = make_vae("2.1"), make_latent(1)
    begun, waits = list[Kernel](), list[bool]()
    monkeypatch.setattr(Kernel, "compile", lambda self: (begun.append(self), self.done.set()))
    handle = parallelize_decode(vae)
    own = run.CallRun.run

    def run_plans(*args: Any) -> Any:
        (asked,) = compiler.start([made()], CUDA, awaited=True)
        waits.append(not asked.done.wait(0.2))
        return own(*args)

    monkeypatch.setattr(run.CallRun, "run", run_plans)
    compiler.do(lambda: None)  # as the kernels of usual sizes are asked for
    vae.decode(latent)
    assert waits == [True]
    (asked,) = compiler.start([made()], CUDA, awaited=True)
    assert asked.done.wait(20)
    assert {*begun} == {asked}
    handle.remove()
    with compiler.paused():
        compiler.start([made("b")], CUDA, awaited=False)
        compiler.stop()
    compiler.wait()
    assert {*begun} == {asked}


def test_what_a_call_needs_is_compiled_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelCompiler, "_work", lambda self: None)
    compiler, order = KernelCompiler(), []
    monkeypatch.setattr(Kernel, "compile", lambda self: order.append(self.launch.kernel))
    compiler.do(lambda: order.append("later"))
    compiler.start(map(made, "abc"), CUDA, awaited=False)
    compiler.start(map(made, "cd"), CUDA, awaited=True)
    for work in compiler._waiting:
        work()
    assert "".join(order) == "cdlaterabc"


@pytest.mark.parametrize("works", [True, False])
def test_compiler_takes_each_launch_once_and_survives_a_triton_that_does_not_load(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, torch.device]] = []
    active = SimpleNamespace(get_current_target=lambda: None) if works else None
    monkeypatch.setattr(kernel_compiler, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=active)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(taken.append(device)))
    monkeypatch.setattr(Launch, "compile", lambda self: None)
    compiler, other = KernelCompiler(), torch.device("cuda", 1)
    with compiler.paused():
        first = compiler.start(map(made, "ab"), CUDA, awaited=False)
        assert compiler.start([made("a")], CUDA, awaited=True) == first[:1]
        second = compiler.start([made("a")], other, awaited=True)
    for each in (*first, *second):
        assert each.done.wait(20)
    compiler.wait()
    assert sorted(map(str, taken)) == ["cuda:0", "cuda:0", "cuda:1"]


def test_compilation_that_fails_is_left_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(Launch, "compile", fail)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    compiler = KernelCompiler()
    compiler.do(fail)
    failed = compiler.start(map(made, "ab"), CUDA, awaited=True)
    assert all(each.done.wait(20) for each in failed)
    assert not missing(failed, 60)


ENDS = """
import time, torch
from contextlib import nullcontext
from types import SimpleNamespace
from wanshim.core.shared import kernel_compiler as k

k.triton = SimpleNamespace()
class Slow:
    def compile(self):
        print("begun", flush=True)
        time.sleep(1)
        print("ended", flush=True)

torch.cuda.device = nullcontext
asked = [Slow() for _ in range(50)], torch.device("cuda", 0)
k.COMPILER.start(*asked, awaited=True)
k.COMPILER.do(lambda: k.COMPILER.start(*asked, awaited=True))
time.sleep(0.3)
print("the program ends", flush=True)
"""


@pytest.mark.slow
def test_process_ends_after_the_kernel_under_way() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], text=True, capture_output=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["begun", "the program ends", "ended"]
    assert done.stderr == ""
