"""`decide` over tables of jobs and limits: what is taken, what is rejected and why. No device is involved."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanshim.core.model_split.side_models import HOST
from wanshim.core.strategy import (
    KeptOn,
    Limits,
    MicroBatch,
    Request,
    SideModel,
    Stored,
    Strategy,
    TrainingJob,
    TrainingPlan,
    Video,
    decide,
    decide_again,
    search,
)
from wanshim.errors import PlacementInvalid

GIB = 2**30


def micro_batch(tokens: int, chunk: int | None) -> MicroBatch:
    """Bytes of a block of width 5120 in bf16; chunks halve what one block at work takes."""
    activation = 2 * tokens * 5120
    working = (14 if chunk is None else 7) * activation
    return MicroBatch(activation, 8 * 2**20, 12 * activation, working, activation, 4 * 40 * tokens)


BLOCKS = (Stored(690 * 2**20, 6 * 2**20),) * 40
WHOLE = TrainingJob(
    devices=("cuda:0",),
    split_points=None,
    blocks=BLOCKS,
    home=Stored(1 * GIB),
    streamable=(690 * 2**20,) * 40,
    model_bytes=40 * 696 * 2**20 + GIB,
    video=Video(frames=13, tokens_per_frame=1560, stride=4),
    micro_batch=micro_batch,
    request=Request(chunks=(None, 2048)),
    words={
        "fewer_frames": "--frames {value}",
        "processes": "launch {value}",
        "requested": "PLAN={value}",
        "launch": "run on {value}",
        "sequence": "all GPUs: run on {value}",
        "expandable_segments": "; SEGMENTS",
        "choose": "choose another PLAN",
    },
)
RANKS = replace(WHOLE, processes=4, local_processes=4, request=Request(strategy=Strategy.SEQUENCE))
LONG = Video(frames=21, tokens_per_frame=3600, stride=4)
SPLIT = replace(WHOLE, devices=("cuda:0", "cuda:1"), split_points=(20,), accumulation=4)


def limits(gib: float, devices: int = 2) -> Limits:
    return Limits(available={f"cuda:{i}": int(gib * GIB) for i in range(devices)})


@pytest.mark.parametrize(
    ("job", "gib", "strategy", "settings_of_step"),
    [
        (SPLIT, 80, Strategy.PIPELINE, (None, False, 4)),
        (SPLIT, 24, Strategy.PIPELINE, (None, True, 4)),
        (replace(SPLIT, accumulation=1), 80, Strategy.SPLIT, (None, False, 1)),
        (replace(SPLIT, request=Request(strategy=Strategy.SPLIT)), 80, Strategy.SPLIT, (None, False, 1)),
        (replace(SPLIT, request=Request(offload=True)), 80, Strategy.PIPELINE, (None, True, 4)),
        (replace(SPLIT, request=Request(chunks=(512,))), 80, Strategy.PIPELINE, (512, False, 4)),
        (WHOLE, 80, Strategy.RESIDENT, (None, False, 1)),
        (WHOLE, 24, Strategy.STREAM, (None, False, 1)),
        (replace(WHOLE, request=Request(strategy=Strategy.STREAM)), 80, Strategy.STREAM, (None, False, 1)),
        (RANKS, 80, Strategy.SEQUENCE, (None, False, 1)),
        (replace(RANKS, video=LONG), 24, Strategy.SEQUENCE, (None, False, 1)),
    ],
    ids=["pipeline", "offload", "no accumulation", "split asked", "offload asked", "chunks asked", "resident",
         "stream", "stream asked", "sequence", "sequence of a long video"],
)  # fmt: skip
def test_job_gets_the_plan_of_the_table(
    job: TrainingJob, gib: float, strategy: Strategy, settings_of_step: tuple[int | None, bool, int]
) -> None:
    plan = decide(job, limits(gib))
    assert plan.strategy is strategy
    assert plan.step is not None
    assert (plan.step.chunk, plan.step.offload, plan.step.in_flight) == settings_of_step


RESIDENT, HALF = Request(strategy=Strategy.RESIDENT, offload=False), Request(strategy=Strategy.SPLIT)


@pytest.mark.parametrize(
    ("job", "gib", "place"),
    [
        (SPLIT, 80, KeptOn.DEVICE),
        (replace(SPLIT, request=HALF), 24, None),
        (replace(SPLIT, request=replace(HALF, keep=False)), 80, None),
        (replace(SPLIT, request=replace(HALF, keep=True)), 24, KeptOn.HOST),
        (replace(SPLIT, request=replace(HALF, offload=True)), 21, KeptOn.HOST),
        (replace(SPLIT, checkpointing=False), 900, None),
        (WHOLE, 80, KeptOn.DEVICE),
        (WHOLE, 24, None),
        (replace(WHOLE, request=RESIDENT), 80, KeptOn.DEVICE),
        (replace(WHOLE, request=RESIDENT), 40, None),
        (replace(WHOLE, request=replace(RESIDENT, keep=True)), 40, KeptOn.HOST),
        (replace(WHOLE, request=Request(strategy=Strategy.STREAM, keep=True)), 24, KeptOn.DEVICE),
        (replace(WHOLE, request=Request(strategy=Strategy.STREAM, streamed_blocks=35)), 28, KeptOn.DEVICE),
        (replace(WHOLE, request=Request(strategy=Strategy.STREAM, streamed_blocks=20)), 24, None),
        (replace(WHOLE, request=Request(strategy=Strategy.STREAM, offload=True)), 24, KeptOn.HOST),
        (replace(WHOLE, unpredictable="a block"), 80, None),
        (replace(SPLIT, unpredictable="a block", request=Request(keep=True)), 80, KeptOn.DEVICE),
    ],
    ids=["split with room", "without room", "off", "asked without room", "checkpoints offloaded", "nothing recomputed",
         "resident", "streamed by itself", "as it is", "as it is, full", "as it is, asked", "streamed and asked",
         "many blocks streamed", "few blocks streamed", "streamed and offloaded", "unpredictable", "and asked"],
)  # fmt: skip
def test_attention_is_kept_where_there_is_room_or_it_was_asked_for(
    job: TrainingJob, gib: float, place: KeptOn | None
) -> None:
    plan = decide(job, limits(gib))
    assert (plan.step.keep if plan.step is not None else None) is place
    assert ("self-attention is kept" in str(plan)) is (place is not None)


ROOMY = 64 * GIB  # of host memory: the checkpoints and attention of WHOLE are 22 GiB
OFFLOADED = replace(HALF, offload=None)


@pytest.mark.parametrize(
    ("job", "gib", "host", "settings_of_step"),
    [
        (WHOLE, 16, ROOMY, (True, KeptOn.HOST)),
        (WHOLE, 24, ROOMY, (True, KeptOn.HOST)),
        (WHOLE, 24, ROOMY // 3, (False, None)),
        (replace(WHOLE, request=Request(keep=False)), 24, ROOMY, (False, None)),
        (replace(WHOLE, request=Request(offload=False)), 24, ROOMY, (False, None)),
        (replace(WHOLE, request=Request(keep=True)), 24, ROOMY, (False, KeptOn.DEVICE)),
        (replace(WHOLE, request=Request(strategy=Strategy.STREAM, streamed_blocks=35)), 28, ROOMY,
         (False, KeptOn.DEVICE)),
        (replace(SPLIT, request=OFFLOADED), 24, ROOMY, (False, None)),
        (replace(SPLIT, request=OFFLOADED, accumulation=1), 21, ROOMY, (True, KeptOn.HOST)),
        (replace(SPLIT, request=OFFLOADED, accumulation=1), 21, ROOMY // 3, (True, None)),
    ],
    ids=["streamed", "streamed with room for checkpoints", "little host memory", "attention off", "offload off",
         "attention asked", "blocks asked", "split with room", "split without", "split, little host memory"],
)  # fmt: skip
def test_attention_waits_in_host_memory_where_checkpoints_would_or_blocks_are_streamed(
    job: TrainingJob, gib: float, host: int, settings_of_step: tuple[bool, KeptOn | None]
) -> None:
    plan = decide(job, replace(limits(gib), host=host))
    assert plan.step is not None
    assert (plan.step.offload, plan.step.keep) == settings_of_step


TOGETHER = replace(WHOLE, processes=2, local_processes=2)
NEEDED, BESIDE = "the step would not fit without", "the plan keeps attention beside them"
IN_THEIR_PLACE = "the plan keeps attention on the device in their place"


@pytest.mark.parametrize(
    ("job", "gib", "host", "settings_of_step", "why"),
    [
        (WHOLE, 48, ROOMY, (False, KeptOn.DEVICE), ""),
        (WHOLE, 46, ROOMY, (True, KeptOn.DEVICE), IN_THEIR_PLACE),
        (WHOLE, 46, 16 * GIB, (True, KeptOn.DEVICE), IN_THEIR_PLACE),
        (WHOLE, 46, 15 * GIB, (False, None), ""),
        (WHOLE, 40, ROOMY, (True, KeptOn.HOST), BESIDE),
        (WHOLE, 40, 30 * GIB, (False, None), ""),
        (WHOLE, 36, ROOMY, (True, KeptOn.HOST), NEEDED),
        (WHOLE, 36, 30 * GIB, (True, None), NEEDED),
        (TOGETHER, 46, ROOMY, (False, None), ""),
        (TOGETHER, 48, ROOMY, (False, KeptOn.DEVICE), ""),
        (replace(WHOLE, processes=2), 46, ROOMY, (True, KeptOn.DEVICE), IN_THEIR_PLACE),
        (replace(WHOLE, request=Request(keep=False)), 46, ROOMY, (False, None), ""),
        (replace(WHOLE, request=Request(offload=False)), 46, ROOMY, (False, None), ""),
        (replace(WHOLE, request=Request(offload=True)), 46, ROOMY, (True, KeptOn.DEVICE), ""),
        (replace(WHOLE, request=Request(keep_blocks=None)), 46, ROOMY, (True, KeptOn.DEVICE), IN_THEIR_PLACE),
        (WHOLE, 24, ROOMY, (True, KeptOn.HOST), BESIDE),
    ],
    ids=["room for all", "room for attention", "host memory for checkpoints", "too little host memory",
         "room for a few outputs", "host memory for checkpoints alone", "no room for checkpoints", "in neither",
         "two processes", "two processes with room", "two machines", "attention off", "offload off", "offload asked",
         "before a block is kept", "streamed"],
)  # fmt: skip
def test_checkpoints_of_one_process_leave_the_device_so_that_attention_can_be_kept(
    job: TrainingJob, gib: float, host: int, settings_of_step: tuple[bool, KeptOn | None], why: str
) -> None:
    plan = decide(job, replace(limits(gib), host=host))
    assert plan.step is not None
    assert (plan.step.chunk, plan.step.offload, plan.step.keep) == (None, *settings_of_step)
    assert plan.why_offloaded == why
    assert all(peak.total <= gib * GIB for peak in plan.peaks)


def test_chunks_change_bits_so_that_attention_computed_again_comes_first() -> None:
    job = replace(WHOLE, request=Request(chunks=(None, 512)))
    plan = decide(job, replace(limits(7.1), host=ROOMY))
    assert plan.step is not None
    assert (plan.step.chunk, plan.step.keep) == (None, None)


def test_nothing_leaves_the_device_so_that_attention_can_be_kept() -> None:
    beside = {"text_encoder": SideModel(num_bytes=8 * GIB, movable=True)}
    job = replace(SPLIT, side_models=beside, home=Stored(9 * GIB), accumulation=1)
    plan = decide(job, limits(33))
    assert plan.side_models == {}
    assert plan.step is not None
    assert plan.step.keep is None
    asked = decide(replace(job, request=Request(keep=True)), limits(33))
    assert asked.side_models == {"text_encoder": "cuda:1"}


@pytest.mark.parametrize("strategy", [Strategy.RESIDENT, Strategy.STREAM, Strategy.SEQUENCE, Strategy.SPLIT])
def test_side_models_that_no_step_calls_leave_their_room_to_the_step(strategy: Strategy) -> None:
    beside = {
        "text_encoder": SideModel(num_bytes=8 * GIB, movable=True),
        "vae": SideModel(num_bytes=GIB, movable=True),
        "image_encoder": SideModel(num_bytes=GIB, movable=False),
    }
    of = SPLIT if strategy is Strategy.SPLIT else RANKS if strategy is Strategy.SEQUENCE else WHOLE
    job = replace(of, side_models=beside, home=Stored(11 * GIB), request=Request(strategy=strategy))
    called = decide(job, limits(70, 4))
    most = called.peaks[0].total / GIB if called.peaks and strategy is not Strategy.STREAM else 70
    encoded = replace(job, request=replace(job.request, idle=frozenset(beside)))
    idle = decide(encoded, limits(most, 4))
    assert called.side_models == {}
    assert idle.side_models == {"text_encoder": HOST, "vae": HOST}
    assert idle.notes[0] == "text_encoder and vae (9.00 GiB) wait in host memory: what they encode is there"
    if called.peaks:
        assert called.peaks[0].total - idle.peaks[0].total == 9 * GIB
    assert decide_again(encoded, limits(most, 4), idle).side_models == idle.side_models


@pytest.mark.parametrize("strategy", [Strategy.RESIDENT, Strategy.SEQUENCE, Strategy.SPLIT])
def test_side_models_that_no_step_calls_stay_where_the_step_gains_nothing_by_their_room(strategy: Strategy) -> None:
    """Moving them takes seconds, and each rank's take host memory."""
    beside = {"text_encoder": SideModel(num_bytes=8 * GIB, movable=True)}
    of = SPLIT if strategy is Strategy.SPLIT else RANKS if strategy is Strategy.SEQUENCE else WHOLE
    request = Request(strategy=strategy, idle=frozenset(beside))
    job = replace(of, side_models=beside, home=Stored(9 * GIB), request=request)
    plan = decide(job, limits(140, 4))
    assert plan.side_models == {}
    assert not any("host memory" in note for note in plan.notes)
    needed = plan.peaks[0].total / GIB
    assert decide(job, limits(needed / 0.86, 4)).side_models == {}
    assert decide(job, limits(needed / 0.88, 4)).side_models == {"text_encoder": HOST}, "a prediction may be off"
    assert decide(job, Limits()).side_models == {}, "a device without a limit has room"
    again = replace(job, video=LONG)
    assert decide_again(again, limits(140, 4), plan).side_models == {}, "what has stayed cannot leave any more"


