"""The strict operators for CUDA, interpreted on the CPU: torch's bits, and the framework's way where a check says no.

fp16 stands for the 16-bit dtypes: the interpreter cuts bf16 off where a GPU rounds it. SiLU in the kernel needs CUDA's
library, so here torch computes it; tests/gpu compares it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="this torch comes without Triton; strict then takes the framework's own steps")

KERNELS = """
import json
import torch
import torch.nn.functional as F
from wanshim.core.decoding.operators import strict_kernels as kernels
from wanshim.core.decoding.model.graph import Duplicate
from wanshim.core.decoding.operators.layout import duplicate, interleave

torch.manual_seed(0)
equal = {}

def note(name, a, b):
    equal[name] = equal.get(name, True) and torch.equal(a, b)

def twice(x):
    return x.repeat_interleave(2, 3).repeat_interleave(2, 4)

b, c, t, h, w = 2, 12, 3, 5, 7
for dtype in (torch.float32, torch.float16):
    make = lambda *shape: torch.randn(shape).to(dtype)
    x, bias, gamma = make(b, c, t, h, w), make(c), make(c)
    skip = make(b, t, c, h, w).permute(0, 2, 1, 3, 4)  # frames apart, as a Conv2d leaves them
    sum_ = (x + bias.view(1, -1, 1, 1, 1)) + skip
    size = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).clamp_min_(1e-12)
    window = torch.zeros(b, c, t + 2, h + 2, w + 2, dtype=dtype)
    own = window[:, :, 2:, 1:-1, 1:-1]
    kernels.norm_into(x, size, gamma, c**0.5, own, silu=False)
    expected = F.normalize(x.float(), dim=1).to(dtype) * c**0.5 * gamma.view(-1, 1, 1, 1) + 0.0
    note("norm", window, F.pad(expected, (1, 1, 1, 1, 2, 0)))
    out = x.clone()
    kernels.sum_into(out, bias, skip, out)
    note("sum", out, sum_)
    large = torch.empty(b, t, c, 2 * h, 2 * w, dtype=dtype).permute(0, 2, 1, 3, 4)
    kernels.resize_into(x, bias, skip, large, pairs=False)
    note("resize", large, twice(sum_))
    wide, wide_bias = make(b, 2 * c, t, h, w), make(2 * c)
    large = torch.empty(b, 2 * t, c, 2 * h, 2 * w, dtype=dtype).permute(0, 2, 1, 3, 4)
    kernels.resize_into(wide, wide_bias, None, large, pairs=True)
    note("pairs", large, twice(interleave(wide + wide_bias.view(1, -1, 1, 1, 1))))
    for factor_t in (1, 2):
        for first in (False, True):
            dup = Duplicate(module=None, factor_t=factor_t, factor_s=2, repeats=2 * factor_t, out_channels=c)
            source, main = make(b, 2 * c, 2, 3, 4), make(b, c, 2 * factor_t - (factor_t - 1 if first else 0), 6, 8)
            out = main.clone()
            kernels.add_duplicate(out, bias, source, dup, first)
            note("duplicate", out, (main + bias.view(1, -1, 1, 1, 1)) + duplicate(dup, source, first))
    for shape in ((2, 12, 3, 5, 7), (3, 70, 9, 11), (1, 3, 1, 130, 1)):
        x = make(*shape)
        last = kernels.channels_last(x)
        note("channels last", last, x)
        note("channels last", last.movedim(1, -1), x.movedim(1, -1).contiguous())
        equal["channels last"] &= last.movedim(1, -1).is_contiguous()
        note("channels first", kernels.channels_first(last), x)
        equal["channels first"] &= kernels.channels_first(last).is_contiguous()
print(json.dumps(equal))
"""

# `BREAK` names a check that is made to find a difference.
DECODE = """
import json, os
import torch
from tests.distributed.decoding.tiny import make_latent, make_vae
from wanshim.core.decoding import parallel_vae, parallelize_decode
from wanshim.core.decoding.operators import strict_checks
from wanshim.core.decoding.operators.convolution import torch_convolve

class Torch:  # cuDNN needs a GPU: tests/gpu has its engines
    def equal(self, x, weight, stride, padding, expected):
        return torch_convolve if weight.shape[0] > 8 else None

torch.set_num_threads(1)
parallel_vae.available = lambda like: True
if os.environ["BREAK"] == "nothing, channels last":
    parallel_vae.engines_on = lambda device: Torch()
if os.environ["BREAK"] == "norm":
    strict_checks._same_norm = lambda *args: False
if os.environ["BREAK"] == "conv":
    strict_checks._with_bias = lambda x, bias: x + 1
vae, latent = make_vae("2.1"), make_latent(2, 1, 1)
expected = vae.decode(latent).sample
handle = parallelize_decode(vae)
equal = [torch.equal(vae.decode(latent).sample, expected) for _ in range(2)]
checks = handle.parallel._checks
print(json.dumps({
    "equal": equal,
    "norms": sorted({way.name for way in checks._norms.values()}),
    "biased": len(checks._biased),
    "relaid": sum(trial.relaid is not None for trial in checks._trials.values()),
    "convs": len({conv for conv, *_ in checks._trials}),
    "windowed": sum(max(getattr(m, "kernel_size", (1,))) > 1 for m in vae.decoder.modules()),
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


def test_strict_kernels_interpreted_give_the_bits_of_torch() -> None:
    equal = interpreted(KERNELS)
    assert set(equal) == {"norm", "sum", "resize", "pairs", "duplicate", "channels last", "channels first"}
    assert all(equal.values()), equal


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("broken", ["nothing", "nothing, channels last", "norm", "conv"])
def test_strict_decode_is_bit_identical_whatever_the_checks_say(broken: str) -> None:
    found = interpreted(DECODE, BREAK=broken)
    assert found["equal"] == [True, True]
    if broken == "norm":  # not all norms in one kernel: the plain strict operators decode
        assert found["norms"] == ["OWN"]
        assert found["convs"] == 0
    else:
        assert found["norms"] == ["WIDE"]
        assert found["convs"] == found["windowed"] > 0
    if broken == "conv":
        assert found["biased"] == found["convs"]
    assert (found["relaid"] > 0) == (broken == "nothing, channels last")
