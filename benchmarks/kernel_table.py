"""Writes the table of the Triton kernels that the Wan VAEs launch, which the package compiles ahead of time.

    python benchmarks/kernel_table.py

It needs diffusers and Triton, and no GPU: the operators run on fake tensors, which have shapes, strides and a device
and no values, and what they launch is noted. Checks that compare values are taken as passed.

cuDNN on the GPU at hand decides how a strict convolution may run: channels last; channels first, with the zeros around
a picture left to cuDNN; channels first with the zeros in memory, and the bias added later, or inside. What a call
launches if all convolutions run alike is noted, for each of the four ways, and what mixtures of them launch, drawn with
fixed seeds. A mixture beyond those may launch a kernel that is listed for calls of another size alone. A row says which
calls launch it by which of these: all by cuDNN's engines, which run channels last; a mixture; all by torch, where
cuDNN's frontend is not installed: strict convolutions channels first, fast ones without Winograd's method. And it says
which calls were seen to launch it on a kind of GPU, by the records of launched_kernels.py; some of those are drawn by
no mixture here, and count as one's.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain, product
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wanshim.cli.warm import LAYOUTS, make_vae, work_of
from wanshim.core.decoding import find_binding
from wanshim.core.decoding.model.encoder_graph import Graph
from wanshim.core.decoding.model.graph import Conv
from wanshim.core.decoding.modes.network import VaeRun
from wanshim.core.decoding.modes.single import SINGLE
from wanshim.core.decoding.operators import (
    attention_kernel,
    fast_kernels,
    fused,
    strict_checks,
    strict_kernels,
    winograd,
)
from wanshim.core.decoding.operators.base import FastOperators, Operators
from wanshim.core.decoding.operators.convolution import Convolution
from wanshim.core.decoding.operators.kernel_compiler import ACTIVATIONS, TABLE, UNALIGNED, kernel_set
from wanshim.core.decoding.operators.strict_checks import Checks, Sizes
from wanshim.core.decoding.operators.strict_convolutions import FRAMEWORK, Way
from wanshim.core.decoding.operators.strict_cuda import StrictCudaOperators
from wanshim.core.decoding.operators.weights import FastWeights
from wanshim.core.decoding.operators.winograd import DeferredOutput
from wanshim.core.shared.optional_triton import triton

MODULES = (strict_kernels, fast_kernels, winograd, attention_kernel)
SIZES = ((44, 80), (60, 104), (32, 52), (30, 52), (32, 54), (30, 54))  # of latents, one for each of `kernel_sets`
DTYPE = torch.bfloat16
# Ways of a convolution that runs channels first; cuDNN may take another engine where the zeros do not lie in memory.
FIRST = (Way(padded=False, biased=False), Way(padded=True, biased=False), FRAMEWORK)
MIXTURES = 16
RECORDS = sorted(Path(__file__).with_name("results").glob("launched_kernels_*.json"))
_Ops = Callable[[Graph], Any]
_WayOf = Callable[[int, tuple[int, ...]], Way | None]  # of a convolution's number and input; None: channels last


class Recorder:
    """Stands in place of a kernel and notes what it is launched with."""

    def __init__(self, name: str, kernel: Any, note: Callable[[str, dict[str, Any], dict[str, Any]], None]) -> None:
        self._name, self._kernel, self._note = name, kernel, note
        self._signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **given: Any) -> None:
        options = {name: given.pop(name) for name in list(given) if name not in self._signature.parameters}
        values = self._signature.bind(*args, **given).arguments
        self._note(self._name, {each.name: _kind(each, values[each.name]) for each in self._kernel.params}, options)


def _kind(parameter: Any, value: Any) -> Any:
    """As `kernel_compiler.Launch` has an argument."""
    if isinstance(value, torch.Tensor):
        name = ACTIVATIONS if value.dtype == DTYPE else str(value.dtype).removeprefix("torch.")
        return name + (UNALIGNED if value.storage_offset() * value.itemsize % 16 else "")
    if parameter.is_constexpr:
        return value
    if isinstance(value, float):
        return "fp32"
    if value == 1 and not parameter.do_not_specialize:
        return "1"
    kind = "i32" if -(2**31) <= value < 2**31 else "i64"
    return f"{kind}/16" if value % 16 == 0 and not parameter.do_not_specialize else kind


def make_table(
    layouts: tuple[str, ...] = tuple(LAYOUTS),
    sizes: tuple[tuple[int, int], ...] = SIZES,
    verbs: tuple[str, ...] = ("decode", "encode"),
) -> list[dict[str, Any]]:
    """The rows of the table, in the order of use; those of the first size come first."""
    rows: dict[str, dict[str, Any]] = {}

    def note(kind: str, by: str, name: str, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        launch = {"kernel": name, "arguments": arguments, "options": options}
        calls = rows.setdefault(json.dumps(launch), {"of": {}, **launch})["of"].setdefault(by, [])
        if kind not in calls:
            calls.append(kind)

    either = (*FIRST, *[None] * len(FIRST))
    draws = {  # the first so many are for several videos at once, too
        "engines": (1, [((None,), 0)]),
        "both": (2, [(either, seed) for seed in range(MIXTURES)]),
        "torch": (3, [*(((way,), 0) for way in FIRST), *((FIRST, seed) for seed in range(6))]),
    }
    strict = [
        (by, partial(strict_operators, way_of=partial(drawn, ways, seed)), at < several)
        for by, (several, drawings) in draws.items()
        for at, (ways, seed) in enumerate(drawings)
    ]
    by_engines, by_torch = (partial(fast_operators, by_winograd=each) for each in (by_winograd, None))
    fast = [("engines", by_engines, False), ("torch", by_torch, False)]
    passes = ((True, strict, 9, 1), (False, fast, 17, 2))
    for videos, (height, width), layout, verb in product((1, 2), sizes, layouts, verbs):
        for is_strict, operators, frames, chunk in passes:
            graph, mode = fake_graph(layout, verb)
            pixels = LAYOUTS[layout].factor
            work = work_of(f"{pixels * height}x{pixels * width}x{frames}", LAYOUTS[layout], (verb,), ())
            latent, shape = ((videos, *each[1:]) for each in (work.latent, getattr(work, graph.source)))
            called = kernel_set(graph, shape, strict=is_strict)
            for by, make, several in operators:
                if videos == 1 or several:
                    with patched(partial(note, called, by)), mode, torch.no_grad(), make(graph) as ops:
                        given = torch.empty(shape, dtype=DTYPE, device="cuda")
                        run(graph, ops, given, latent, chunk)
    for path in RECORDS:
        record = json.loads(path.read_text(encoding="utf-8"))
        for launch in record["launches"]:
            calls = launch.pop("of")
            of = rows.setdefault(json.dumps(launch), {"of": {}, **launch})["of"]
            of.setdefault(record["capability"], []).extend(calls)
            listed = set(chain(*(of.get(by, []) for by in draws)))
            of.setdefault("both", []).extend(call for call in calls if call not in listed)
    return list(chain(*map(of_each_framework, rows.values())))


def of_each_framework(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The launch, and where it is a norm's, the one of a framework that computes lengths in the dtype of the values.
    One without SiLU is compared with each framework's norm."""
    if row["arguments"].get("SIZE") != "float32":
        return [row]
    narrow = row | {"arguments": row["arguments"] | {"SIZE": ACTIVATIONS}, "sizes": Sizes.NARROW.name}
    return [row | {"sizes": Sizes.WIDE.name} if row["arguments"]["SILU"] else row, narrow]