def test_no_side_model_that_steps_call_leaves_so_that_an_idle_one_can_stay() -> None:
    beside = {
        "text_encoder": SideModel(num_bytes=10 * GIB, movable=True),
        "vae": SideModel(num_bytes=3 * GIB, movable=True),
    }
    request = Request(strategy=Strategy.SEQUENCE, idle=frozenset({"text_encoder"}))
    job = replace(RANKS, side_models=beside, home=Stored(14 * GIB), request=request)
    moves = [decide(job, limits(gib, 4)).side_models for gib in range(44, 70)]
    assert {"text_encoder": HOST} in moves
    assert {} in moves
    assert not [found for found in moves if "vae" in found and "text_encoder" not in found]


def test_pipeline_that_does_not_fit_leaves_the_split_with_the_reason() -> None:
    job = replace(SPLIT, request=Request(offload=False))
    plan = decide(job, limits(24))
    assert plan.strategy is Strategy.SPLIT
    assert plan.rejection_of(Strategy.PIPELINE) == "several in flight would not fit, one does; SEGMENTS"
    expanding = decide(job, replace(limits(22), expandable_segments=True))
    assert expanding.rejection_of(Strategy.PIPELINE) == "several in flight would not fit, one does"
    assert plan.outcome.startswith("one micro-batch at a time: several in flight would not fit")


