"""Blocks of a Wan DiT with kernels in place of their steps, interpreted on the CPU: DiffSynth's bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract import interpreted

pytest.importorskip("triton", reason="this torch comes without Triton; DiffSynth's own steps compute then")

SCRIPT = """
import json
import torch
import wanshim
from wanshim.core.strict_blocks import kernels

kernels.available = lambda x: x.dtype == torch.float16  # the interpreter computes on the CPU
from diffsynth.models import wan_video_dit
from diffsynth.pipelines.wan_video import model_fn_wan_video

torch.manual_seed(0)
CONFIG = {"dim": 72, "in_dim": 4, "ffn_dim": 64, "out_dim": 4, "text_dim": 32, "freq_dim": 16, "eps": 1e-6}
CONFIG |= {"patch_size": (1, 2, 2), "num_heads": 3, "num_layers": 1}
found = {}
model = wan_video_dit.WanModel(**CONFIG, has_image_input=False).half().eval().requires_grad_(False)
model.freqs = wan_video_dit.precompute_freqs_cis_3d(24)
for batch in (1, 2):
    given = {"latents": torch.randn(batch, 4, 1, 4, 6).half(), "timestep": torch.tensor([500.0]).half(),
             "context": torch.randn(batch, 5, 32).half()}
    with torch.no_grad():
        expected = model_fn_wan_video(model, **given)
        wanshim.activate("diffsynth.strict_blocks")
        equal = [torch.equal(model_fn_wan_video(model, **given), expected) for _ in range(3)]
        row = wanshim.report().row("diffsynth.strict_blocks")
        found[str(batch)] = {"equal": equal, "calls": row.calls, "fallbacks": row.fallbacks, "notes": row.notes,
                             "state": row.state}
        wanshim.deactivate()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    return interpreted.run(SCRIPT)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_blocks_have_the_bits_of_diffsynth(batch: int, found: Any) -> None:
    row = found[str(batch)]
    assert row["equal"] == [True] * 3, row
    assert (row["fallbacks"], row["notes"], row["state"]) == ({}, [], "exercised"), row
    # A block has two modulations, two gates, four norms of queries and keys, and two rotations.
    assert row["calls"] >= 3 * 10, row