def fake_graph(layout: str, verb: str) -> tuple[Graph, FakeTensorMode]:
    vae = make_vae(layout, torch.device("meta"), DTYPE)
    mode = FakeTensorMode()
    with mode:
        for module in vae.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    fake = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                    module._parameters[name] = nn.Parameter(fake, requires_grad=False)
    return find_binding(vae, verb).graph, mode


def run(graph: Graph, ops: Operators, given: torch.Tensor, latent: tuple[int, ...], chunk: int) -> None:
    """All chunks, on one rank."""
    sink = SimpleNamespace(receiving=True, deliver=lambda *args: None, finish=lambda patches: patches)
    job, plan, comm = SimpleNamespace(latent=latent), SimpleNamespace(chunk=chunk), SimpleNamespace(rank=0)
    made: dict[str, Any] = {"job": job, "plan": plan, "comm": comm, "sink": sink}
    SINGLE.run(VaeRun(graph=graph, ops=ops, given=given, **made))


@contextmanager
def recorded(recorder: type[Recorder], note: Callable[[str, dict[str, Any], dict[str, Any]], None]) -> Iterator[None]:
    """A recorder stands in place of each kernel."""
    with ExitStack() as stack:
        for module, name, kernel in kernels():
            made = recorder(f"{module.__name__.rpartition('.')[2]}.{name}", kernel, note)
            stack.enter_context(mock.patch.object(module, name, made))
        yield