def test_side_models_leave_before_blocks_are_chunked() -> None:
    beside = {"text_encoder": SideModel(num_bytes=8 * GIB, movable=True)}
    job = replace(SPLIT, side_models=beside, home=Stored(9 * GIB), accumulation=1)
    plan = decide(job, Limits(available={"cuda:0": 24 * GIB, "cuda:1": 24 * GIB}))
    assert plan.side_models == {"text_encoder": HOST}
    assert plan.step is not None
    assert plan.step.chunk is None
    assert "text_encoder (8.00 GiB) waits in host memory" in plan.notes[0]
    assert plan.peaks[0].total <= 24 * GIB


def test_side_model_that_cannot_leave_stays() -> None:
    for movable, moves in ((True, {"vae": "cuda:1"}), (False, {})):
        fixed = {"vae": SideModel(num_bytes=8 * GIB, movable=movable)}
        job = replace(SPLIT, side_models=fixed, home=Stored(9 * GIB), accumulation=1, request=Request(keep=True))
        assert decide(job, limits(33)).side_models == moves


def test_devices_have_less_by_the_side_models_that_moved_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(SPLIT, moved={"cuda:1": 56 * GIB}, request=Request(offload=False))
    less = Limits(available={"cuda:0": 80 * GIB, "cuda:1": 24 * GIB})
    assert decide(job, limits(80)).step == decide(replace(job, moved={}), less).step != decide(SPLIT, limits(80)).step
    sizes = {"text_encoder": 3, "image_encoder": 2, "vae": 1}
    side_models = {name: SideModel(num_bytes=size * GIB, movable=True) for name, size in sizes.items()}
    job = replace(job, side_models=side_models, home=Stored(7 * GIB))
    monkeypatch.setattr(search, "choose_devices", lambda *_: {"text_encoder": "cuda:1", "image_encoder": "cuda:1"})
    rest, left, *_ = search._without_side_models(job, limits(80), Strategy.SPLIT)
    assert left.available == {"cuda:0": 80 * GIB, "cuda:1": (80 - 56 - 3 - 2) * GIB}
    assert (rest.home, list(rest.side_models)) == (Stored(2 * GIB), ["vae"])


