"""The predicted peak: what is counted, where, and what is proposed where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from wanshim.core.shared.gpu_memory import available_bytes, free_bytes
from wanshim.core.strategy import (
    KeptOn,
    Limits,
    MicroBatch,
    Request,
    SideModel,
    Stored,
    Strategy,
    TrainingJob,
    Video,
    store_of,
    trace_block,
)
from wanshim.core.strategy import limits as limits_module
from wanshim.core.strategy.candidates import Candidate, StepSettings, candidates, why_no_block_is_kept, with_kept_blocks
from wanshim.core.strategy.limits import fits, usable
from wanshim.core.strategy.predict import Step, predict
from wanshim.core.strategy.search import on_each_rank
from wanshim.core.strategy.shortfall import check_fit, split_points_that_fit
from wanshim.errors import PlacementInvalid

GIB = 2**30
STEP = Step(
    blocks=(Stored(1000, 10),) * 4,
    home=Stored(500),
    devices=("cuda:0", "cuda:1"),
    points=(2,),
    micro_batch=MicroBatch(activation=100, shared=7, kept=900, working=3000),
)


def totals(step: Step) -> list[int]:
    return [peak.total for peak in predict(step)]


def test_plain_split_is_counted_part_by_part() -> None:
    first, second = predict(STEP)
    assert (first.weights, second.weights) == (2520, 2020)
    assert first.gradients_and_optimizer == second.gradients_and_optimizer == 3 * 20
    assert first.checkpoints == second.checkpoints == 207
    assert first.working == 3000
    assert first.total == 2520 + 60 + 207 + 3000


def test_stage_holds_the_micro_batches_of_a_1f1b_schedule() -> None:
    first, second = predict(replace(STEP, in_flight=8))
    assert first.checkpoints == 2 * (207 + 200)
    assert second.checkpoints == 207 + 200


def test_device_of_two_stages_holds_both_and_works_on_one_block() -> None:
    (only,) = predict(replace(STEP, devices=("cuda:0", "cuda:0")))
    assert only.weights == 4540
    assert only.working == 3000


def test_offload_and_fp8_and_ddp_and_no_checkpointing_change_their_part_alone() -> None:
    long = replace(STEP, blocks=STEP.blocks * 4, points=(8,))
    assert totals(long)[0] - totals(replace(long, offloading=True))[0] == 4 * 100
    assert totals(long)[0] - totals(long.with_frozen_halved())[0] == 8 * 500
    assert totals(replace(long, processes=2))[0] - totals(long)[0] == 8 * 10
    assert totals(replace(long, checkpointing=False))[0] - totals(long)[0] == 7 * 900


@pytest.mark.parametrize(
    ("free", "held", "fraction", "most"),
    [(600, 200, 1.0, 800), (600, 0, 1.0, 600), (900, 100, 0.5, 500)],
    ids=["free and held by this process", "others hold some", "a share set by the user"],
)
def test_room_on_a_device_leaves_the_allocator_its_reserve(
    monkeypatch: pytest.MonkeyPatch, free: int, held: int, fraction: float, most: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 1000 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    assert available_bytes("cuda:0") == int(most * GIB * 0.98)
    assert available_bytes("cpu") is None
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    assert free_bytes("cuda:0") == available_bytes("cuda:0") - 10 * GIB  # type: ignore[operator]
    assert free_bytes("cpu") is None


def test_devices_without_a_limit_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "available_bytes", {"cuda:0": 7, "cpu": None, "cuda:1": 0}.get)
    assert limits_module.available_on(["cuda:0", "cpu", "cuda:1"]) == {"cuda:0": 7, "cuda:1": 0}


def test_micro_batches_that_overlap_leave_room_for_gaps_unless_segments_expand() -> None:
    limits, overlapping = Limits(available={"cuda:0": 1000}), replace(STEP, in_flight=2)
    assert usable(overlapping, limits) == {"cuda:0": 870}
    assert usable(overlapping, replace(limits, expandable_segments=True)) == limits.available
    assert usable(STEP, limits) == limits.available


JOB = TrainingJob(
    devices=STEP.devices,
    split_points=STEP.points,
    blocks=STEP.blocks,
    home=STEP.home,
    video=Video(frames=3, tokens_per_frame=8, stride=4),
    micro_batch=lambda tokens, chunk: replace(STEP.micro_batch, working=125 * tokens),
    words={"low_precision": "half the weights", "offload": "offload", "fewer_frames": "{value} frames"},
)
PLAIN = StepSettings(chunk=None, offload=False, in_flight=1)


def way(step: Step) -> Candidate:
    """The candidate of this step."""
    return Candidate(strategy=Strategy.SPLIT, settings=PLAIN, step=step)


def settings_of(job: TrainingJob, in_flight: int, host: int = 0) -> list[StepSettings]:
    """The settings of a job's candidates over its stages, in order."""
    return [one.settings for one in candidates(job, Limits(host=host), Strategy.SPLIT, in_flight)]


