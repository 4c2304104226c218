"""Wan's blocks multiply in eight bits while DiffSynth trains: close to bf16 in every plan, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import wanshim
from tests.compiling import use_aot_eager
from tests.contract.diffsynth import variants, video_job
from tests.contract.diffsynth.launched import call, check_refusal_is_reported, least_cosine, notes, plain, refuse, train
from wanshim import settings
from wanshim.adapters.diffsynth.eight_bit_compute import STEP, compute_blocks, refusal
from wanshim.adapters.diffsynth.splitting import launch
from wanshim.core.strategy import Limits, TrainingJob, TrainingPlan, decide
from wanshim.errors import FeatureUnavailable, PlacementInvalid
from wanshim.undo import Undo

FEATURE, COMPILED, SPLIT = "diffsynth.eight_bit_compute", "diffsynth.compiled_blocks", "diffsynth.model_split"


def test_blocks_of_vace_multiply_in_eight_bits_too() -> None:
    def lists() -> torch.nn.ModuleList:
        linear = torch.nn.Linear(32, 16).requires_grad_(False)
        return torch.nn.ModuleList([torch.nn.Sequential(linear, torch.nn.Linear(16, 16))])

    dit = variants.tiny("t2v").dit
    pipe, said = SimpleNamespace(dit=dit, vace=SimpleNamespace(vace_blocks=lists())), []
    dit.blocks = lists()
    with Undo() as undo:
        compute_blocks(pipe, "int8", undo, said.append)
    assert said == ["2 Linears multiply in int8; 2 stay as they are, LoRA's among them"]


RUNS = {
    "alone": {},
    "alone, compiled": {"COMPILE": "1"},
    "split, of a base in eight bits": {"DEVICES": "cpu:0,cpu:1", "PIPELINE": "0", "BASE": "int8"},
    "pipeline": {"DEVICES": "cpu,cpu"},
    "streamed, compiled": {"PLAN": "stream:3", "COMPILE": "1"},
}
SWEEPS = ("alone, compiled", "streamed, compiled")


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(given, marks=[pytest.mark.slow, pytest.mark.sweep] * (name in SWEEPS))
        for name, given in RUNS.items()
    ],
    ids=RUNS.keys(),
)
def test_run_multiplies_in_eight_bits_and_learns_nearly_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    expected = plain(2)
    torch._dynamo.reset()
    if "PLAN" not in variables:  # the slow run compiles by inductor
        use_aot_eager(monkeypatch)
    for name, value in {"COMPUTE": "int8", **variables}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    planned = "DEVICES" in variables or "PLAN" in variables
    wanshim.activate(f"none,{FEATURE},{COMPILED}" + f",{SPLIT}" * planned)
    found = train(tmp_path / "ours", 2)
    said = notes(FEATURE)
    assert "frozen Linears of the blocks multiply in int8, so bits change" in said
    assert "Linears multiply in int8; " in said
    if "COMPILE" in variables:
        assert "graphs compiled: 1, in " in notes(COMPILED)
    assert not all(torch.equal(found[name], expected[name]) for name in expected)
    assert least_cosine(found, expected) > 0.99


def test_feature_that_is_switched_on_after_the_split_multiplies_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seam that goes in last is called first."""
    for name, value in {"COMPUTE": "int8", "DEVICES": "cpu:0,cpu:1"}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{SPLIT}")
    wanshim.activate(f"none,{SPLIT},{FEATURE}")
    train(tmp_path / "ours")
    assert (notes(SPLIT) + notes(FEATURE)).count("Linears multiply in int8; ") == 1