def test_blocks_are_streamed_before_they_are_chunked() -> None:
    """Chunks change bits."""
    assert decide(replace(WHOLE, request=Request(chunks=(2048,))), limits(32)).strategy is Strategy.RESIDENT
    plan = decide(WHOLE, limits(32))
    assert plan.strategy is Strategy.STREAM
    assert plan.step is not None
    assert plan.step.chunk is None


def test_plan_says_what_the_blocks_compute_otherwise() -> None:
    plan = decide(replace(SPLIT, request=Request(block_changes={"norm": "the norm is fused"})), limits(80))
    assert "  the norm is fused" in str(plan).splitlines()


@pytest.mark.parametrize(("words", "reason"), [(SPLIT.words, "PLAN=split"), ({}, "it was asked for")])
def test_split_that_was_asked_for_is_the_reason_why_nothing_overlaps(words: dict[str, str], reason: str) -> None:
    plan = decide(replace(SPLIT, request=Request(strategy=Strategy.SPLIT), words=words), limits(80))
    assert plan.rejection_of(Strategy.PIPELINE) == reason
    assert plan.outcome == f"one micro-batch at a time: {reason}; the split gives room, not speed"


def test_step_that_fits_nowhere_is_refused_with_what_would_fit() -> None:
    with pytest.raises(PlacementInvalid) as caught:
        decide(replace(SPLIT, accumulation=1, request=Request(offload=False)), limits(17))
    assert "cuda:0 would need" in str(caught.value)
    assert "--frames " in str(caught.value)


