"""`WANSHIM_PLAN`: what is chosen for a training job, that it is said with its reason, and that no file changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate import Accelerator

import wanshim
from tests.contract.diffsynth import video_job
from tests.contract.diffsynth.training import FEATURE, Training, train, unsplit
from wanshim import settings
from wanshim.adapters.diffsynth.splitting.job import read_job
from wanshim.adapters.diffsynth.training_road import TrainingCall
from wanshim.core.shared import host_memory
from wanshim.core.strategy import KeptOn, Limits, Strategy, TrainingJob
from wanshim.core.strategy.candidates import Candidate, candidates
from wanshim.core.streaming import stream_of
from wanshim.errors import FeatureUnavailable


def notes() -> str:
    return "\n".join(wanshim.report(strict=False).row(FEATURE).notes)


@pytest.mark.slow
def test_split_says_what_each_plan_would_give_and_why_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    video_job.train(tmp_path)
    assert "plan: split. It gives at most 1.00x of one GPU's samples a second." in notes()
    assert "Pipeline: gradient accumulation is 1" in notes()
    assert "accelerate launch --num_processes 2 would reach 2.00x at most" in notes()
    assert "raise gradient accumulation for a pipeline" in notes()


def test_accumulation_gives_a_pipeline_and_the_plan_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    video_job.train(tmp_path, accumulation=2)
    assert "plan: pipeline. It gives at most 1.33x" in notes()


@pytest.mark.slow
@pytest.mark.parametrize("expandable", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_pipeline_needs_memory_for_what_the_allocator_leaves_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expandable: bool
) -> None:
    """As much as is predicted is enough with expandable segments alone; without, one micro-batch goes at a time."""
    for name, value in {"WANSHIM_DEVICES": "cpu,cpu", "WANSHIM_OFFLOAD": "off", "WANSHIM_CHUNK": "off"}.items():
        monkeypatch.setenv(name, value)
    if expandable:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    wanshim.activate(f"none,{FEATURE}")
    in_pipeline = video_job.predicted_bytes(tmp_path, monkeypatch, None, accumulation=2)
    video_job.limit(monkeypatch, in_pipeline)
    video_job.train(tmp_path / "limited", accumulation=2)
    assert notes().count("2 micro-batches in a pipeline of 2 stages") == (
        2 if expandable else 1
    )  # the first run had no limit
    assert ("several in flight would not fit, one does; PYTORCH_CUDA_ALLOC_CONF" in notes()) is not expandable


@pytest.mark.sweep
@pytest.mark.slow
def test_split_that_is_named_takes_one_micro_batch_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, logs = unsplit(2)
    for name, value in {"WANSHIM_DEVICES": "cpu,cpu", "WANSHIM_PLAN": "split"}.items():
        monkeypatch.setenv(name, value)
    wanshim.activate(f"none,{FEATURE}")
    found, split_logs, _ = train(tmp_path / "split", 2)
    assert (found, split_logs) == (expected, logs)
    assert "one micro-batch at a time: WANSHIM_PLAN=split" in notes()


def test_named_pipeline_that_is_unavailable_is_refused_under_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"DEVICES": "cpu,cpu", "PLAN": "pipeline", "STRICT": "1"}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(FeatureUnavailable, match="WANSHIM_PLAN=pipeline is unavailable: gradient accumulation is 1"):
        train(tmp_path, 1)


@pytest.mark.slow
def test_auto_streams_only_what_does_not_fit_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = video_job.train(tmp_path / "without")
    monkeypatch.setenv("WANSHIM_PLAN", "auto")
    wanshim.activate()
    found, module = video_job.train(tmp_path / "whole")
    assert found == expected
    assert stream_of(module.pipe.dit) is None
    assert "plan: resident. It gives at most 1.00x" in notes()
    video_job.limit(monkeypatch, smallest_for_the_whole() - 1)
    found, module = video_job.train(tmp_path / "streamed")
    assert found == expected
    assert stream_of(module.pipe.dit) is not None
    assert "plan: stream. " in notes()
    assert "Resident: does not fit the devices" in notes()
    assert "self-attention is kept in host memory" in notes()
    assert "checkpoints are offloaded to host memory, bit for bit the same: the plan keeps attention" in notes()


@pytest.mark.sweep
@pytest.mark.slow
def test_auto_keeps_attention_in_host_memory_before_it_computes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = video_job.train(tmp_path / "without")
    monkeypatch.setenv("WANSHIM_PLAN", "auto")
    wanshim.activate()
    peaks = {
        (way.settings.offload, way.settings.keep): way.peaks[0].total
        for way in ways_on_the_host(job_on_the_host())
        if way.settings.chunk is None
    }
    room = peaks[False, KeptOn.DEVICE] - 1
    assert room > peaks[False, None]
    video_job.limit(monkeypatch, room)
    found, _ = video_job.train(tmp_path / "kept")
    assert found == expected
    assert "plan: resident. " in notes()
    assert "self-attention is kept in host memory" in notes()
    assert "checkpoints are offloaded to host memory, bit for bit the same: the plan keeps attention beside" in notes()


@pytest.mark.parametrize(
    ("available", "allocated", "kept"),
    [
        pytest.param(1.6, 1.0, True, marks=pytest.mark.slow),
        (1.6, 0.0, False),
        pytest.param(1.4, 1.0, False, marks=pytest.mark.slow),
    ],
    ids=["read", "mapped from files", "little is left beside them"],
)
def test_weights_that_wait_on_the_host_are_left_room_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: float, allocated: float, kept: bool
) -> None:
    """In multiples of what attention needs beside checkpoints; pages of a file count as available already."""
    job = job_on_the_host()
    assert job.video is not None
    one = job.micro_batch(job.video.tokens, None)
    needed = len(job.blocks) * (one.activation + one.attention)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: int(available * needed))
    monkeypatch.setattr(host_memory, "own_bytes", lambda: int(allocated * needed))
    (on_device,) = (
        way.peaks[0].total
        for way in ways_on_the_host(job)
        if (way.settings.chunk, way.settings.offload, way.settings.keep) == (None, False, KeptOn.DEVICE)
    )
    monkeypatch.setenv("WANSHIM_PLAN", "auto")
    monkeypatch.setenv("WANSHIM_CHUNK", "off")
    wanshim.activate()
    video_job.limit(monkeypatch, on_device - 1)
    video_job.train(tmp_path)
    assert ("self-attention is kept in host memory" in notes()) is kept


def job_on_the_host(module: Training | None = None) -> TrainingJob:
    """The training job of `test_split_memory`, whole on the CPU."""
    call = TrainingCall(
        accelerator=Accelerator(), model=module or video_job.module_with_video(), logger=None, dataset=None,
        options={}, script=video_job.Namespace(**video_job.VIDEO),
    )  # fmt: skip
    return read_job(call, None, settings.read())


@pytest.mark.parametrize("trains_the_head", [False, True])
def test_job_counts_what_lies_outside_the_blocks_apart_trained_and_frozen(trains_the_head: bool) -> None:
    module = video_job.module_with_video()
    dit = module.pipe.dit
    dit.head.head.weight.requires_grad_(trains_the_head)
    inside = {id(tensor) for tensor in (*dit.blocks.parameters(), *dit.blocks.buffers())}
    outside = [t for t in (*module.pipe.parameters(), *module.pipe.buffers()) if id(t) not in inside]
    trained = dit.head.head.weight.nbytes if trains_the_head else 0
    job = job_on_the_host(module)
    assert all(block.trained for block in job.blocks)  # LoRA
    assert (job.home.trained, job.home.frozen) == (trained, sum(t.nbytes for t in outside) - trained)


def test_hint_does_not_propose_the_low_precision_base_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "WANSHIM_BASE" in job_on_the_host().advice("low_precision")
    monkeypatch.setenv("WANSHIM_BASE", "float8")
    assert job_on_the_host().advice("low_precision") == ""


def ways_on_the_host(job: TrainingJob) -> list[Candidate]:
    """The candidates with the whole model on one device."""
    return list(candidates(job, Limits(), Strategy.RESIDENT))


def smallest_for_the_whole() -> int:
    """What is predicted for the model wholly on its device, offloaded or not: the least."""
    return min(way.peaks[0].total for way in ways_on_the_host(job_on_the_host()))


@pytest.mark.slow
def test_compiled_blocks_in_eight_bits_are_predicted_to_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {}
    for changes in ("", "COMPILE", "COMPUTE", "COMPILE COMPUTE"):
        with monkeypatch.context() as asked:
            for name in changes.split():
                asked.setenv(f"WANSHIM_{name}", {"COMPILE": "1", "COMPUTE": "int8"}[name])
            peaks[changes] = smallest_for_the_whole()
    video = job_on_the_host().video
    assert video is not None
    widest = video_job.module_with_video().pipe.dit.blocks[0].ffn[0].out_features
    assert peaks[""] == peaks["COMPILE"] == peaks["COMPUTE"]
    assert peaks["COMPILE COMPUTE"] == peaks[""] + 5 * video.tokens * widest


@pytest.mark.slow
def test_auto_without_a_known_video_changes_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanshim.activate()  # its repairs alone: with them a step of early DiffSynth has another result
    expected, _, _ = train(tmp_path / "without", 2)
    monkeypatch.setenv("WANSHIM_PLAN", "auto")
    wanshim.activate()
    found, _, module = train(tmp_path / "auto", 2)
    assert found == expected
    assert stream_of(module.pipe.dit) is None
    assert "no plan is chosen without a predicted peak; name one with WANSHIM_PLAN=stream" in notes()
