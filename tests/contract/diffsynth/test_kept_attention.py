"""Attention kept for recomputation while DiffSynth trains: the bits of its own run, and a plan that says so."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from accelerate import Accelerator
from diffsynth.diffusion import runner
from diffsynth.models import wan_video_dit
from diffsynth.pipelines.wan_video import model_fn_wan_video

import wanshim
from tests.contract.diffsynth import variants, video_job, wan
from tests.contract.diffsynth.ddp_jobs import forked
from tests.contract.diffsynth.ddp_worker import Job
from tests.contract.diffsynth.training import Logger, Samples, Training
from tests.contract.diffsynth.variant_steps import step
from wanshim.adapters.diffsynth import checkpoint_offload, kept_attention
from wanshim.adapters.diffsynth.kept_attention import keep_attention, refusal
from wanshim.adapters.diffsynth.kept_blocks import keep_blocks
from wanshim.adapters.diffsynth.kept_blocks import refusal as refusal_of_blocks
from wanshim.adapters.diffsynth.splitting import job, launch
from wanshim.adapters.diffsynth.training_road import Row, TrainingCall
from wanshim.core.model_split.quantize import quantize_base
from wanshim.core.strategy import KeptOn, Strategy, TrainingPlan, predict
from wanshim.core.strategy.candidates import StepSettings
from wanshim.errors import FeatureUnavailable, PlacementInvalid
from wanshim.undo import Undo

FEATURE, SPLIT = "diffsynth.kept_attention", "diffsynth.model_split"
CHECKPOINT = torch.utils.checkpoint.checkpoint


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kept_attention, "MIN_BYTES", 1)
    monkeypatch.setattr(checkpoint_offload, "MIN_BYTES", 1)
    yield
    assert torch.utils.checkpoint.checkpoint is CHECKPOINT


def train(folder: Path, accumulation: int = 1) -> dict[str, bytes]:
    torch.manual_seed(11)
    runner.launch_training_task(
        Accelerator(gradient_accumulation_steps=accumulation), Samples(4), Training(), Logger(folder),
        learning_rate=1e-2, num_workers=0, save_steps=2,
    )  # fmt: skip
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


@cache
def plain(accumulation: int) -> dict[str, bytes]:
    """The files of DiffSynth's own run over so many micro-batches a step."""
    with TemporaryDirectory() as folder:
        return train(Path(folder), accumulation)