def test_unpredictable_job_is_run_as_asked_and_says_why() -> None:
    unknown = replace(SPLIT, unpredictable="it is new", request=Request(chunks=(512, 256)))
    plan = decide(unknown, limits(1))
    assert plan.strategy is Strategy.PIPELINE
    assert plan.peaks == ()
    assert plan.notes == ("peak not predicted: it is new",)
    assert plan.step is not None
    assert plan.step.chunk == 512
    assert decide(replace(unknown, chunkable=False), limits(1)).step == replace(plan.step, chunk=None)


def test_unpredictable_job_is_advised_to_name_a_plan_that_it_can_have() -> None:
    unknown = replace(WHOLE, unpredictable="it is new", request=Request(), words={"name_a_strategy": "; name a stream"})
    assert decide(unknown, limits(80)).notes[0] == "no plan is chosen without a predicted peak; name a stream"
    excluded = replace(unknown, excluded={Strategy.STREAM: "its weights are moved"})
    assert decide(excluded, limits(80)).notes[0] == "no plan is chosen without a predicted peak"


def test_unpredictable_job_is_streamed_as_asked_without_the_chunks_that_it_cannot_have() -> None:
    asked = Request(strategy=Strategy.STREAM, chunks=(512,))
    plan = decide(replace(WHOLE, unpredictable="it is new", chunkable=False, request=asked), limits(1))
    assert (plan.strategy, plan.step and plan.step.chunk) == (Strategy.STREAM, None)


def test_model_that_is_run_as_it_is_shows_the_peak_that_is_predicted() -> None:
    asked = replace(WHOLE, request=RESIDENT)
    plan = decide(asked, limits(80))
    (peak,) = plan.peaks
    assert plan.notes == (f"predicted peak: {peak}",)
    unknown = decide(replace(asked, unpredictable="it is new"), limits(80))
    assert (unknown.peaks, unknown.notes) == ((), ("peak not predicted: it is new",))


def test_requested_stream_that_is_excluded_is_refused_with_its_reason() -> None:
    job = replace(WHOLE, request=Request(strategy=Strategy.STREAM), excluded={Strategy.STREAM: "nothing is frozen"})
    with pytest.raises(PlacementInvalid, match="nothing is frozen"):
        decide(job, limits(80))


def test_stream_shows_the_peak_that_is_predicted_or_what_does_not_fit() -> None:
    asked = Request(strategy=Strategy.STREAM)
    job = replace(WHOLE, request=asked)
    assert decide(job, limits(24)).notes == ("predicted peak with 25 blocks streamed: 23.84 GiB",)
    with pytest.raises(PlacementInvalid, match=r"besides them it needs 4\.19 GiB. Expected at most 2\.00 GiB"):
        decide(job, limits(2))
    with pytest.raises(PlacementInvalid, match="41 streamed blocks in a model of 40"):
        decide(replace(job, request=replace(asked, streamed_blocks=41)), limits(24))


def test_split_under_data_parallel_is_not_compared() -> None:
    plan = decide(replace(SPLIT, processes=2), limits(80))
    assert (plan.reason, plan.choice, plan.alternatives) == ("", "", ())


def test_pipeline_that_was_asked_for_and_cannot_overlap_is_a_split() -> None:
    job = replace(SPLIT, accumulation=1, request=Request(strategy=Strategy.PIPELINE))
    assert decide(job, limits(80)).strategy is Strategy.SPLIT


