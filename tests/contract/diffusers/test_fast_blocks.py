"""`diffusers.fast_blocks`: near the exact frames by a distance that is said, the same on two processes, and what stays.

Graphs are run by eager's kernels, but for the test of a script with inductor; workers multiply in eight bits alone,
since what a test sets in this process is not in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import wanshim
from tests.contract.diffusers import qwen_pipelines, wan_pipelines
from tests.contract.diffusers.wan_pipelines import generate
from tests.contract.fast import activate, distance, int8_by_eager_kernels
from wanshim.errors import FeatureUnavailable
from wanshim.reporting import ReportRow

pytestmark = pytest.mark.timeout(600)
NAME = "diffusers.fast_blocks"


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Multiples of 16, as eight-bit products need."""
    monkeypatch.setitem(wan_pipelines.TRANSFORMER, "attention_head_dim", 16)
    yield from int8_by_eager_kernels(monkeypatch)


def row() -> ReportRow:
    return wanshim.report().row(NAME)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["wan", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("wan22", "ti2v", "i2v", "vace", "animate"))],
)
def test_frames_are_near_the_exact_ones_and_the_distance_is_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind in ("vace", "animate") and not hasattr(diffusers, "WanAnimateTransformer3DModel"):
        pytest.skip("before 0.36 VACE takes no list of prompts, and there is no Animate")
    pipe = wan_pipelines.MADE[kind]()
    expected = generate(pipe, kind)
    activate(monkeypatch)
    found = generate(pipe, kind)
    assert 0 < distance(found, expected) < 0.05
    assert torch.equal(found, generate(pipe, kind)), "a second call has the same bits"
    assert row().state == "exercised"
    assert not row().fallbacks
    said = [each for each in row().notes if "off the exact one" in each]
    assert len(said) == (2 if kind == "wan22" else 1), said
    share = re.search(r"of 1x\d+x.*: the first forward is (.*)% off the exact one; its blocks were compiled", said[0])
    assert share is not None
    assert 0 < float(share[1]) < 5
    assert re.search(r"first forwards .*% off the exact ones", row().outcome)
    wanshim.deactivate()
    assert torch.equal(expected, generate(pipe, kind)), "nothing is left in the models"
    assert not any(type(m) is not nn.Linear for m in pipe.transformer.modules() if isinstance(m, nn.Linear))


def test_the_distance_is_that_of_the_first_forward_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, calls = wan_pipelines.wan(), []
    activate(monkeypatch, COMPILE="0")
    block, own = type(pipe.transformer.blocks[0]), type(pipe.transformer.blocks[0]).forward
    monkeypatch.setattr(block, "forward", lambda self, *given: calls.append(self) or own(self, *given))
    for count, changed in ((7, {}), (6, {}), (7, {"num_frames": 9}), (7, {"prompts": 2}), (6, {"num_frames": 9})):
        calls.clear()
        generate(pipe, "wan", **changed)
        assert len(calls) == 2 * count, "two blocks in each of six forwards, and in the one beside the first"
    assert len([each for each in row().notes if "off the exact one" in each]) == 3


def test_products_alone_and_graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipelines.wan()
    expected = generate(pipe, "wan")
    activate(monkeypatch, COMPUTE="off")
    assert distance(generate(pipe, "wan"), expected) < 1e-6, "eager's kernels in graphs"
    assert "blocks were compiled" in row().notes[0]
    wanshim.deactivate()
    activate(monkeypatch, COMPUTE="int8", COMPILE="0")
    assert distance(generate(pipe, "wan"), expected) > 1e-6
    assert not any("compiled" in note for note in row().notes)