@pytest.fixture(scope="module")
def plain_video(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same, over two, of a run whose arguments say how large the videos are."""
    return video_job.train(tmp_path_factory.mktemp("plain_video"), 2)[0]


@cache
def plain_step(name: str) -> list[torch.Tensor]:
    return step(variants.tiny(name), use_gradient_checkpointing=True)


def notes(feature: str, strict: bool = True) -> str:
    return "\n".join(wanshim.report(strict=strict).row(feature).notes)


@pytest.mark.parametrize("place", KeptOn)
@pytest.mark.parametrize("name", variants.MAKERS)
def test_variant_gives_the_same_loss_and_gradients(name: str, place: KeptOn) -> None:
    wanshim.activate("none,diffsynth.s2v_checkpointing")
    expected = plain_step(name)
    said: list[str] = []
    with Undo() as undo:
        keep_attention(undo, Row.of(said.append), place)
        found = step(variants.tiny(name), use_gradient_checkpointing=True)
    assert all(map(torch.equal, expected, found))
    kept, reused = (int(word) for word in said[0].replace(";", "").split() if word.isdigit())
    assert kept == reused >= len(variants.tiny(name).dit.blocks)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("t2v", "vace", "s2v", "animate") else pytest.mark.slow)
        for name in variants.MAKERS
    ],
)
def test_variant_gives_the_same_loss_and_gradients_with_kept_blocks(name: str) -> None:
    wanshim.activate("none,diffsynth.s2v_checkpointing")
    expected = plain_step(name)
    said: list[str] = []
    made = variants.tiny(name)
    blocks = list(made.dit.blocks)
    step_of_plan = StepSettings(chunk=None, offload=False, in_flight=1, num_kept_blocks=(len(blocks) - 1,))
    with Undo() as undo:
        keep_blocks(
            undo,
            Row.of(said.append),
            TrainingPlan(strategy=Strategy.RESIDENT, devices=("cpu",), step=step_of_plan),
            blocks,
        )
        found = step(made, use_gradient_checkpointing=True)
    assert all(map(torch.equal, expected, found))
    assert said[1] == f"{len(blocks) - 1} blocks ran {len(blocks) - 1} times without being computed again"


@pytest.mark.parametrize("place", KeptOn)
@pytest.mark.parametrize("name", ["t2v", "vace", "animate"])
def test_split_variant_gives_the_same_loss_and_gradients(name: str, place: KeptOn) -> None:
    expected = plain_step(name)
    made = variants.tiny(name)
    handle = variants.split(made, ["cpu:0", "cpu:1"], [3])
    with Undo() as undo:
        keep_attention(undo, Row.of([].append), place)
        found = step(made, use_gradient_checkpointing=True)
    handle.remove()
    assert all(map(torch.equal, expected, found))


def test_setting_keeps_attention_and_writes_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(1)
    monkeypatch.setenv("WANSHIM_KEEP", "attention")  # switches the feature on
    wanshim.activate("none,diffsynth.kept_attention")
    assert train(tmp_path / "ours") == expected
    assert "self-attention is kept on the device" in notes(FEATURE)
    assert "16 attentions kept" in notes(FEATURE)  # 4 micro-batches of 4 blocks
    assert "16 were used again" in notes(FEATURE)


RUNS = {
    "split": {"DEVICES": "cpu:0,cpu:1", "PIPELINE": "0"},
    "pipeline": {"DEVICES": "cpu,cpu"},
    "pipeline, checkpoints offloaded": {"DEVICES": "cpu,cpu,cpu", "OFFLOAD": "on"},
    "streamed": {"PLAN": "stream:3"},
    "streamed, checkpoints offloaded": {"PLAN": "stream:4", "OFFLOAD": "on"},
}
FEW = ("split", "streamed, checkpoints offloaded")


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [pytest.param(given, id=name, marks=[pytest.mark.sweep] * (name not in FEW)) for name, given in RUNS.items()],
)
def test_planned_run_keeps_attention_and_writes_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    expected = plain(2)
    for name, value in {"KEEP": "attention", **variables}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{SPLIT},{FEATURE}")
    assert train(tmp_path / "ours", 2) == expected
    assert "self-attention is kept on the device and not computed again" in notes(FEATURE)
    assert "16 attentions kept" in notes(FEATURE)
    assert "16 were used again" in notes(FEATURE)


@pytest.mark.slow
def test_tokens_over_ranks_give_the_same_gradients(tmp_path: Path) -> None:
    """Each rank keeps its own heads' part."""
    jobs = [
        Job(keep, samples=3, accumulation=1, variables={"WANSHIM_PLAN": "sequence", "WANSHIM_KEEP": keep})
        for keep in ("off", "attention")
    ]
    said = forked(tmp_path / "ranks", jobs)
    for rank in range(2):
        off, kept = ((tmp_path / "ranks" / f"{job.name}.gradients{rank}").read_bytes() for job in jobs)
        assert off == kept
        assert "12 attentions kept" in "".join(said[rank]["attention"]["notes"])  # 3 samples through 4 blocks
        assert "12 were used again" in "".join(said[rank]["attention"]["notes"])


@pytest.mark.parametrize("base", ["float8", "int8"])
def test_eight_bit_base_gives_the_same_gradients(base: str) -> None:
    found = []
    for keep in (False, True):
        model = wan.lora_model(dtype=torch.bfloat16)
        quantize_base(model.blocks, base)
        with Undo() as undo:
            if keep:
                keep_attention(undo, Row.of([].append), KeptOn.DEVICE)
            inputs = wan.inputs(dtype=torch.bfloat16)
            model_fn_wan_video(model, **inputs, use_gradient_checkpointing=True).float().pow(2).mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == 80  # two matrices of ten Linears in each of 4 blocks
    assert all(map(torch.equal, *found))


def planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None = None, **variables: str
) -> tuple[TrainingPlan, dict[str, bytes]]:
    """The plan of a run whose video is known, on a device of so many bytes, and what it wrote."""
    seen: list[TrainingPlan] = []
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(f"WANSHIM_{name}", value)
        if limit is not None:
            video_job.limit(patch, limit)
        decide = launch.decide
        patch.setattr(launch, "decide", lambda *given: seen.append(decide(*given)) or seen[-1])
        wanshim.activate(f"none,{SPLIT},{FEATURE}" if {"DEVICES", "PLAN"} & {*variables} else f"none,{FEATURE}")
        files, _ = video_job.train(folder)
        wanshim.deactivate()
    return seen[0], files