def test_plan_prints_its_choice_with_every_alternative() -> None:
    text = str(decide(SPLIT, limits(80)))
    assert text.startswith("pipeline on cuda:0, cuda:1\n  predicted peak for 20280 tokens: cuda:0: ")
    assert "plan: pipeline. It gives at most 1.60x of one GPU's samples a second." in text
    for rejected in ("Resident: needs a process for each of 2 GPUs (launch 2).", "Split: at most 1.00x."):
        assert rejected in text
    assert text.endswith("4 micro-batches in a pipeline of 2 stages: at most 1.60x of one GPU's speed")


def test_sample_over_ranks_takes_a_share_of_the_activations() -> None:
    alone = decide(replace(WHOLE, video=LONG), limits(160))
    over = decide(replace(RANKS, video=LONG), limits(160))
    assert alone.step is not None
    whole = micro_batch(LONG.tokens, None)
    share = micro_batch(LONG.tokens // 4, None)
    (peak,) = over.peaks
    assert peak.working == share.working
    assert peak.checkpoints == 40 * share.activation + share.shared + whole.activation - share.activation
    assert (over.ranks, over.streamed_blocks) == (4, 0)
    assert over.outcome == "the tokens of each sample over 4 GPUs, at most 4.00x of one GPU's speed"


def test_long_video_over_ranks_streams_what_does_not_fit_beside_the_gaps_of_the_allocator() -> None:
    job = replace(RANKS, video=LONG)
    gaps, none = decide(job, limits(24)), decide(job, replace(limits(24), expandable_segments=True))
    assert gaps.streamed_blocks > none.streamed_blocks > 0
    assert any("; SEGMENTS" in note for note in gaps.notes)
    assert not any("; SEGMENTS" in note for note in none.notes)


def test_groups_are_counted_as_processes_of_data_parallel() -> None:
    plan = decide(replace(RANKS, request=Request(strategy=Strategy.SEQUENCE, ranks=2)), limits(80))
    assert plan.ranks == 2
    assert plan.outcome.endswith("; 2 groups, each as one process of data parallel")


def test_blocks_that_were_asked_for_are_streamed_over_ranks_also_if_the_model_fits() -> None:
    plan = decide(replace(RANKS, request=Request(strategy=Strategy.SEQUENCE, streamed_blocks=10)), limits(80))
    assert (plan.strategy, plan.streamed_blocks) == (Strategy.SEQUENCE, 10)


def test_side_models_leave_over_ranks_too_before_blocks_are_streamed() -> None:
    beside = {"text_encoder": SideModel(num_bytes=10 * GIB, movable=True)}
    plan = decide(replace(RANKS, side_models=beside, home=Stored(11 * GIB)), limits(45))
    assert plan.side_models == {"text_encoder": HOST}
    assert plan.streamed_blocks == 0
    assert "text_encoder (10.00 GiB) waits in host memory" in plan.notes[0]


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (replace(RANKS, processes=1, local_processes=1), "one process was launched, and each GPU needs one (run on N)"),
        (replace(RANKS, processes=1), "4 processes were launched and not joined"),
        (replace(RANKS, processes=2, local_processes=1), "one process was launched on each machine"),
        (
            replace(RANKS, request=Request(strategy=Strategy.SEQUENCE, ranks=3)),
            "4 processes cannot be divided into groups of 3",
        ),
        (replace(RANKS, excluded={Strategy.SEQUENCE: "it has two heads"}), "it has two heads"),
        (
            replace(SPLIT, request=Request(strategy=Strategy.SEQUENCE)),
            "needs a process for each of 2 GPUs (run on 2)",
        ),
    ],
)
def test_sequence_that_cannot_run_is_refused_with_its_reason(job: TrainingJob, reason: str) -> None:
    with pytest.raises(PlacementInvalid) as caught:
        decide(job, limits(80))
    assert reason in str(caught.value)
    assert "choose another PLAN" in str(caught.value)


def test_sequence_is_taken_unasked_only_if_nothing_else_fits() -> None:
    """It divides the samples of a step by the number of ranks."""
    launched = replace(WHOLE, processes=4, local_processes=4)
    fits = decide(launched, limits(80))
    assert fits.strategy is Strategy.RESIDENT
    offer = next(one for one in fits.alternatives if one.strategy is Strategy.SEQUENCE)
    assert str(offer) == ("Sequence: at most 4.00x; each sample over 4 GPUs, 1 in place of 4 at a time: PLAN=sequence.")
    long = replace(launched, video=LONG, request=Request(offload=False))
    taken = decide(long, limits(24))
    assert taken.strategy is Strategy.SEQUENCE
    assert taken.rejection_of(Strategy.STREAM) == "does not fit the devices"


