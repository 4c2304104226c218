"""`diffsynth.fast_blocks`: near the exact frames by a distance that is said, the same on two processes, and what stays.

Graphs are run by eager's kernels, but for the test of a script with inductor; workers multiply in eight bits alone,
since what a test sets in this process is not in them."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wanshim
from tests.contract.diffsynth import wan_pipelines
from tests.contract.diffsynth.wan_pipelines import generate
from tests.contract.fast import activate, distance, int8_by_eager_kernels
from wanshim.reporting import ReportRow

pytestmark = pytest.mark.timeout(600)
NAME = "diffsynth.fast_blocks"


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Multiples of 16, as eight-bit products need."""
    monkeypatch.setattr(wan_pipelines, "SIZE", wan_pipelines.SIXTEENS)
    yield from int8_by_eager_kernels(monkeypatch)


def row() -> ReportRow:
    return wanshim.report().row(NAME)


def measured() -> list[str]:
    return [each for each in row().notes if "off the exact one" in each]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t2v", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("pair", "vace"))])
def test_frames_are_near_the_exact_ones_and_the_distance_is_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipelines.MADE[kind]()
    expected = generate(pipe, kind)
    activate(monkeypatch)
    found = generate(pipe, kind)
    assert 0 < distance(found, expected) < 0.05
    assert torch.equal(found, generate(pipe, kind)), "a second call has the same bits"
    assert (row().state, row().fallbacks) == ("exercised", {})
    assert len(measured()) == (2 if kind == "pair" else 1), row().notes
    assert "its blocks were compiled in" in measured()[0]
    assert re.search(r"first forwards .*% off the exact ones", row().outcome)
    wanshim.deactivate()
    assert torch.equal(expected, generate(pipe, kind)), "nothing is left in the models"


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pair", "vace"])
def test_two_processes_have_the_frames_of_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipelines.MADE[kind]()
    activate(monkeypatch, COMPILE="0")
    calls: tuple[dict[str, Any], ...] = ({}, {"num_frames": 9}, {"height": 48, "width": 80})
    expected = [generate(pipe, kind, **each) for each in calls]
    activate(monkeypatch, "2")
    assert all(map(torch.equal, expected, [generate(pipe, kind, **each) for each in calls]))
    notes = " ".join(wanshim.report().row("diffsynth.generate").notes)
    assert "guidance over 2, bit for bit the frames of one GPU with the same fast blocks" in notes


@pytest.mark.slow
@pytest.mark.sweep
def test_merged_guidance_is_of_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    exact = generate(pipe, "t2v", cfg_merge=True)
    activate(monkeypatch)
    assert 0 < distance(generate(pipe, "t2v", cfg_merge=True), exact) < 0.05
    assert 0 < distance(generate(pipe, "t2v"), exact) < 0.05
    assert len(measured()) == 2


@pytest.mark.parametrize("gpus", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_lora_that_is_fused_between_calls(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    activate(monkeypatch, gpus, COMPILE="0")
    before = generate(pipe, "t2v")
    name = "blocks.0.self_attn.q.lora_{}.default.weight"
    torch.manual_seed(0)
    lora = {name.format("A"): torch.randn(2, 48), name.format("B"): torch.randn(48, 2)}
    pipe.load_lora(pipe.dit, state_dict=lora)
    found = generate(pipe, "t2v")
    activate(monkeypatch, "1")
    assert torch.equal(found, generate(pipe, "t2v"))
    wanshim.deactivate()
    exact = generate(pipe, "t2v")
    assert distance(found, exact) < 0.05
    assert distance(before, exact) > distance(found, exact)


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_tea_cache_keeps_what_fast_blocks_compute(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    own_bar = inspect.signature(type(pipe).__call__).parameters["progress_bar_cmd"].default
    steps = {"num_inference_steps": 5, "progress_bar_cmd": own_bar}
    cache = {"tea_cache_l1_thresh": 1e6, "tea_cache_model_id": "Wan2.1-T2V-1.3B"}
    exact = generate(pipe, "t2v", **steps, **cache)
    activate(monkeypatch, COMPILE="0")
    expected = generate(pipe, "t2v", **steps, **cache)
    assert 0 < distance(expected, exact) < 0.05, "what is computed beside a forward leaves the cache alone"
    assert not torch.equal(expected, generate(pipe, "t2v", **steps))
    if gpus == "2":
        activate(monkeypatch, "2")
        assert torch.equal(expected, generate(pipe, "t2v", **steps, **cache))
    assert not row().fallbacks


def compiled(pipe: Any) -> None:
    for block in pipe.dit.blocks:
        block.compile(backend="eager")


def other_class(pipe: Any) -> None:
    pipe.dit.__class__ = type("Other", (type(pipe.dit),), {})


LEFT: dict[str, tuple[Callable[[Any], object], str]] = {
    "compiled": (compiled, "the program has compiled it"),
    "managed": (lambda pipe: setattr(pipe.dit, "vram_management_enabled", True), "VRAM management moves the weights"),
    "class": (other_class, "Other: its blocks are not known"),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "compiled" in name else name for name in LEFT]
)
def test_what_cannot_be_fast_is_diffsynths_own_and_the_report_says_why(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, text = LEFT[name]
    pipe = wan_pipelines.MADE["t2v"]()
    change(pipe)
    expected = generate(pipe, "t2v")
    torch._dynamo.reset()
    activate(monkeypatch)
    assert torch.equal(expected, generate(pipe, "t2v"))
    assert any(text in reason for reason in row().fallbacks), row()


def test_a_pipeline_that_was_made_before_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the function as it was then, which wanshim's wrappers are around now."""
    pipe = wan_pipelines.MADE["t2v"]()
    activate(monkeypatch, "2", COMPILE="0")
    generate(pipe, "t2v")
    assert wanshim.report().row("diffsynth.generate").state == "exercised"


SCRIPT = """
    import sys, torch
    from tests.contract.diffsynth import wan_pipelines

    torch.set_num_threads(1)
    wan_pipelines.SIZE = wan_pipelines.SIXTEENS
    pipe = wan_pipelines.MADE["t2v"]()
    torch.save([wan_pipelines.generate(pipe, "t2v", **size) for size in ({}, {"num_frames": 9})], sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.sweep
def test_an_unmodified_script_has_the_same_frames_by_fast_on_one_and_two(tmp_path: Path) -> None:
    """Blocks compiled by inductor, in the script's process and in its worker."""
    script, made = tmp_path / "generate.py", {}
    script.write_text(textwrap.dedent(SCRIPT))
    variables = {"ACCELERATE_USE_CPU": "true", "WANSHIM_VAE_FAST": "0", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "k")}
    for gpus in ("1", "2"):
        command = ["wanshim", "generate", "--gpus", gpus, "--fast", "--", str(script), str(tmp_path / gpus)]
        done = subprocess.run(
            [sys.executable, "-m", *command], env={**os.environ, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert (
            len(re.findall(r"the first forward is .*% off the exact one; its blocks were compiled", done.stderr)) == 2
        )
        assert re.search(r"diffsynth.fast_blocks exercised, .*; first forwards .*% off the exact ones", done.stderr)
        made[gpus] = torch.load(tmp_path / gpus, weights_only=True)
    assert all(map(torch.equal, made["1"], made["2"]))