@pytest.mark.slow
def test_two_processes_have_the_frames_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By guidance bit for bit; blocks whose tokens go over GPUs are not compiled, and it is said."""
    pipe = wan_pipelines.wan22()
    exact = generate(pipe, "wan")
    activate(monkeypatch, COMPILE="0")
    calls = ({}, {"num_frames": 9}, {"prompts": 2}, {"height": 48, "width": 64})
    expected = [generate(pipe, "wan", **each) for each in calls]
    activate(monkeypatch, "2")
    assert all(map(torch.equal, expected, [generate(pipe, "wan", **each) for each in calls]))
    notes = " ".join(wanshim.report().row("diffusers.generate").notes)
    assert "guidance over 2, bit for bit the frames of one GPU with the same fast blocks" in notes
    assert torch.isfinite(generate(pipe, "wan", guidance_scale=1.0, height=64)).all()
    assert "the distance from the exact forward is not measured: its tokens go over GPUs" in " ".join(row().notes)
    assert not torch.equal(exact, expected[0])


def lora_steps(pipe: Any) -> list[tuple[str, Callable[[], object]]]:
    from peft import LoraConfig

    model = pipe.transformer

    def add(name: str) -> None:
        torch.manual_seed(len(name))
        model.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_v"], init_lora_weights=False), name)

    return [
        ("loaded", lambda: add("one")),
        ("scaled", lambda: model.set_adapters(["one"], [0.5])),
        ("another", lambda: (add("second"), model.set_adapters(["second"], [1.0]))),
        ("fused", lambda: model.fuse_lora()),
        ("unfused", lambda: model.unfuse_lora()),
        ("removed", lambda: model.delete_adapters(["one", "second"])),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [pytest.param("1", marks=pytest.mark.sweep), "2"])
def test_lora_loaded_scaled_swapped_fused_and_removed_between_calls(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, twin = wan_pipelines.wan(), wan_pipelines.wan()
    before = generate(twin, "wan")
    alone = {"COMPILE": "0"} if gpus == "2" else {}
    for (name, step), (_, same) in zip(lora_steps(pipe), lora_steps(twin), strict=True):
        wanshim.deactivate()
        same()
        exact = generate(twin, "wan")
        assert name == "unfused" or not torch.equal(exact, before), "the step changes something"
        step()
        activate(monkeypatch, "1", **alone)
        expected = generate(pipe, "wan")
        assert distance(expected, exact) < 0.05, name
        if gpus == "2":
            activate(monkeypatch, "2", **alone)
            assert torch.equal(expected, generate(pipe, "wan")), name
        assert not row().fallbacks, name
        before = exact


def group(pipe: Any) -> None:
    pipe.transformer.enable_group_offload(torch.device("cpu"), torch.device("cpu"), "block_level", 1)


OFFLOADS: dict[str, Callable[[Any], object]] = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(device="cpu"),
    "group": group,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep) if name != "model" else name for name in OFFLOADS]
)
def test_what_the_script_offloads_has_the_same_frames(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed in place of that, the blocks are fast; its own hooks inside the blocks would leave them as they are."""
    pipe = wan_pipelines.wan()
    activate(monkeypatch)
    expected = generate(pipe, "wan", output_type="latent")
    OFFLOADS[name](pipe)
    assert torch.equal(expected, generate(pipe, "wan", output_type="latent"))
    assert not row().fallbacks
    assert any("streams blocks" in note for note in wanshim.report().row("diffusers.generate").notes)


@pytest.mark.parametrize("gpus", ["1", pytest.param("2", marks=[pytest.mark.slow, pytest.mark.sweep])])
def test_a_step_cache_keeps_what_fast_blocks_compute(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.hooks import FirstBlockCacheConfig

    pipe = wan_pipelines.wan()
    steps = {"num_inference_steps": 5}
    activate(monkeypatch, COMPILE="0")
    without = generate(pipe, "wan", **steps)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e6))
    expected = generate(pipe, "wan", **steps)
    assert not torch.equal(without, expected)
    assert len([each for each in row().notes if "off the exact one" in each]) == 1, "the same as without a cache"
    if gpus == "2":
        activate(monkeypatch, "2")
        assert torch.equal(expected, generate(pipe, "wan", **steps))
    assert not row().fallbacks


def quantized(pipe: Any) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(pipe.transformer, torchao.Int8WeightOnlyConfig())


