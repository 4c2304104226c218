"""Jobs and limits drawn from a fixed sequence, and the decision on each as one row.

`python -m tests.unit.strategy.decisions` writes the rows to decisions.txt, after a change of the decision that is
wanted; `git diff` then shows which jobs it touches.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

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
)
from wanshim.errors import PlacementInvalid

T = TypeVar("T")
RECORD = Path(__file__).with_name("decisions.txt")
COUNT = 800
GIB, MIB = 2**30, 2**20
ON_EACH = (Strategy.RESIDENT, Strategy.STREAM, Strategy.SEQUENCE)
OVER_STAGES = (Strategy.PIPELINE, Strategy.SPLIT)
CONDITIONAL = (Strategy.STREAM, Strategy.PIPELINE, Strategy.SEQUENCE)  # what a framework may exclude
WORDS = {
    "chunks": "chunks",
    "split_points": "points {value}",
    "offload": "offload",
    "keep_off": "keep off",
    "without_side_models": "cache",
    "low_precision": "fp8",
    "low_precision_and_offload": "fp8 and offload",
    "sequence": "all GPUs: run {value}",
    "fewer_frames": "frames {value}",
    "launch": "run {value}",
    "processes": "launch {value}",
    "choose": "auto",
    "requested": "PLAN={value}",
    "name_a_strategy": "; name one",
    "expandable_segments": "; SEGMENTS",
}


class Draws:
    """Choices from a sequence that every release of Python repeats."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one(self, *values: T) -> T:
        """One of `values`."""
        return values[int(self._random.random() * len(values))]

    def number(self, low: int, high: int) -> int:
        """An integer from `low` to `high`."""
        return low + int(self._random.random() * (high - low + 1))