def place(plan: TrainingPlan) -> KeptOn | None:
    assert plan.step is not None
    return plan.step.keep


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("over", [{"DEVICES": "cpu,cpu"}, {}], ids=["split", "as DiffSynth runs it"])
def test_attention_is_kept_where_the_predicted_step_leaves_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: dict[str, str]
) -> None:
    monkeypatch.setattr(predict, "OFFLOADED_WINDOW", 1)
    kept, expected = planned(tmp_path / "kept", monkeypatch, **over)
    most = max(peak.total for peak in kept.peaks)
    assert place(kept) is KeptOn.DEVICE
    # 48 tokens of 48 channels in bf16, and 4 bytes a token and head; one block is at work on each device
    blocks = 4
    assert sum(peak.attention for peak in kept.peaks) == (blocks - 1) * 48 * (48 * 2 + 4 * 2)
    assert "kept attention" in "".join(map(str, kept.peaks))
    tight, found = planned(tmp_path / "tight", monkeypatch, most - 1, **over)
    assert place(tight) is None
    assert found == expected
    asked, found = planned(tmp_path / "asked", monkeypatch, most - 1, KEEP="attention", **over)
    assert place(asked) is KeptOn.HOST
    assert "self-attention is kept in host memory" in str(asked)
    assert found == expected
    off, _ = planned(tmp_path / "off", monkeypatch, KEEP="off", DEVICES="cpu,cpu")
    assert place(off) is None


@pytest.mark.slow
def test_auto_uses_host_memory_where_the_user_offloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "OFFLOADED_WINDOW", 1)
    over = {"DEVICES": "cpu,cpu", "OFFLOAD": "on"}
    kept, expected = planned(tmp_path / "kept", monkeypatch, **over)
    assert place(kept) is KeptOn.DEVICE
    tight, found = planned(tmp_path / "tight", monkeypatch, max(peak.total for peak in kept.peaks) - 1, **over)
    assert place(tight) is KeptOn.HOST
    assert found == expected


def test_step_that_attention_makes_too_large_is_refused_with_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = {"DEVICES": "cpu,cpu", "OFFLOAD": "off", "CHUNK": "off"}
    off, _ = planned(tmp_path / "off", monkeypatch, KEEP="off", **over)
    with pytest.raises(PlacementInvalid, match="attention computed again: WANSHIM_KEEP=off"):
        planned(tmp_path, monkeypatch, max(peak.total for peak in off.peaks), KEEP="attention", **over)


@pytest.mark.parametrize(
    ("over", "kept"),
    [
        ({}, "the last 4 blocks are"),
        ({"DEVICES": "cpu,cpu", "PIPELINE": "0"}, "the last 2, 2 blocks of the stages are"),
        ({"DEVICES": "cpu,cpu"}, "the last 2, 2 blocks of the stages are"),
        pytest.param({"PLAN": "stream:3"}, "", marks=pytest.mark.slow),
        pytest.param({"DEVICES": "cpu,cpu", "OFFLOAD": "on"}, "", marks=pytest.mark.slow),
    ],
    ids=["as DiffSynth runs it", "split", "pipeline", "streamed", "checkpoints offloaded"],
)
def test_kept_blocks_write_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: dict[str, str], kept: str, plain_video: dict[str, bytes]
) -> None:
    for name, value in {"KEEP": "blocks", **over}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{SPLIT},{FEATURE}" if over else f"none,{FEATURE}")
    found, _ = video_job.train(tmp_path / "ours", 2)
    assert found == plain_video
    said = notes(FEATURE)
    if kept:
        assert f"{kept} not computed again in backward, bit for bit the same" in said
        assert "4 blocks ran 12 times without being computed again" in said  # 3 samples
    else:
        assert "no block is kept: " in notes(SPLIT)
        assert "12 were used again" in said  # attention is kept as before