LEFT: dict[str, tuple[Callable[[Any], object], str]] = {
    "compiled": (lambda pipe: pipe.transformer.compile_repeated_blocks(backend="eager"), "the program has compiled it"),
    "compiled whole": (lambda pipe: pipe.transformer.compile(backend="eager"), "the program has compiled it"),
    "quantized": (quantized, "its weights are quantized"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "compiled" in name else name for name in LEFT]
)
def test_what_cannot_be_fast_is_diffusers_own_and_the_report_says_why(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, text = LEFT[name]
    pipe = wan_pipelines.wan()
    change(pipe)
    expected = generate(pipe, "wan")
    torch._dynamo.reset()
    activate(monkeypatch)
    assert torch.equal(expected, generate(pipe, "wan"))
    assert any(text in reason for reason in row().fallbacks), row()


@pytest.mark.slow
def test_hooks_of_the_program_run_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, calls = wan_pipelines.wan(), []
    pipe.transformer.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    pipe.transformer.blocks[1].ffn.register_forward_hook(lambda *_: calls.append(1))
    exact = generate(pipe, "wan")
    activate(monkeypatch)
    calls.clear()
    assert 0 < distance(generate(pipe, "wan"), exact) < 0.05
    assert len(calls) == 12
    assert "is not measured: the program has forward hooks in it" in " ".join(row().notes)
    assert "ffn of its blocks has forward hooks: they are not compiled" in row().fallbacks


def test_a_forward_with_gradients_and_another_model_have_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, qwen = wan_pipelines.wan(), qwen_pipelines.qwen()
    x, text, time = torch.randn(1, 16, 2, 4, 4), torch.randn(1, 8, wan_pipelines.TEXT), torch.tensor([500.0])
    given = {"hidden_states": x, "timestep": time, "encoder_hidden_states": text, "return_dict": False}
    expected, image = pipe.transformer(**given)[0], qwen_pipelines.generate(qwen)
    activate(monkeypatch)
    assert torch.equal(expected, pipe.transformer(**given)[0])
    assert not row().calls
    assert torch.equal(image, qwen_pipelines.generate(qwen))
    assert [*row().fallbacks] == ["QwenImageTransformer2DModel: its blocks are not known"]


@pytest.mark.slow
def test_a_device_without_the_format_is_named_and_under_strict_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    from wanshim.core.fast_blocks import forward

    pipe = wan_pipelines.wan()
    exact = generate(pipe, "wan")
    monkeypatch.setattr(forward, "_refused", lambda *_: "an A100 multiplies no float8")
    monkeypatch.delenv("WANSHIM_COMPUTE")
    activate(monkeypatch)
    assert distance(generate(pipe, "wan"), exact) < 1e-5
    assert "left out: no Linear multiplies in eight bits: an A100 multiplies no float8" in row().notes
    wanshim.deactivate()
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    activate(monkeypatch)
    assert distance(generate(pipe, "wan"), exact) < 1e-5, "--fast takes what there is"
    wanshim.deactivate()
    activate(monkeypatch, COMPUTE="float8")
    with pytest.raises(FeatureUnavailable, match="an A100 multiplies no float8"):
        generate(pipe, "wan")


SCRIPT = """
    import sys, torch
    from tests.contract.diffusers import wan_pipelines

    torch.set_num_threads(1)
    wan_pipelines.TRANSFORMER["attention_head_dim"] = 16
    pipe = wan_pipelines.wan()
    made = [wan_pipelines.generate(pipe, "wan", output_type="latent", **size) for size in ({}, {"num_frames": 9})]
    torch.save(made, sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.road
def test_an_unmodified_script_has_the_same_latents_by_fast_on_one_and_two(tmp_path: Path) -> None:
    """Blocks compiled by inductor, in the script's process and in its worker."""
    script, made = tmp_path / "generate.py", {}
    script.write_text(textwrap.dedent(SCRIPT))
    variables = {"ACCELERATE_USE_CPU": "true", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}
    for gpus in ("1", "2"):
        command = ["wanshim", "generate", "--gpus", gpus, "--fast", "--", str(script), str(tmp_path / gpus)]
        done = subprocess.run(
            [sys.executable, "-m", *command], env={**os.environ, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert (
            len(re.findall(r"the first forward is .*% off the exact one; its blocks were compiled", done.stderr)) == 2
        )
        assert re.search(r"diffusers.fast_blocks exercised, .*; first forwards .*% off the exact ones", done.stderr)
        made[gpus] = torch.load(tmp_path / gpus, weights_only=True)
    assert "guidance over 2, bit for bit the latents of one GPU with the same fast blocks" in done.stderr
    assert all(map(torch.equal, made["1"], made["2"]))