def drawn_job(number: int) -> tuple[TrainingJob, Limits]:
    """Job and limits of this number."""
    draw = Draws(number)
    width, heads = draw.one((5120, 40), (1536, 12), (3072, 24))
    split = draw.one(False, False, False, True, True)
    stages = draw.one(2, 2, 3, 4) if split else 1
    count = draw.number(max(stages, 1), 12) if draw.one(True, False, False) else 40 if width == 5120 else 30
    full = draw.one(True, False, False, False, False, False)  # every weight is trained
    size = width * width * 26
    block = Stored(0, size) if full else Stored(size, draw.one(0, 6, 48) * MIB)
    own = draw.one(GIB // 8, GIB, 3 * GIB)
    names = draw.one((), ("text_encoder",), ("text_encoder", "vae"), ("text_encoder", "vae", "image_encoder"))
    side_models = {
        name: SideModel(num_bytes=draw.one(GIB // 4, GIB, 6 * GIB, 11 * GIB), movable=draw.one(True, True, False))
        for name in names
    }
    kept, working = draw.one(12, 20, 34), draw.one(9, 14, 22)

    def micro_batch(tokens: int, chunk: int | None) -> MicroBatch:
        activation = 2 * tokens * width
        at_once = working // 2 * (min(tokens, chunk or tokens) * activation // tokens)
        working_bytes = at_once + (working - working // 2) * activation
        return MicroBatch(activation, 8 * MIB, kept * activation, working_bytes, activation, 4 * heads * tokens)

    local = 1 if split else draw.one(1, 1, 1, 2, 4, 8)
    processes = draw.one(1, 1, 1, 2) if split else local * draw.one(1, 1, 1, 2)
    if not split and local > 1 and draw.one(True, *[False] * 6):
        processes = 1  # launched and not joined
    devices = tuple(f"cuda:{index}" for index in range(stages))
    fitting = OVER_STAGES if split else ON_EACH if local > 1 else ON_EACH[:2]
    strategy = draw.one(None, None, None, None, None, draw.one(*fitting), draw.one(*fitting), draw.one(*Strategy))
    excluded = {one: f"{one.value} is excluded" for one in CONDITIONAL if draw.one(True, *[False] * 7)}
    streams = not full and Strategy.STREAM not in excluded
    checkpointing = draw.one(True, True, True, False)
    sized = draw.one(True, *[True] * 9, False)
    home = Stored(own + sum(model.num_bytes for model in side_models.values()), draw.one(0, 0, 20) * MIB)
    job = TrainingJob(
        devices=devices,
        split_points=_points(draw, count, stages) if split else None,
        blocks=(block,) * count,
        home=home,
        streamable=(size,) * count if streams else (),
        model_bytes=count * (block.frozen + block.trained) + own + home.trained,
        video=Video(frames=draw.number(1, 21), tokens_per_frame=draw.one(390, 1560, 3600), stride=4),
        sizes=draw.one("", "", "sizes are assumed"),
        micro_batch=micro_batch,
        unpredictable="" if sized else "it is new",
        chunkable=sized or draw.one(True, False),
        side_models=side_models,
        moved={device: 2 * GIB for device in devices[1:] if draw.one(True, False, False, False)},
        accumulation=draw.one(1, 1, 2, 4, 8),
        processes=processes,
        local_processes=local,
        checkpointing=checkpointing,
        offloads_itself=draw.one(True, *[False] * 9),
        request=Request(
            strategy=strategy,
            streamed_blocks=draw.one(None, None, 2, 9) if strategy in (Strategy.STREAM, Strategy.SEQUENCE) else None,
            ranks=draw.one(None, None, 2, 3) if strategy is Strategy.SEQUENCE else None,
            chunks=draw.one((None,), (None, 2048), (None, 2048), (512,)),
            offload=draw.one(None, None, None, True, False),
            keep=draw.one(None, None, None, True, False),
            keep_blocks=draw.one(None, None, True, False),
            block_changes=draw.one({}, {}, {"compile": "blocks are compiled"}),
        ),
        excluded=excluded,
        words=draw.one(WORDS, WORDS, WORDS, {}),
    )
    return job, _limits(draw, devices)


def _points(draw: Draws, count: int, stages: int) -> tuple[int, ...]:
    """Split points, equal stages or others."""
    even = [round(count * stage / stages) for stage in range(1, stages)]
    first = draw.number(1, count - stages + 1)
    return tuple(draw.one(even, [first + stage for stage in range(stages - 1)]))


def _limits(draw: Draws, devices: Sequence[str]) -> Limits:
    """Equal devices, unequal ones, one without a limit or none with one."""
    gib = draw.number(30, 1600) / 10 if draw.one(True, False) else draw.number(60, 480) / 10
    available = {device: int(gib * GIB) for device in devices}
    kind = draw.one("equal", "equal", "equal", "unequal", "one open", "open")
    if kind == "unequal":
        available = {device: int(draw.number(80, 800) / 10 * GIB) for device in devices}
    if kind == "one open":
        del available[draw.one(*devices)]
    return Limits(
        available={} if kind == "open" else available,
        host=draw.one(0, 8, 24, 48, 200, 1000) * GIB,
        expandable_segments=draw.one(True, False),
    )


def changed_job(number: int, job: TrainingJob) -> TrainingJob:
    """The job as its first forward shows it."""
    draw = Draws(10**6 + number)
    assert job.video is not None
    frames = max(1, job.video.frames + draw.number(-2, 4))
    checkpointing = draw.one(job.checkpointing, job.checkpointing, True, False)
    return replace(job, video=replace(job.video, frames=frames), sizes="", checkpointing=checkpointing)


def row(number: int) -> str:
    """The decision on the job of this number, and the one after its first forward: in brief, with a digest of all that
    a user reads of it and of all that ranks compare."""
    job, limits = drawn_job(number)
    try:
        plan = decide(job, limits)
    except PlacementInvalid as error:
        return f"{number} refused {_digest(str(error))}"
    try:
        again = _brief(decide_again(changed_job(number, job), limits, plan))
    except PlacementInvalid as error:
        again = f"refused {_digest(str(error))}"
    return f"{number} {_brief(plan)}, {again}"


def _brief(plan: TrainingPlan) -> str:
    step, parts = plan.step, [plan.strategy.value]
    if step is not None:
        parts += [f"chunk {step.chunk}"] * bool(step.chunk) + ["offload"] * step.offload
        parts += {None: [], KeptOn.DEVICE: ["keep"], KeptOn.HOST: ["keep on host"]}[step.keep]
        parts += [f"kept {'+'.join(map(str, step.num_kept_blocks))}"] * bool(step.num_kept_blocks)
        parts += [f"flight {step.in_flight}"] * (step.in_flight > 1)
    parts += [f"streamed {plan.streamed_blocks}"] * bool(plan.streamed_blocks)
    parts += [f"moved {len(plan.side_models)}"] * bool(plan.side_models)
    peaks = [(peak.device, peak.total) for peak in plan.peaks]
    text = [str(plan), json.dumps(plan.shared), plan.why_offloaded, plan.changes_nothing, peaks]
    return f"{' '.join(parts)} {_digest(repr(text))}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


if __name__ == "__main__":
    RECORD.write_text("\n".join(map(row, range(COUNT))) + "\n")