def test_last_blocks_of_each_stage_are_the_ones_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their backward comes first: others would hold what they keep until the end."""
    blocks = [torch.nn.Identity() for _ in range(6)]
    step = StepSettings(chunk=None, offload=False, in_flight=1, num_kept_blocks=(1, 2))
    plan = TrainingPlan(strategy=Strategy.SPLIT, devices=("cpu", "cpu"), split_points=(2,), step=step)
    checkpointed: list[object] = []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda block, x: checkpointed.append(block))
    with Undo() as undo:
        keep_blocks(undo, Row.of([].append), plan, blocks)
        for block in blocks:
            torch.utils.checkpoint.checkpoint(block, torch.ones(1))
    monkeypatch.undo()
    assert [blocks.index(block) for block in checkpointed] == [0, 2, 3]


@pytest.mark.slow
def test_blocks_are_kept_where_the_predicted_step_leaves_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, expected = planned(tmp_path / "kept", monkeypatch, KEEP="blocks", DEVICES="cpu,cpu")
    assert kept.step is not None
    assert kept.step.num_kept_blocks == (2, 2)
    limit = int(max(peak.total for peak in kept.peaks) / 0.87)
    tight, found = planned(tmp_path / "tight", monkeypatch, limit - 2, KEEP="blocks", DEVICES="cpu,cpu")
    assert tight.step is not None
    assert 0 < sum(tight.step.num_kept_blocks) < 4
    assert found == expected
    off, found = planned(tmp_path / "off", monkeypatch, KEEP="attention", DEVICES="cpu,cpu")
    assert (off.kept_blocks_text, found) == ("", expected)


@pytest.mark.slow
def test_tokens_over_ranks_give_the_same_gradients_with_kept_blocks(tmp_path: Path) -> None:
    jobs = [
        Job(keep, samples=3, accumulation=1, video=True, variables={"WANSHIM_PLAN": "sequence", "WANSHIM_KEEP": keep})
        for keep in ("off", "blocks")
    ]
    said = forked(tmp_path / "ranks", jobs)
    for rank in range(2):
        off, kept = ((tmp_path / "ranks" / f"{job.name}.gradients{rank}").read_bytes() for job in jobs)
        assert off == kept
        assert "4 blocks ran 12 times" in "".join(said[rank]["blocks"]["notes"])


def call(state: Any = None, **options: object) -> TrainingCall:
    state = state or SimpleNamespace(deepspeed_plugin=None)
    accelerator = SimpleNamespace(state=state, device=torch.device("cpu"))
    pipe = SimpleNamespace(dit=variants.tiny("t2v").dit, torch_dtype=torch.float32)
    model = SimpleNamespace(pipe=pipe)
    return TrainingCall(accelerator=accelerator, model=model, logger=None, dataset=None, options=options, script=None)


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(call()) is None
    assert "DeepSpeed" in str(refusal(call(SimpleNamespace(deepspeed_plugin=object()))))
    assert "--use_gradient_checkpointing" in str(refusal(call(use_gradient_checkpointing=False)))
    for library in ("flash_attn", "flash_attn_3"):  # no operator of that name, whatever else this process has loaded
        monkeypatch.setattr(torch.ops, library, SimpleNamespace())
    for flag, reason in (
        ("SAGE_ATTN", "SageAttention has no backward"),
        ("FLASH_ATTN_2", "install 2.7 or newer"),
        ("FLASH_ATTN_3", "install a newer one"),
    ):
        monkeypatch.setattr(wan_video_dit, f"{flag}_AVAILABLE", True)
        assert reason in str(refusal(call()))
    assert refusal_of_blocks(call()) is None  # their attention is not computed again, by whatever kernel
    assert "DeepSpeed" in str(refusal_of_blocks(call(SimpleNamespace(deepspeed_plugin=object()))))
    for name, value in {"KEEP": "attention", "STRICT": "1"}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(FeatureUnavailable, match=r"WANSHIM_KEEP is unavailable here: .*install a newer"):
        train(tmp_path)


@pytest.mark.parametrize("over", [{}, {"DEVICES": "cpu,cpu"}], ids=["as DiffSynth runs it", "split"])
def test_blocks_are_kept_whatever_the_attention_kernel(
    over: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_video: dict[str, bytes]
) -> None:
    monkeypatch.setattr(kept_attention, "_refusal_of_kernel", lambda call: "an old kernel")
    for name, value in {"KEEP": "blocks", "STRICT": "1", **over}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{SPLIT},{FEATURE}" if over else f"none,{FEATURE}")
    found, _ = video_job.train(tmp_path / "ours", 2)
    assert found == plain_video
    assert "4 blocks ran 12 times without being computed again" in notes(FEATURE)


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("no kernel for shapes")


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("why", ["no size", pytest.param("no shapes", marks=pytest.mark.sweep)])
def test_attention_that_was_asked_for_is_kept_where_nothing_is_predicted(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script without `num_frames`, and a block that does not run on shapes alone."""
    if why == "no shapes":
        monkeypatch.setattr(job, "micro_batch", _fail)
    for name, value in {"KEEP": "attention", "PLAN": "auto", "OFFLOAD": "on"}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{SPLIT},{FEATURE}")
    expected = plain(1) if why == "no size" else video_job.train(tmp_path / "plain")[0]
    found = train(tmp_path / "ours") if why == "no size" else video_job.train(tmp_path / "ours")[0]
    assert found == expected
    assert f"{16 if why == 'no size' else 12} were used again" in notes(FEATURE)
    assert "checkpoint inputs" in notes(SPLIT)