@pytest.mark.parametrize("streams", [True, False])
def test_step_that_no_plan_fits_says_what_it_needs_and_how_many_frames_would_fit(streams: bool) -> None:
    job = WHOLE if streams else replace(WHOLE, excluded={Strategy.STREAM: "its blocks share a weight"})
    room = limits(4 if streams else 31, devices=1)
    with pytest.raises(PlacementInvalid, match="no plan can run: ") as caught:
        decide(job, room)
    said = str(caught.value)
    needed = re.search(r"at least ([\d.]+) GiB are needed on cuda:0( with every block streamed)?, and", said)
    frames = re.search(r"What may help: --frames (\d+); more GPUs", said)
    assert needed
    assert frames
    assert bool(needed[2]) == streams
    decide(job, limits(float(needed[1]) + 0.01, devices=1))
    with pytest.raises(PlacementInvalid):
        decide(job, limits(float(needed[1]) - 0.01, devices=1))
    latent = (int(frames[1]) - 1) // 4 + 1
    decide(replace(job, video=replace(WHOLE.video, frames=latent)), room)
    with pytest.raises(PlacementInvalid):
        decide(replace(job, video=replace(WHOLE.video, frames=latent + 1)), room)


def test_split_that_does_not_fit_names_sequence_parallel() -> None:
    wide = replace(SPLIT, video=LONG, accumulation=1, request=Request(offload=False))
    with pytest.raises(PlacementInvalid, match="all GPUs: run on 2"):
        decide(wide, limits(34))
    assert "Sequence parallel would train each sample on 2 GPUs at once, at most 2.00x (run on 2)." in str(
        decide(SPLIT, limits(80))
    )


