"""The strict operators for CUDA, interpreted on the CPU: torch's bits, and the framework's way where a check says no.

fp16 stands for the 16-bit dtypes: the interpreter cuts bf16 off where a GPU rounds it. SiLU in the kernel needs CUDA's
library, so here torch computes it; tests/gpu compares it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.decoding.ptx import ptx
from wanshim.core.decoding.operators import strict_kernels as kernels

pytest.importorskip("triton", reason="this torch comes without Triton; strict then takes the framework's own steps")

KERNELS = """
import json
import torch
import torch.nn.functional as F
from wanshim.core.decoding.operators import strict_kernels as kernels
from wanshim.core.decoding.model.graph import Shortcut
from wanshim.core.decoding.operators.layout import duplicate, interleave

torch.manual_seed(0)
equal = {}

def note(name, a, b):
    equal[name] = equal.get(name, True) and torch.equal(a, b)

def twice(x):
    return x.repeat_interleave(2, 3).repeat_interleave(2, 4)

def first(*shape):
    return torch.zeros(shape, dtype=dtype)

def apart(b, c, t, h, w):
    return first(b, t, c, h, w).transpose(1, 2)

def last(b, c, t, h, w):
    return first(b, t, h, w, c).permute(0, 4, 1, 2, 3)

def inside(place):
    return lambda b, c, t, h, w: place(b, c, t + 2, h + 2, w + 2)[:, :, 2:, 1:-1, 1:-1]

def note_windows(name, work, expected):  # from each layout into another; their margins stay zero
    for place in (first,) if layout is apart else (last,) if layout is first else (first, last):
        out = inside(place)(*expected.shape)
        work(out)
        note(name, out, expected)
        equal[name] &= int(out._base.count_nonzero()) == int(out.count_nonzero())

# More channels, then more positions, than a program has.
for dtype, (b, c, t, h, w) in ((torch.float32, (1, 70, 2, 3, 5)), (torch.float16, (2, 12, 2, 5, 13))):
    make = lambda *shape: torch.randn(shape).to(dtype)
    bias, gamma = make(c), make(c)
    for layout in (first, apart, last):
        x = layout(b, c, t, h, w).copy_(make(b, c, t, h, w))
        skip = apart(b, c, t, h, w).copy_(make(b, c, t, h, w))
        sum_ = (x + bias.view(1, -1, 1, 1, 1)) + skip
        size = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).clamp_min_(1e-12)
        expected = F.normalize(x.float(), dim=1).to(dtype) * c**0.5 * gamma.view(-1, 1, 1, 1) + 0.0
        note_windows("norm", lambda out: kernels.norm_into(x, size, gamma, c**0.5, out, silu=False), expected)
        note_windows("sum", lambda out: kernels.sum_into(x, bias, skip, out), sum_)
        if layout is last:
            note_windows("sum", lambda out: kernels.sum_into(x, None, None, out), x)
        out = x.clone()
        kernels.sum_into(out, bias, skip, out)
        note("sum in place", out, sum_)
        note_windows("resize", lambda out: kernels.resize_into(x, bias, skip, out, pairs=False), twice(sum_))
        expected = twice(interleave(sum_))
        note_windows("pairs", lambda out: kernels.resize_into(x, bias, skip, out, pairs=True), expected)
        for factor_t in (1, 2):
            for begins in (False, True):
                dup = Shortcut(module=None, factor_t=factor_t, factor_s=2, group=2 * factor_t, out_channels=c)
                frames = 2 * factor_t - (factor_t - 1 if begins else 0)
                source, main = make(b, 2 * c, 2, 3, 4), layout(b, c, frames, 6, 8).copy_(make(b, c, frames, 6, 8))
                expected = (main + bias.view(1, -1, 1, 1, 1)) + duplicate(dup, source, begins)
                work = lambda out: kernels.add_duplicate(main, bias, source, dup, begins, out)
                out = apart(*main.shape)
                work(out)
                note("duplicate", out, expected)
                work(main)
                note("duplicate in place", main, expected)
    # Quotients near overflow and underflow, of infinities and of what is not a number.
    some = torch.tensor([0.0, -0.0, 1.0, 3e-38, 1e-45, 6e-8, 3e38, -torch.inf, torch.nan, 65504.0, 1e20, 1e-20])
    for x in (some.view(1, 1, 1, 3, 4), some[:3].view(1, 1, 1, 3, 1).expand(1, 1, 1, 3, 4)):
        x = x.to(dtype)
        for size in (some.view(1, 1, 1, 3, 4), some.flip(0).view(1, 1, 1, 3, 4), torch.full((1, 1, 1, 3, 4), 1e-12)):
            out = torch.empty_like(x)
            kernels.norm_into(x, size, torch.ones(1, dtype=dtype), 1.0, out, silu=False)
            same = (out == (x / size).to(dtype)) | (out.isnan() & (x / size).isnan())
            equal["norm"] &= bool(same.all())
    for shape in ((2, 12, 3, 5, 7), (3, 70, 9, 11), (1, 3, 1, 130, 1)):
        x = make(*shape)
        relaid = kernels.channels_last(x)
        note("channels last", relaid, x)
        equal["channels last"] &= relaid.movedim(1, -1).is_contiguous() and kernels.channels_last(relaid) is relaid
print(json.dumps(equal))
"""

# `BREAK` names a check that is made to find a difference.
DECODE = """
import contextlib, json, os
import torch
from tests.distributed.decoding.tiny import make_latent, make_vae
from wanshim.core.decoding import parallelize_decode, parallelize_encode, run
from wanshim.core.decoding.operators import strict_checks, strict_convolutions
from wanshim.core.decoding.operators.convolution import torch_convolve