@pytest.mark.parametrize(("host", "in_flight"), [(2400, {1, 2}), (2399, {1}), (1200, {1}), (1199, set())])
def test_attention_waits_in_host_memory_unasked_if_half_of_it_holds_all_micro_batches_in_flight(
    host: int, in_flight: set[int]
) -> None:
    """Four blocks, each with a checkpoint of 100 bytes and an attention of 50 for every micro-batch in flight."""
    job = replace(JOB, micro_batch=lambda tokens, chunk: replace(STEP.micro_batch, attention=50))
    ways = settings_of(job, 2, host)
    assert {way.in_flight for way in ways if way.offload} == {1, 2}
    assert {way.in_flight for way in ways if way.keep is KeptOn.HOST} == in_flight


@pytest.mark.parametrize(
    ("request_", "checkpointing", "expected"),
    [
        (Request(), True, [(None, False, 2), (None, True, 2), (None, True, 1)]),
        (Request(chunks=(8, None)), True, [(8, False, 2), (8, True, 2), (8, True, 1),
                                          (None, False, 2), (None, True, 2), (None, True, 1)]),
        (Request(offload=True), True, [(None, True, 2), (None, True, 1)]),
        (Request(offload=False), True, [(None, False, 2), (None, False, 1)]),
        (Request(), False, [(None, False, 2), (None, False, 1)]),
        (Request(strategy=Strategy.PIPELINE), True, [(None, False, 2), (None, True, 2)]),
    ],
    ids=["by default", "chunks", "offload", "no offload", "no checkpoints", "pipeline"],
)  # fmt: skip
def test_ways_to_run_a_step_come_in_the_order_of_preference(
    request_: Request, checkpointing: bool, expected: list[tuple[int | None, bool, int]]
) -> None:
    job = replace(JOB, request=replace(request_, keep=False), checkpointing=checkpointing)
    ways = settings_of(job, 2)
    assert [(way.chunk, way.offload, way.in_flight) for way in ways] == expected
    assert {way.offload_asked for way in ways} == {bool(request_.offload)}


def test_step_is_that_of_the_job() -> None:
    job = replace(JOB, processes=3, offloads_itself=True, request=Request(chunks=(8,), keep=False))
    assert next(candidates(job, Limits(), Strategy.RESIDENT)).step == Step(
        blocks=STEP.blocks,
        home=STEP.home,
        devices=("cuda:0",),
        points=(),
        micro_batch=JOB.micro_batch(24, 8),
        offloading=True,
        processes=3,
    )


def test_rank_has_its_share_of_the_tokens_rounded_up_and_the_first_checkpoint_whole() -> None:
    job = replace(JOB, request=Request(ranks=5), micro_batch=lambda tokens, chunk: MicroBatch(tokens, 1000, 0, 0))
    share = on_each_rank(job)
    assert share.micro_batch(24, None) == MicroBatch(5, 1000 + 4 * 5, 0, 0)
    assert (share.devices, share.split_points) == (("cuda:0",), None)


def test_sequence_parallel_is_proposed_if_it_would_fit() -> None:
    job = replace(JOB, words={"sequence": "all {value} GPUs"})
    for would in (True, False):
        with pytest.raises(PlacementInvalid) as caught:
            check_fit(job, way(STEP), Limits(available={"cuda:0": 10}), lambda would=would: would)
        assert ("What would fit: all 2 GPUs" in str(caught.value)) is would


def test_step_that_does_not_fit_is_refused_with_numbers_and_what_would_fit() -> None:
    limits = Limits(available={"cuda:0": 5000, "cuda:1": 6000})
    with pytest.raises(PlacementInvalid) as caught:
        check_fit(JOB, way(STEP), limits)
    text = str(caught.value)
    assert "cuda:0 would need 0.01 MiB of 0.00 MiB" in text
    assert "; ".join(map(str, predict(STEP))) in text
    assert "half the weights" in text
    assert "5 frames" in text
    assert "offload (" not in text  # it would not fit either
    check_fit(JOB, way(STEP), Limits(available={"cuda:0": 5787}))


