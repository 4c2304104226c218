"""The Triton kernels, interpreted on the CPU, against the same glue in torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.unit.decoding.ptx import ptx

pytest.importorskip("triton", reason="this torch comes without Triton; fused.py then computes in torch")

# Triton decides at import whether it interprets, so the comparison runs in a process of its own.
COMPARE = """
import json
from types import SimpleNamespace
import torch
import torch.nn.functional as F
from wanshim.core.decoding.operators import attention_kernel, fast_kernels, fused
from wanshim.core.decoding.model.graph import Norm, Shortcut
from wanshim.core.decoding.operators.layout import dense
from wanshim.core.decoding.operators.winograd import Products

torch.manual_seed(0)
worst = {}

def made(*shape):
    return dense(shape, torch.empty(0)).copy_(torch.randn(shape))

def twin(x):
    return dense(tuple(x.shape), x).copy_(x)

def note(name, a, b):
    worst[name] = max(worst.get(name, 0.0), float((a - b).abs().max()))

for n, c, w in SIZES:
    main, skip, bias = made(n, c, 2, 3, w), made(n, c, 2, 3, w), torch.randn(c)
    norm = Norm(module=SimpleNamespace(gamma=torch.rand(c) + 0.5, bias=torch.randn(c)), scale=c**0.5, eps=1e-12)
    windows = [dense((n, c, 4, 3, w + 2), main).zero_()[:, :, 2:, :, 1 : w + 1] for _ in range(2)]
    sums = [twin(main), twin(main)]
    fused.norm_into(sums[0], bias, skip, norm, windows[0], silu=True, kept=sums[0])
    fast_kernels.sum_into(sums[1], bias, skip, windows[1], norm, silu=True, kept=sums[1])
    note("norm", *windows)
    note("kept sum", *sums)
    phases = made(n, 4 * c, 2, 4, w + 1)
    outs, sums = ([dense((n, c, 2, 6, 2 * w), phases).zero_() for _ in range(2)] for _ in range(2))
    fused.norm_into(phases, bias, None, norm, outs[0], silu=True, kept=sums[0])
    fast_kernels.sum_into(phases, bias, None, outs[1], norm, silu=True, kept=sums[1])
    note("phases", *outs)
    note("kept sum of phases", *sums)
    dup = Shortcut(module=None, factor_t=1, factor_s=2, group=2, out_channels=c)
    source = made(n, 2 * c, 2, 3, w)
    fused.add_duplicate(phases, bias, source, dup, False, outs[0])
    fast_kernels.add_duplicate(phases, bias, source, dup, False, outs[1])
    note("duplicate of phases", *outs)
    for factor_t in (1, 2):
        for first in (False, True):
            dup = Shortcut(module=None, factor_t=factor_t, factor_s=2, group=2 * factor_t, out_channels=c)
            half = w // 2 + 1  # two programs, and a rest
            large = made(n, c, 2 * factor_t - (factor_t - 1 if first else 0), 6, 2 * half)
            source, outs = made(n, 2 * c, 2, 3, half), [twin(large), twin(large)]
            fused.add_duplicate(outs[0], bias, source, dup, first, outs[0])
            fast_kernels.add_duplicate(outs[1], bias, source, dup, first, outs[1])
            note("duplicate", *outs)
for frames, (n, c, w) in PRODUCTS:
    for given in (False, True):
        parts = [made(n, c, (frames + 3) // 4, 3, w) / 256 for _ in range(6)]
        products, bias = Products(parts, frames), torch.randn(c) if given else None
        norm = Norm(module=SimpleNamespace(gamma=torch.rand(c) + 0.5, bias=None), scale=c**0.5, eps=1e-12)
        skip = made(n, c, frames, 3, w)
        skips = [twin(skip), twin(skip)] if given else [None, None]
        around = [dense((n, c, frames + 3, 3, w + 2), parts[0]).zero_() for _ in range(2)]
        insides = [each[:, :, 2 : frames + 2, :, 1 : w + 1] for each in around]
        fused.norm_into(products, bias, skips[0], norm, insides[0], silu=True, kept=skips[0])
        fast_kernels.sum_into(products, bias, skips[1], insides[1], norm, silu=True, kept=skips[1])
        note("norm of products", *around)
        if given:
            note("kept sum of products", *skips)  # in place
        sums = [dense((n, c, frames + 3, 3, w), parts[0]).zero_() for _ in range(2)]
        for each, into in zip((fused, fast_kernels), sums):
            each.sum_into(products, bias, None, into[:, :, 2 : frames + 2])
        note("sum of products", *sums)
attention_kernel._usable = lambda *tensors: True
queries, tokens = torch.randn(2, 1, 70, 384), torch.randn(2, 1, 133, 2 * 384)  # of more than one program, and a rest
keys, values = tokens.chunk(2, dim=-1)
expected = F.scaled_dot_product_attention(queries, keys, values)
note("attention", attention_kernel.attend(queries, keys, values), expected)
print(json.dumps(worst))
"""


SMALL, LARGE = (2, 12, 5), (1, 96, 37)  # batch, channels, width; a program has at most 32 positions of 96 channels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "frames"),
    [((SMALL,), (5,)), pytest.param((SMALL, LARGE), (4, 5, 6, 7), marks=pytest.mark.sweep)],
    ids=["some", "every"],
)
def test_kernels_interpreted_equal_the_torch_glue(sizes: tuple[Any, ...], frames: tuple[int, ...]) -> None:
    products = [(count, sizes[-1] if count == 5 else SMALL) for count in frames]
    done = subprocess.run(
        [sys.executable, "-c", f"SIZES, PRODUCTS = {sizes}, {products}\n{COMPARE}"],
        env={**__import__("os").environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    worst = json.loads(done.stdout)
    assert set(worst) == {
        *("norm", "kept sum", "phases", "kept sum of phases", "duplicate", "duplicate of phases", "attention"),
        *("norm of products", "kept sum of products", "sum of products"),
    }
    assert all(difference < 5e-6 for difference in worst.values()), worst


@pytest.mark.slow
def test_kernel_that_sums_products_compiles_for_a_gpu_and_moves_eight_values_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from wanshim.core.decoding.operators import fast_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = fast_kernels._sum_of_products
    fixed: dict[str, object] = {"C": 96, "BLOCK_C": 128, "BLOCK_P": 4, "HAS_SHIFT": False, "NORM": True, "SILU": True}
    names, extents, floats = kernel.arg_names, kernel.do_not_specialize, ("unit", "scale", "eps")
    types = {name: "*fp16" if name[0] == "M" else "*bf16" if name.isupper() else "i32" for name in names}
    types |= dict.fromkeys(floats, "fp32") | dict.fromkeys(extents, "i32")
    aligned = set(names) - {*fixed, *extents, *floats}
    text = ptx(kernel, types, fixed, aligned, num_warps=fast_kernels._WARPS_OF_PRODUCTS)
    assert text.count("ld.global.v4.b32") == 6 + 4  # the products, and the residual of each frame
    assert text.count("st.global.v4.b32") == 2 * 4