@contextmanager
def patched(note: Callable[[str, dict[str, Any], dict[str, Any]], None]) -> Iterator[None]:
    """Kernels are noted, and what asks the GPU, or for values, is answered."""
    card = SimpleNamespace(shared_memory_per_block_optin=227 << 10)
    with ExitStack() as stack:
        stack.enter_context(recorded(Recorder, note))
        for target, name, value in (
            (torch.cuda, "get_device_properties", lambda device: card),
            (torch.cuda, "device_of", lambda tensor: nullcontext()),
            (strict_checks, "_same_norm", same_norm),
            (strict_checks, "_same_silu", same_silu),
            (strict_checks, "_adds_alike", lambda x: True),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def kernels() -> Iterator[tuple[ModuleType, str, Any]]:
    """The kernels that are launched; those that kernels call are their parts."""
    for module in MODULES:
        for name, value in vars(module).items():
            if isinstance(value, triton.JITFunction) and re.search(rf"^ +{name}\[", inspect.getsource(module), re.M):
                yield module, name, value


def same_norm(norm: Any, like: torch.Tensor, way: Sizes) -> bool:
    """What `strict_checks._same_norm` launches of a release that computes lengths in fp32."""
    x = like.new_empty((2, norm.gamma.numel(), 2, 16, 24))
    sizes = strict_checks.sizes(norm, x, way)
    strict_kernels.norm_into(x, sizes, norm.gamma, norm.scale, torch.empty_like(x), silu=False)
    return way is Sizes.WIDE


def same_silu(like: torch.Tensor) -> bool:
    x, one = like.new_empty((1, 1, 1, 1, 2**16)), like.new_empty(1)
    strict_kernels.norm_into(x, torch.empty_like(x), one, 1.0, torch.empty_like(x), silu=True)
    return True


def drawn(ways: tuple[Way | None, ...], seed: int, at: int, shape: tuple[int, ...]) -> Way | None:
    """One of `ways`, the same whenever this convolution has an input of this shape."""
    return Random(f"{seed} {at} {shape}").choice(ways)


@contextmanager
def strict_operators(graph: Graph, way_of: _WayOf) -> Iterator[Operators]:
    checks, numbers = Checks(), {conv: at for at, conv in enumerate(graph.convs())}
    checks.prepare(graph, torch.empty(0, dtype=DTYPE, device="cuda"), None)

    def way(conv: Conv, shape: tuple[int, ...], padding: tuple[int, int], like: torch.Tensor) -> Way:
        weight, x = like.new_empty(conv.module.weight.shape), like.new_empty(shape)
        strict_kernels.channels_last(weight)
        strict_kernels.channels_last(x)
        channels_first = way_of(numbers[conv], shape)
        if channels_first is not None:
            return channels_first
        full = padding if len(shape) == 4 else (0, *padding)
        out = Convolution(weight, tuple(conv.module.stride), full).output_shape(x)
        return Way(relaid=convolve_channels_last, strides=torch.empty(out, device="meta").stride())

    with mock.patch.object(checks.ways, "of", way):
        yield StrictCudaOperators(checks)


@contextmanager
def fast_operators(graph: Graph, by_winograd: Any) -> Iterator[Operators]:
    with FastWeights(graph, DTYPE) as weights:
        yield FastOperators(weights, None, convolve_channels_last, by_winograd)


def convolve_channels_last(
    x: torch.Tensor, weight: torch.Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
) -> torch.Tensor:
    """An empty result, laid out as on a GPU. A fake tensor's own lies channels first where torch has no CUDA."""
    return Convolution(weight, stride, padding).empty(x)


def by_winograd(
    x: torch.Tensor, weight: torch.Tensor, split: Callable[[], torch.Tensor], padding: tuple[int, ...]
) -> DeferredOutput:
    """As `Engines.by_winograd` in one piece, where that is always faster; what it compares and times first included."""
    conv = Convolution(weight, (1, 1, 1), padding)
    shape, out = torch.Size(conv.output_shape(x)), conv.empty(x)
    products = winograd.Buffers(x, shape).multiply(x, split(), lambda *args: None)
    for main in (products, out):
        fused.sum_into(main, None, None, out)
    return DeferredOutput(x, shape, split(), [(0, shape[2], lambda *args: None)])


def numbered(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table as it is written, with the names of calls once."""
    named = chain(*(row["of"].values() for row in rows))
    at = {call: number for number, call in enumerate(dict.fromkeys(chain(*named)))}
    launches = [
        row | {"of": {by: sorted(at[call] for call in calls) for by, calls in row["of"].items() if calls}}
        for row in rows
    ]
    return {"what": "benchmarks/kernel_table.py", "calls": list(at), "launches": launches}


def text_of(record: dict[str, Any]) -> str:
    """One row of each list a line."""
    parts = []
    for name, value in record.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in value) if isinstance(value, list) else ""
        parts.append(f' "{name}": ' + (f"[\n{lines}\n ]" if lines else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = make_table()
    table = numbered(rows)
    TABLE.write_text(text_of(table), encoding="utf-8")
    counts = Counter(call for row in rows for call in set(chain(*row["of"].values())))
    print(f"{TABLE}: {len(rows)} launches", *(f"{counts[call]:4} {call}" for call in table["calls"]), sep="\n")


if __name__ == "__main__":
    main()
