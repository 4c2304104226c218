"""Blocks of Wan's transformers with kernels in place of their steps, interpreted on the CPU: the framework's bits.

A layer norm rounds otherwise on the CPU than on CUDA, so its kernels are found to differ here, and diffusers' own steps
compute it; tests/gpu/generation compares them on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract import interpreted

pytest.importorskip("triton", reason="this torch comes without Triton; diffusers' own steps compute then")

SCRIPT = """
import json, sys
import torch
import wanshim
from wanshim.core.strict_blocks import kernels

kernels.available = lambda x: x.dtype == torch.float16  # the interpreter computes on the CPU
turned, rotated = [], kernels.rotated
kernels.rotated = lambda *given, **named: (turned.append(1), rotated(*given, **named))[1]
import diffusers

CONFIG = {"num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 3, "ffn_dim": 64, "text_dim": 32}
CONFIG |= {"freq_dim": 16, "in_channels": 4, "out_channels": 4}
torch.manual_seed(0)
x, text, times = torch.randn(2, 4, 2, 6, 8).half(), torch.randn(2, 7, 32).half(), torch.tensor([500.0, 400.0])
image = torch.randn(1, 257, 24).half()
calls = {
    "wan": ({}, {"hidden_states": x, "timestep": times, "encoder_hidden_states": text}),
    "a time for each token": (
        {}, {"hidden_states": x[:1], "timestep": torch.rand(1, 24) * 900, "encoder_hidden_states": text[:1]}
    ),
    "image to video": (
        {"image_dim": 24, "added_kv_proj_dim": 48},
        {"hidden_states": x[:1], "timestep": times[:1], "encoder_hidden_states": torch.randn(1, 512, 32).half(),
         "encoder_hidden_states_image": image},
    ),
    "vace": (
        {"vace_layers": [0, 2], "vace_in_channels": 6},
        {"hidden_states": x, "timestep": times, "encoder_hidden_states": text,
         "control_hidden_states": torch.randn(2, 6, 2, 6, 8).half()},
    ),
}
found = {}
for name, (config, given) in calls.items():
    cls = diffusers.WanVACETransformer3DModel if name == "vace" else diffusers.WanTransformer3DModel
    model = cls(**CONFIG, **config).half().eval()
    model.rope.float()  # as models are loaded
    turned.clear()
    with torch.no_grad():
        expected = model(**given, return_dict=False)[0]
        wanshim.activate("diffusers.strict_blocks")
        equal = [torch.equal(model(**given, return_dict=False)[0], expected) for _ in range(3)]
        with torch.enable_grad():
            trained = model(**given, return_dict=False)[0]
            trained.float().sum().backward()
        row = wanshim.report().row("diffusers.strict_blocks")
        found[name] = {"equal": equal, "trained": torch.equal(trained, expected), "calls": row.calls,
                       "fallbacks": row.fallbacks, "turned": len(turned), "notes": row.notes, "state": row.state}
        wanshim.deactivate()

# Tokens over GPUs: what a norm of queries returns can be read behind the norm of keys, and not before.
def begins(norm, args, query):
    on_its_way.append((query, torch.full_like(query, float("nan"))))
    return on_its_way[-1][1]

def arrives(norm, args, key):
    query, place = on_its_way.pop()
    place.copy_(query)

model, on_its_way = diffusers.WanTransformer3DModel(**CONFIG).half().eval(), []
model.rope.float()
with torch.no_grad():
    given = calls["wan"][1]
    expected = model(**given, return_dict=False)[0]
    for block in model.blocks:
        block.attn1.norm_q.register_forward_hook(begins)
        block.attn1.norm_k.register_forward_hook(arrives)
    turned.clear()
    wanshim.activate("diffusers.strict_blocks")
    equal = [torch.equal(model(**given, return_dict=False)[0], expected) for _ in range(3)]
print(json.dumps([found, {"equal": equal, "turned": len(turned)}]))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    return interpreted.run(SCRIPT)


@pytest.mark.slow
def test_nothing_is_read_before_diffusers_reads_it(found: Any) -> None:
    assert found[1]["equal"] == [True] * 3
    assert found[1]["turned"] >= 2 * 3 * 3


@pytest.mark.slow
def test_blocks_have_the_bits_of_diffusers(found: Any) -> None:
    assert len(found[0]) == 4
    for name, row in found[0].items():
        assert row["equal"] == [True] * 3, (name, row)
        assert row["trained"], name
        assert row["fallbacks"] == {}, (name, row)
        assert row["state"] == "exercised"
        blocks = 3 + 2 * (name == "vace")
        # Each block, and its self- and cross-attention; once more in the call that compares whole blocks.
        assert row["calls"] >= 3 * 3 * blocks, (name, row)
        assert row["turned"] >= 2 * 3 * blocks, (name, row)  # queries and keys of each self-attention
        assert all(note.startswith("norm with") for note in row["notes"]), row["notes"]