jobs = st.builds(
    replace,
    st.sampled_from([WHOLE, SPLIT, RANKS]),
    accumulation=st.integers(1, 8),
    checkpointing=st.booleans(),
    request=st.builds(
        Request,
        strategy=st.sampled_from([None, None, Strategy.SEQUENCE]),
        chunks=st.sampled_from([(None,), (None, 2048), (512,)]),
        offload=st.sampled_from([None, True, False]),
    ),
    video=st.builds(
        Video, frames=st.integers(1, 21), tokens_per_frame=st.sampled_from([390, 1560, 3600]), stride=st.just(4)
    ),
    side_models=st.dictionaries(
        st.sampled_from(["text_encoder", "vae"]),
        st.builds(SideModel, num_bytes=st.integers(1, GIB // 2), movable=st.booleans()),
    ),
)


def plan_or_none(job: TrainingJob, gib: float) -> TrainingPlan | None:
    try:
        return decide(job, limits(gib))
    except PlacementInvalid:
        return None


@settings(max_examples=60)
@given(job=jobs, gib=st.floats(4, 160))
def test_every_plan_fits_by_its_own_prediction_and_every_alternative_has_a_reason(job: TrainingJob, gib: float) -> None:
    plan = plan_or_none(job, gib)
    if plan is None:
        return
    assert all(peak.total <= gib * GIB for peak in plan.peaks)
    if job.request.strategy is None:
        assert {one.strategy for one in plan.alternatives} == set(Strategy) - {plan.strategy}
    assert all(one.gain is not None or one.reason for one in plan.alternatives)


@settings(max_examples=40)
@given(job=jobs, gib=st.floats(4, 80), more=st.floats(0, 80))
def test_more_memory_never_takes_a_plan_away(job: TrainingJob, gib: float, more: float) -> None:
    smaller, larger = plan_or_none(job, gib), plan_or_none(job, gib + more)
    if smaller is None:
        return
    assert larger is not None
    if smaller.step is not None and larger.step is not None and smaller.strategy is larger.strategy:
        assert larger.step.in_flight >= smaller.step.in_flight
        assert larger.streamed_blocks <= smaller.streamed_blocks or larger.step != smaller.step


@settings(max_examples=20)
@given(job=jobs, gib=st.floats(4, 160))
def test_deciding_twice_gives_the_same_plan(job: TrainingJob, gib: float) -> None:
    assert plan_or_none(job, gib) == plan_or_none(job, gib)


BLOCKS_ASKED = Request(keep_blocks=True)


@pytest.mark.parametrize(
    ("job", "gib", "kept", "said"),
    [
        (replace(WHOLE, request=BLOCKS_ASKED), 80, (15,), "the last 15 blocks are not computed again"),
        (replace(WHOLE, request=replace(RESIDENT, keep_blocks=True)), 80, (15,), "the last 15 blocks"),
        (replace(WHOLE, request=replace(RESIDENT, keep_blocks=True)), 40, (), "no block is kept: there is no room"),
        (replace(WHOLE, request=BLOCKS_ASKED), 24, (), "no block is kept: blocks are streamed to make room"),
        (replace(WHOLE, request=Request(keep_blocks=True, offload=True)), 80, (), "checkpoints wait in host memory"),
        (replace(WHOLE, request=BLOCKS_ASKED, unpredictable="a block"), 80, (), "the peak is not predicted"),
        (replace(WHOLE, request=BLOCKS_ASKED, checkpointing=False), 900, (), "every block is kept"),
        (replace(SPLIT, request=replace(HALF, keep_blocks=True)), 60, (16, 16), "the last 16, 16 blocks of the stages"),
        (replace(SPLIT, request=BLOCKS_ASKED), 80, (10, 20), "the last 10, 20 blocks of the stages"),
        (replace(SPLIT, request=replace(HALF, keep_blocks=True), home=Stored(20 * GIB)), 45, (0, 10), "the last 0, 10"),
        (replace(RANKS, request=replace(RANKS.request, keep_blocks=True)), 80, (40,), "the last 40 blocks"),
    ],
    ids=["resident", "as it is", "full", "streamed", "offloaded", "unpredictable", "nothing recomputed", "split",
         "pipeline", "split with a full first GPU", "sequence"],
)  # fmt: skip
def test_last_blocks_are_kept_where_they_were_asked_for_and_fit(
    job: TrainingJob, gib: float, kept: tuple[int, ...], said: str
) -> None:
    plan = decide(job, replace(limits(gib), expandable_segments=True))
    assert (plan.step.num_kept_blocks if plan.step is not None else ()) == kept
    assert said in str(plan)
    assert "SEGMENTS" not in str(plan)
    if sum(kept) == len(job.blocks):  # none is left whose attention would be computed again
        assert "self-attention is kept" not in str(plan)
    assert decide(replace(job, request=replace(job.request, keep_blocks=False)), limits(gib)).kept_blocks_text == ""


@pytest.mark.parametrize("gib", [24, 40, 60, 80])
@pytest.mark.parametrize("job", [WHOLE, SPLIT, RANKS], ids=["whole", "split", "ranks"])
def test_blocks_that_may_be_kept_are_kept_as_those_that_were_asked_for(job: TrainingJob, gib: int) -> None:
    asked, unasked = (
        decide(replace(job, request=replace(job.request, keep_blocks=value)), limits(gib)) for value in (True, None)
    )
    assert asked.step == unasked.step
    assert "no block is kept" not in str(unasked)  # nobody asked


def test_blocks_are_kept_unasked_only_where_memory_is_known() -> None:
    plan = decide(replace(WHOLE, request=Request(keep_blocks=None)), Limits())
    assert plan.step is not None
    assert plan.step.num_kept_blocks == ()
    assert plan.step.keep is KeptOn.DEVICE
    assert decide(replace(WHOLE, request=BLOCKS_ASKED), Limits()).kept_blocks_text


def test_gaps_leave_room_for_fewer_blocks_and_are_named() -> None:
    job = replace(WHOLE, request=BLOCKS_ASKED)
    plan = decide(job, limits(80))
    assert plan.step is not None
    assert (0,) < plan.step.num_kept_blocks < (15,)
    assert "some memory is left to gaps between tensors; SEGMENTS" in plan.notes
    assert "gaps" not in str(decide(job, limits(900)))  # every block fits
    unasked = replace(WHOLE, request=replace(RESIDENT, keep_blocks=None))
    assert "some memory is left to gaps between tensors; SEGMENTS" in decide(unasked, limits(40)).notes  # none fits
    assert "gaps" not in str(decide(unasked, replace(limits(40), expandable_segments=True)))


def test_gaps_of_a_rank_are_counted_once() -> None:
    job = replace(RANKS, request=replace(RANKS.request, keep_blocks=True))
    (peak,) = decide(job, limits(60)).peaks
    block = micro_batch(RANKS.video.tokens // 4, None).kept if RANKS.video is not None else 0
    assert 0 <= 0.97 * 0.87 * 60 * GIB - peak.total < block


def test_job_and_plan_cannot_change_once_they_are_made() -> None:
    plan = decide(WHOLE, limits(24))
    for value, name in (
        (WHOLE, "devices"),
        (plan, "devices"),
        (plan.alternatives[0], "reason"),
        (plan.step, "offload"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)
