"""The kernels of a block's steps, interpreted on the CPU, against torch's own steps, bit for bit.

fp16 stands for the 16-bit dtypes: the interpreter cuts bf16 off where a GPU rounds it. A layer norm of the CPU rounds
its values otherwise than CUDA's, so its kernel is compared with the formula of CUDA's; tests/gpu compares with torch.
"""

from __future__ import annotations

import pytest

from tests.contract import interpreted

pytest.importorskip("triton", reason="this torch comes without Triton; the framework's own steps compute then")

KERNELS = """
import json
import torch
from wanshim.core.strict_blocks import kernels

torch.manual_seed(0)
equal = {}
statistics = torch.native_layer_norm
torch.native_layer_norm = lambda x, *args: statistics(x.float(), *args)  # in fp32, as CUDA has them

def note(name, a, b):
    equal[name] = equal.get(name, True) and torch.equal(a.view(b.shape), b)

# Fewer channels than a program computes, and more; heads of 24 channels.
for batch, tokens, channels in ((1, 5, 72), (2, 3, 1200)):
    x = torch.randn(batch, tokens, channels).half()
    update = torch.randn(batch, tokens, channels).half()
    table = torch.randn(batch, 6, channels)
    per_token = torch.randn(batch, tokens, 6, channels)
    for name, parts in (("one", table.chunk(6, 1)), ("each token", [p.squeeze(2) for p in per_token.chunk(6, 2)])):
        scale, shift, gate = parts[1], parts[0], parts[2]
        _, mean, rstd = torch.native_layer_norm(x.float(), (channels,), None, None, 1e-6)
        normal = (x.float() - mean) * rstd
        found = kernels.normalized(x, scale, shift, eps=1e-6, affine=False)
        note(f"norm, {name}", found, (normal * (1 + scale) + shift).half())
        note(f"gate in fp32, {name}", kernels.gated(x, gate, update, wide=True), (x.float() + update * gate).half())
        scale, shift, gate = (p.half() for p in (scale, shift, gate))
        note(f"gate, {name}", kernels.gated(x, gate, update, wide=False), x + gate * update)
        note(f"modulation, {name}", kernels.modulated(x, scale, shift), x * (1 + scale) + shift)
    weight = torch.randn(channels).half()
    factor = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    note("square", kernels.squared(x), x.float().pow(2))
    note("scale", kernels.scaled(x, factor, weight), (x.float() * factor).half() * weight)
    heads = x.unflatten(2, (-1, 24))
    factor = torch.rsqrt(heads.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    scaled = kernels.scaled(x, factor.contiguous(), weight[:24])
    note("scale of each head", scaled, (heads.float() * factor).half() * weight[:24])
    cosine, sine = torch.randn(2, 1, tokens, 1, 24)
    even, odd = heads.unflatten(-1, (-1, 2)).unbind(-1)
    expected = torch.empty_like(heads)
    expected[..., 0::2] = even * cosine[..., 0::2] - odd * sine[..., 1::2]
    expected[..., 1::2] = even * sine[..., 1::2] + odd * cosine[..., 0::2]
    note("rotation in fp32", kernels.rotated(x, cosine, sine, head=24), expected)
    turns = torch.polar(torch.ones(tokens, 1, 12, dtype=torch.float64), torch.randn(tokens, 1, 12).double())
    expected = torch.view_as_real(torch.view_as_complex(heads.double().unflatten(-1, (-1, 2))) * turns).flatten(2)
    note("rotation in complex128", kernels.rotated(x, turns, head=24), expected.half())
    # CUDA rounds one product of two, and the sum with the other: values that almost cancel show it in fp16.
    cosine, sine = torch.rand(2, tokens, 1, 12) + 0.5
    turns = torch.complex(cosine, sine)
    heads[..., 0::4] = (heads[..., 1::4] * (sine / cosine)[..., 0::2]).half()
    heads[..., 2::4] = (heads[..., 3::4] * -(cosine / sine)[..., 1::2]).half()
    even, odd = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    parts = (even.double() * cosine - (odd * sine)).float(), (even.double() * sine + (odd * cosine)).float()
    note("rotation in complex64", kernels.rotated(x, turns, head=24), torch.stack(parts, -1).half())
print(json.dumps(equal))
"""


@pytest.mark.slow
def test_kernels_have_the_bits_of_torch_s_steps() -> None:
    found = interpreted.run(KERNELS)
    assert len(found) == 14
    assert all(found.values()), found