def proposed(change: str, job: TrainingJob, step: Step, saved: int) -> bool:
    """Whether `change` is proposed where the first device lacks so many bytes."""
    limits = Limits(available={"cuda:0": totals(step)[0] - saved})
    with pytest.raises(PlacementInvalid) as caught:
        check_fit(replace(job, words={change: "{value} is a change"}), way(step), limits)
    return "is a change" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "step", "saves"),
    [
        ("chunks", STEP, 2000),
        ("without_side_models", STEP, 300),
        ("low_precision", STEP, 2 * 500),
        ("offload", replace(STEP, blocks=STEP.blocks * 4, points=(8,)), 4 * 100),
        ("low_precision_and_offload", replace(STEP, blocks=STEP.blocks * 4, points=(8,)), 8 * 500 + 4 * 100),
        ("keep_off", replace(STEP, micro_batch=replace(STEP.micro_batch, attention=100), keep=KeptOn.DEVICE), 100),
        ("split_points", STEP, 1010 + 30 + 100),
    ],
)
def test_change_is_proposed_where_it_saves_what_is_missing(change: str, step: Step, saves: int) -> None:
    job = replace(
        JOB,
        side_models={
            "vae": SideModel(num_bytes=100, movable=True),
            "text_encoder": SideModel(num_bytes=200, movable=False),
        },
        micro_batch=lambda tokens, chunk: replace(step.micro_batch, working=3000 if chunk is None else 1000),
    )
    assert proposed(change, job, step, saves)
    assert not proposed(change, job, step, saves + 1)


def test_fewer_frames_are_proposed_as_many_as_fit() -> None:
    for available, frames in ((4787, 5), (4786, 1)):  # a frame of latents has 8 tokens of 125 bytes
        with pytest.raises(PlacementInvalid, match=f"What would fit: .*{frames} frames"):
            check_fit(JOB, way(STEP), Limits(available={"cuda:0": available}))


def test_change_that_the_framework_has_no_words_for_is_not_proposed() -> None:
    limits = Limits(available={"cuda:0": 5000, "cuda:1": 6000})
    with pytest.raises(PlacementInvalid) as caught:
        check_fit(replace(JOB, words={}), way(STEP), limits)
    assert "None of the known changes alone" in str(caught.value)


def test_split_points_are_found_where_others_fit() -> None:
    step = replace(STEP, points=(3,))
    available = {"cuda:0": totals(STEP)[0], "cuda:1": totals(STEP)[1]}
    assert split_points_that_fit(step, available) == (2,)
    assert split_points_that_fit(step, {"cuda:0": 10, "cuda:1": 10}) is None
    assert split_points_that_fit(step, {}) is None
    assert split_points_that_fit(step, {"cuda:0": totals(STEP)[0]}) == (1,)
    three = replace(STEP, devices=("cuda:0", "cuda:1", "cuda:2"), points=(1, 3))
    assert split_points_that_fit(three, dict.fromkeys(three.devices, totals(STEP)[0])) == (1, 2)


def test_shared_tensors_count_once_and_trained_ones_apart() -> None:
    linear = nn.Linear(4, 4, bias=False).requires_grad_(False)
    both = nn.Sequential(linear, linear, nn.Linear(4, 2, bias=False))
    both.register_buffer("positions", torch.ones(3))
    assert store_of(both) == Stored(64 + 12, 32)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x).double() * self.weight.double()


def test_block_is_traced_from_the_birth_to_the_death_of_each_tensor() -> None:
    """Kept: the fp64 result alone (x itself is not the block's). Peak: with the gradients on their way back."""
    working = trace_block(Squares(), (torch.empty(1000),))
    assert 8000 <= working.kept <= 8016
    # result and its gradient (fp64), gradient before the cast (fp64); then its cast (fp32)
    assert 24_000 <= working.peak <= 28_100