def test_what_cannot_multiply_in_eight_bits_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on = settings.Settings(compute="float8")
    frozen = variants.tiny("t2v").dit.requires_grad_(False)
    assert refusal(call(frozen), settings.Settings(compute="int8")) is None
    assert "no frozen Linear of the blocks" in str(refusal(call(), on))
    quantized, managed = variants.tiny("t2v").dit, variants.tiny("t2v").dit
    quantized.quantize_config, managed.vram_management_enabled = object(), True
    for given, read, reason in (
        (call(torch.nn.Linear(1, 1)), on, "Linear: its blocks are not known"),
        (call(state=SimpleNamespace(deepspeed_plugin=object())), on, "DeepSpeed"),
        (call(state=SimpleNamespace(fsdp_plugin=object())), on, "FSDP"),
        (call(quantized), on, "--quant_options"),
        (call(managed), on, "--fp8_models"),
        (call(), replace(on, base="int8"), "WANSHIM_BASE=int8: choose the same format"),
    ):
        assert reason in str(refusal(given, read))
    monkeypatch.setattr("wanshim.core.eight_bit.refusal", lambda *_: "an A100 multiplies no float8")
    assert refusal(call(frozen), on) == "an A100 multiplies no float8; WANSHIM_COMPUTE=int8 may be available"
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    monkeypatch.setenv("WANSHIM_COMPUTE", "float8")
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(FeatureUnavailable, match="WANSHIM_COMPUTE is unavailable here: an A100"):
        train(tmp_path)


@pytest.mark.parametrize("split", [False, True], ids=["alone", "split"])
def test_refusal_is_reported_and_the_run_is_diffsynths_own(
    split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refusal_is_reported(STEP, {"COMPUTE": "float8"}, split, tmp_path, monkeypatch)


@pytest.mark.slow
def test_fast_goes_without_what_the_device_lacks_under_strict_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word asks for what is available; the variable asks for eight bits."""
    refuse(STEP, "no kernel", monkeypatch)
    for name in ("FAST", "STRICT"):
        monkeypatch.setenv(f"WANSHIM_{name}", "1")
    monkeypatch.setenv("WANSHIM_COMPILE", "0")
    wanshim.activate()
    train(tmp_path)
    assert "no Linear multiplies in eight bits: no kernel" in notes(FEATURE)
    wanshim.report(strict=True)
    assert wanshim.report().row(COMPILED).state == "off"
    assert wanshim.report().row("diffsynth.vae_decode").selected_by == "WANSHIM_FAST"
    monkeypatch.setenv("WANSHIM_COMPUTE", "float8")
    wanshim.activate()
    with pytest.raises(FeatureUnavailable, match="WANSHIM_COMPUTE is unavailable here"):
        train(tmp_path)


def least_that_fits(job: TrainingJob, limits: Limits) -> int:
    """Bytes of memory below which no plan fits."""
    low, high = 0, 2**34
    while high - low > 1:
        middle = (low + high) // 2
        try:
            decide(job, replace(limits, available=dict.fromkeys(job.devices, middle)))
        except PlacementInvalid:
            low = middle
        else:
            high = middle
    return high


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("asked", ["FAST", "COMPUTE"])
def test_fast_trains_without_what_the_step_does_not_fit_with(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The variable that asks for eight bits is an error there, as any plan that cannot run."""
    use_aot_eager(monkeypatch)
    monkeypatch.setitem(settings.FAST_FIELDS, "compute", "int8")  # which the CPU has
    for name, value in {asked: "int8" if asked == "COMPUTE" else "1", "COMPILE": "1", "PLAN": "stream"}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    room: list[int] = []

    def in_little_room(job: TrainingJob, limits: Limits) -> TrainingPlan:
        room[:] = room or [least_that_fits(job, limits) - 1]
        return decide(job, replace(limits, available=dict.fromkeys(job.devices, room[0])))

    monkeypatch.setattr(launch, "decide", in_little_room)
    wanshim.activate()
    if asked == "COMPUTE":
        with pytest.raises(PlacementInvalid, match="does not fit"):
            video_job.train(tmp_path)
        return
    video_job.train(tmp_path)
    wanshim.report(strict=True)
    assert "no Linear multiplies in eight bits: the step does not fit with it, and WANSHIM_FAST asks" in notes(FEATURE)
    assert "the step does not fit with it" in caplog.text
    assert wanshim.report().row(COMPILED).state == "exercised"
