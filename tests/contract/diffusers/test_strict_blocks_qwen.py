"""Blocks of Qwen-Image transformers with kernels in place of their steps, interpreted on the CPU: the framework's bits.

Complex numbers are multiplied as CUDA does, but for the first model: on the CPU torch rounds each product, so there the
kernel of the rotary embedding may be found to differ."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract import interpreted

pytest.importorskip("triton", reason="this torch comes without Triton; diffusers' own steps compute then")

FORWARDS = 3
SCRIPT = """
import inspect, json
import torch
import wanshim
from wanshim.core.strict_blocks import kernels

kernels.available = lambda x: x.dtype in (torch.float16, torch.bfloat16)  # the interpreter computes on the CPU
launched = {}

def counted(name, kernel):
    def launch(*args, **kwargs):
        launched[name] = launched.get(name, 0) + 1
        return kernel(*args, **kwargs)
    return launch

for name in ("modulated", "gated", "scaled", "rotated"):
    setattr(kernels, name, counted(name, getattr(kernels, name)))

import diffusers
from diffusers.models.transformers import transformer_qwenimage
from peft import LoraConfig

def as_on_cuda(x, freqs_cis, use_real=True):
    (even, odd), turns = x.float().unflatten(-1, (-1, 2)).unbind(-1), freqs_cis.unsqueeze(1)
    real = even.double() * turns.real - (odd * turns.imag)
    imaginary = even.double() * turns.imag + (odd * turns.real)
    return torch.stack((real.float(), imaginary.float()), -1).flatten(3).type_as(x)

CONFIG = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": 8}
CONFIG |= {"patch_size": 2, "in_channels": 16, "out_channels": 4, "axes_dims_rope": (8, 4, 4)}
known = inspect.signature(diffusers.QwenImageTransformer2DModel.__init__).parameters
found = {}

def model(dtype=torch.float16, **changed):
    made = diffusers.QwenImageTransformer2DModel(**CONFIG | changed).to(dtype).eval()
    for name, parameter in made.named_parameters():
        if "norm_" in name:
            torch.nn.init.normal_(parameter)
    return made

def compare(name, made, *pictures, batch=1, mask=None):
    dtype, tokens = made.dtype, sum(rows * columns for rows, columns in pictures)
    given = {
        "hidden_states": torch.randn(batch, tokens, 16).to(dtype),
        "encoder_hidden_states": torch.randn(batch, 3, 8).to(dtype),
        "encoder_hidden_states_mask": torch.ones(batch, 3, dtype=torch.int64) if mask is None else mask,
        "timestep": torch.linspace(0.9, 0.5, batch),
        "img_shapes": [[(1, *picture) for picture in pictures]] * batch,
        "return_dict": False,
    }
    if "txt_seq_lens" in inspect.signature(type(made).forward).parameters:  # before 0.39
        given["txt_seq_lens"] = [3] * batch
    with torch.no_grad():
        expected = made(**given)[0]
        wanshim.activate("diffusers.strict_blocks")
        launched.clear()
        equal = [torch.equal(made(**given)[0], expected) for _ in range(3)]
        row, counts = wanshim.report().row("diffusers.strict_blocks"), dict(launched)
        with torch.enable_grad():
            trained = made(**given)[0]
            trained.float().sum().backward()
        found[name] = {"equal": equal, "launched": counts, "trained": torch.equal(trained, expected),
                       "launched in training": sum(launched.values()) - sum(counts.values()),
                       "fallbacks": row.fallbacks, "notes": row.notes, "state": row.state}
        wanshim.deactivate()

torch.manual_seed(0)
compare("diffusers' own rotation", model(), (2, 2))
transformer_qwenimage.apply_rotary_emb_qwen = as_on_cuda
made = model()
compare("one", made, (2, 2))
compare("two of another size", made, (2, 3), batch=2)
compare("masked text", made, (2, 2), batch=2, mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
compare("bfloat16", model(torch.bfloat16), (2, 2))
made.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_add_out", "net.2"], init_lora_weights=False))
compare("lora", made, (2, 2))
if "zero_cond_t" in known:
    compare("two timesteps", model(zero_cond_t=True), (2, 2), (1, 2), batch=2)
large = model()
for stream in ("img", "txt"):
    torch.nn.init.constant_(large.get_parameter(f"transformer_blocks.0.{stream}_mlp.net.2.bias"), 6e4)
    torch.nn.init.constant_(large.get_parameter(f"transformer_blocks.0.{stream}_mod.1.bias")[-48:], 2)
compare("values beyond those of fp16", large, (2, 2))
hooked = model()
seen = []
hooked.transformer_blocks[0].attn.norm_q.register_forward_hook(lambda *given: (seen.append(1), given[2] * 2)[1])
compare("a hook on a norm", hooked, (2, 2))
found["a hook on a norm"]["seen"] = len(seen)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    rows: dict[str, Any] = interpreted.run(SCRIPT)
    assert len(rows) >= 7
    return rows


@pytest.mark.slow
def test_blocks_have_the_bits_of_diffusers(found: dict[str, Any]) -> None:
    for name, row in found.items():
        assert row["equal"] == [True] * FORWARDS, (name, row)
        assert (row["fallbacks"], row["state"]) == ({}, "exercised"), (name, row)
        if name == "diffusers' own rotation":
            assert all(note.startswith("rotary embedding") for note in row["notes"]), row["notes"]
        elif name != "bfloat16":  # which the interpreter cuts off where a GPU rounds it
            assert row["notes"] == [], (name, row)


@pytest.mark.slow
def test_kernels_compute_each_step_of_each_forward(found: dict[str, Any]) -> None:
    for name, row in found.items():
        if name in ("diffusers' own rotation", "bfloat16", "a hook on a norm"):
            continue
        # Of two streams each is modulated twice, gated twice, and has queries and keys. These are normalized and turned
        # by kernels in diffusers' own block, too, with which the first is compared.
        each, attended = 4 * FORWARDS, 4 * (FORWARDS + 1)
        expected = {"modulated": each, "gated": each, "scaled": attended, "rotated": attended}
        assert row["launched"] == expected, (name, row)


@pytest.mark.slow
def test_norm_with_a_hook_is_called_as_it_is(found: dict[str, Any]) -> None:
    row = found["a hook on a norm"]
    assert (row["launched"]["scaled"], row["launched"]["rotated"]) == (3 * FORWARDS, 4 * FORWARDS)
    assert row["seen"] == FORWARDS + 2  # once a forward: that of diffusers alone, and the one with gradients


@pytest.mark.slow
def test_no_kernel_computes_where_gradients_are_wanted(found: dict[str, Any]) -> None:
    for name, row in found.items():
        assert row["trained"], name
        assert row["launched in training"] == 0, (name, row)