def test_attention_is_traced_without_its_score_matrix() -> None:
    class Attend(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    tokens = 4096
    working = trace_block(Attend(), (torch.empty(1, 2, tokens, 8),))
    assert working.peak < 20 * 2 * tokens * 8 * 4 < tokens * tokens


KEEPING = replace(STEP, micro_batch=replace(STEP.micro_batch, attention=100, attention_sums=8), keep=KeptOn.DEVICE)


def test_kept_attention_is_counted_for_every_block_but_the_one_at_work() -> None:
    assert [peak.attention for peak in predict(KEEPING)] == [108, 108]  # two blocks a stage
    assert [peak.attention for peak in predict(replace(KEEPING, in_flight=2))] == [3 * 108, 108]
    (only,) = predict(replace(KEEPING, devices=("cuda:0", "cuda:0")))
    assert only.attention == 3 * 108
    assert only.total - replace(only, attention=0).total == only.attention
    assert "kept attention" in str(only)
    without = predict(replace(KEEPING, keep=None))
    assert [peak.attention for peak in without] == [0, 0]
    assert "kept attention" not in str(without[0])


def test_attention_in_host_memory_leaves_a_few_outputs_and_every_sum() -> None:
    away = replace(KEEPING, blocks=STEP.blocks * 4, keep=KeptOn.HOST)
    (peak,) = predict(replace(away, devices=("cuda:0",), points=()))
    assert peak.attention == 2 * 100 + 15 * 8
    first, last = predict(replace(away, points=(14,), in_flight=2))
    assert (first.attention, last.attention) == (4 * 100 + 27 * 8, 100 + 8)


def test_kept_blocks_are_counted_whole_but_the_one_at_work_and_need_no_attention_beside() -> None:
    first, last = predict(replace(KEEPING, num_kept_blocks=(0, 2)))
    assert (first.kept_blocks_bytes, first.attention) == (0, 108)
    assert (last.kept_blocks_bytes, last.attention) == (900, 0)
    assert last.checkpoints == 207  # their inputs are kept as before
    first, last = predict(replace(KEEPING, num_kept_blocks=(1, 1)))
    assert (first.kept_blocks_bytes, first.attention) == (0, 108)  # backward begins with it
    assert (first.total, "kept blocks" in str(first)) == (predict(KEEPING)[0].total, False)
    first, last = predict(replace(KEEPING, num_kept_blocks=(1, 2), in_flight=2))
    assert (first.kept_blocks_bytes, last.kept_blocks_bytes) == (900, 900)
    assert "kept blocks" in str(last)


def test_no_checkpointing_keeps_every_block() -> None:
    without = predict(replace(STEP, checkpointing=False))
    assert without == predict(replace(STEP, num_kept_blocks=(2, 2)))
    long = replace(STEP, blocks=STEP.blocks * 4, points=(8,), checkpointing=False)
    assert predict(long) == predict(replace(long, offloading=True))  # there are no checkpoints to offload
    assert [peak.total - one.total for peak, one in zip(without, predict(STEP), strict=True)] == [900, 900]


def keeping(available: int, expandable_segments: bool = True, **changed: object) -> tuple[int, ...]:
    """How many of four blocks on one device are kept with so many bytes."""
    job = replace(JOB, request=replace(JOB.request, keep_blocks=True), **changed)
    step = replace(KEEPING, devices=("cuda:0",), points=())
    limits = Limits(available={"cuda:0": available}, expandable_segments=expandable_segments)
    kept = with_kept_blocks(job, way(step), limits)
    assert kept.step is not None
    assert kept.settings.num_kept_blocks == kept.step.num_kept_blocks
    assert fits(kept.peaks, limits.available)
    return kept.step.num_kept_blocks


def test_as_many_blocks_are_kept_as_fit_beside_gaps() -> None:
    alone = predict(replace(KEEPING, devices=("cuda:0",), points=()))[0].total
    two = predict(replace(KEEPING, devices=("cuda:0",), points=(), num_kept_blocks=(2,)))[0].total
    assert keeping(alone) == ()
    assert keeping(int(two / 0.97) + 1) == (2,)
    assert keeping(int(two / 0.97) - 1) == (1,)
    assert keeping(int(two / 0.87) + 2, expandable_segments=False) == (2,)
    assert keeping(int(two / 0.87) - 2, expandable_segments=False) == (1,)
    assert keeping(10**6) == (4,)


def test_no_block_is_kept_where_that_says_nothing_or_saves_nothing() -> None:
    assert keeping(10**6, checkpointing=False) == ()
    assert keeping(10**6, offloads_itself=True) == ()
    assert keeping(10**6, unpredictable="a block") == ()
    job = replace(JOB, request=replace(JOB.request, keep_blocks=True))
    for settings, reason in (
        (replace(PLAIN, offload=True), "checkpoints wait in host memory"),
        (None, "the peak is not predicted"),
        (PLAIN, ""),
    ):
        assert why_no_block_is_kept(job, settings) == reason
    assert why_no_block_is_kept(JOB, PLAIN) == "it was not asked for"