def test_refusal_is_reported_and_the_run_is_diffsynths_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(1)
    monkeypatch.setattr(kept_attention, "_refusal_of_kernel", lambda call: "an old kernel")
    monkeypatch.setenv("WANSHIM_KEEP", "attention")
    wanshim.activate(f"none,{FEATURE}")
    assert train(tmp_path / "ours") == expected
    assert "attention is not kept: an old kernel" in notes(FEATURE, strict=False)
    assert wanshim.report().row(FEATURE).state == "ineffective"
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.deactivate()
    wanshim.activate(f"none,{SPLIT},{FEATURE}")
    assert train(tmp_path / "split") == expected
    assert "attention is not kept: an old kernel" in notes(FEATURE, strict=False)
    assert wanshim.report().row(FEATURE).fallbacks == {"attention is not kept: an old kernel": 1}


@pytest.mark.parametrize(
    "over",
    [pytest.param({"PLAN": "auto"}, marks=pytest.mark.slow), {"DEVICES": "cpu,cpu"}],
    ids=["one device", "split"],
)
def test_planned_run_keeps_blocks_unasked_where_memory_is_known_and_leaves_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: dict[str, str]
) -> None:
    off, expected = planned(tmp_path / "off", monkeypatch, 2**40, KEEP="off", **over)
    auto, found = planned(tmp_path / "auto", monkeypatch, 2**40, **over)
    assert found == expected
    assert off.step is not None
    assert (off.kept_blocks_text, off.step.keep) == ("", None)
    assert auto.step is not None
    assert sum(auto.step.num_kept_blocks) == 4


def test_planned_run_keeps_attention_alone_where_memory_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = planned(tmp_path, monkeypatch, PLAN="auto")
    assert (plan.kept_blocks_text, place(plan)) == ("", KeptOn.DEVICE)