class Torch:  # cuDNN needs a GPU: tests/gpu has its engines
    def equal(self, x, weight, stride, padding, same):
        return torch_convolve if weight.shape[0] > 8 and same(torch_convolve(x, weight, stride, padding)) else None

    call = staticmethod(contextlib.nullcontext)

torch.set_num_threads(1)
run.available = lambda like: True
if os.environ["BREAK"] == "nothing, channels last":
    run.engines_on = lambda *args: Torch()
if os.environ["BREAK"] == "norm":
    strict_checks._same_norm = lambda *args: False
if os.environ["BREAK"] == "conv":
    strict_convolutions._Sample.same = lambda *args: False
vae, latent = make_vae("2.1"), make_latent(2, 1, 1)
if os.environ["BREAK"] == "nothing, channels last":  # the CPU rounds a bias inside a convolution in another way
    for module in vae.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
            module.bias = None
expected = vae.decode(latent).sample
handle = parallelize_decode(vae)
names, of = set(), strict_convolutions.Ways.of
strict_convolutions.Ways.of = lambda ways, conv, *args: (names.add(conv.name), of(ways, conv, *args))[1]
equal = [torch.equal(vae.decode(latent).sample, expected) for _ in range(2)]
checks = handle.parallel.operators.checks
ways, count = checks.ways, len(names)
handle.remove()
video = torch.randn(1, 3, 9, 16, 24)
encoded = vae.encode(video).latent_dist.parameters
parallelize_encode(vae)
equal += [torch.equal(vae.encode(video).latent_dist.parameters, encoded) for _ in range(2)]
print(json.dumps({
    "equal": equal,
    "norms": sorted({way.name for way in checks._norms.values()}),
    "ways": [[way.relaid is not None, way.padded, way.biased] for way in ways._found.values()],
    "convs": count,
    "channels first": ways.channels_first(tuple(latent.shape)),
    "compared": sum(
        max(getattr(m, "kernel_size", (1,))) > 1 or (name.endswith("shortcut") and hasattr(m, "weight"))
        for name, m in vae.decoder.named_modules()
    ),
}))
"""


def interpreted(program: str, **variables: str) -> Any:
    """What `program` prints; Triton decides at import whether it interprets, so it runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1", **variables},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_strict_kernels_interpreted_give_the_bits_of_torch() -> None:
    equal = interpreted(KERNELS)
    works = {"norm", "sum", "sum in place", "resize", "pairs", "duplicate", "duplicate in place", "channels last"}
    assert set(equal) == works
    assert all(equal.values()), equal


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("broken", ["nothing", "nothing, channels last", "norm", "conv"])
def test_strict_decode_is_bit_identical_whatever_the_checks_say(broken: str) -> None:
    found = interpreted(DECODE, BREAK=broken)
    assert found["equal"] == [True] * 4
    if broken == "norm":  # not all norms in one kernel: the plain strict operators decode
        assert found["norms"] == ["OWN"]
        assert found["convs"] == 0
        assert found["channels first"] is None
        return
    assert found["norms"] == ["WIDE"]
    assert found["convs"] == found["compared"] > 0
    relaid, padded, biased = zip(*found["ways"])
    assert any(relaid) == (broken == "nothing, channels last")
    assert 0 < len(found["channels first"]) <= found["convs"]
    assert (len(found["channels first"]) < found["convs"]) == any(relaid)
    if broken == "conv":
        assert all(padded)
        assert all(biased)


@pytest.mark.slow
def test_strict_kernels_compile_for_a_gpu_and_move_eight_values_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The interpreter takes programs that the compiler does not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    channels, frames, height, width = 256, 4, 32, 64
    first = dict(zip("bctyx", (channels * frames * height * width, frames * height * width, height * width, width, 1)))
    last = dict(
        zip("bctyx", (channels * frames * height * width, 1, height * width * channels, width * channels, channels))
    )
    extents = {"C": channels, "T": frames, "n": height * width}
    flags = {"W": width, "SIDE": 64}

    def strides(letter: str, of: dict[str, int]) -> dict[str, int]:
        return {letter + dim: stride for dim, stride in of.items()}

    programs = [
        (kernels._norm, strides("x", first) | strides("s", first) | strides("o", last), {"SILU": True}),
        (
            kernels._sum,
            strides("x", last) | strides("s", first) | strides("o", first),
            {"HAS_BIAS": True, "HAS_SKIP": True},
        ),
        (
            kernels._resize,
            strides("x", last) | strides("s", last) | strides("o", last),
            {"HALVES": 2, "HAS_BIAS": True, "HAS_SKIP": False},
        ),
        (
            kernels._duplicate,
            strides("x", last) | strides("s", first) | strides("o", first),
            {"FACTOR_T": 2, "FACTOR_S": 2, "REPEATS": 4, "LEAD": 0, "HAS_BIAS": True},
        ),
    ]
    for kernel, layout, own in programs:
        numbers = extents | layout
        constants = flags | own | {name: 1 for name, value in numbers.items() if value == 1}
        names = kernel.arg_names
        signature = {
            name: "i32" if name in numbers else "fp32" if name == "scale" else "*bf16"
            for name in names
            if name not in constants
        }
        sixteens = [name for name in names if signature.get(name) == "*bf16" or numbers.get(name, 1) % 16 == 0]
        text = ptx(kernel, signature, constants, sixteens, enable_fp_fusion=False)
        assert "st.global.v4.b32" in text, kernel
        assert "ld.global.v4.b32" in text, kernel
