"""Lanes, plain split, streaming or the whole model on each GPU: which it is for this training job, and why.

The arithmetic is `wanshim.core.strategy.decide`. Here is what it is fed: the video's tokens, the DiT's size, measured
speeds, and what the memory prediction says of each plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.splitting.memory import (
    KNOWN_DITS,
    Room,
    first_that_fits,
    room_to_stream,
    steps_of,
    video_of,
)

from wanshim import settings
from wanshim.errors import PlacementInvalid

if TYPE_CHECKING:
    from wanshim.core.strategy.decide import Choice, Plan

Tell = Callable[[str], None]


def explain_split(arguments: dict[str, Any], devices: tuple[str, ...], *, lanes: bool, tell: Tell) -> None:
    """Say what the other plans would give a job that one process trains over a split."""
    from wanshim.core.strategy.decide import Plan

    read = settings.read()
    if arguments["accelerator"].num_processes > 1 or not _is_known(arguments):
        return
    whole = _resident(arguments, devices[0])
    share = _streamed_share(arguments, devices[0])
    fits = {Plan.LANES: lanes, Plan.SPLIT: True, Plan.STREAM: share is not None, Plan.RESIDENT: whole is not None}
    wanted = read.plan.name if read.plan is not None and read.plan.name != "auto" else None
    taken = Plan.LANES if lanes else Plan.SPLIT
    choice = _choose(arguments, devices[0], fits, share, (len(devices), 1), taken if wanted else None, tell)
    if choice is not None:
        tell(str(choice))


def choose_for_one_device(arguments: dict[str, Any], device: str, tell: Tell) -> tuple[int, Room | None]:
    """For a process with one device: how many blocks to stream, and with none how steps are taken with the whole
    model there; None where nothing can be predicted, which is said.

    Raises:
        PlacementInvalid: neither fits.
    """
    from wanshim.core.strategy.decide import Plan

    if not _is_known(arguments):
        tell("WANSHIM_PLAN=auto chooses nothing: this DiT or the size of its videos is not known; stream can be named")
        return 0, None
    room, share = _resident(arguments, device), _streamed_share(arguments, device)
    streamed = round((share or 0) * len(arguments["model"].pipe.dit.blocks))
    fits = {Plan.RESIDENT: room is not None, Plan.STREAM: share is not None}
    processes = settings.read().local_world_size
    choice = _choose(arguments, device, fits, share, (processes, processes), None, tell)
    if choice is None:
        return 0, None
    tell(str(choice))
    return (streamed, None) if choice.plan is Plan.STREAM else (0, room)


def _is_known(arguments: dict[str, Any]) -> bool:
    pipe = arguments["model"].pipe
    return type(pipe.dit).__name__ in KNOWN_DITS and video_of(pipe, arguments.get("args")) is not None


def _resident(arguments: dict[str, Any], device: str) -> Room | None:
    """How the steps are taken with the whole model on one device, if they fit without chunks, which change bits."""
    from wanshim.core.strategy import available_on, predict
    from wanshim.core.strategy.limits import fits

    available = available_on((device,))
    ways = list(steps_of(arguments, _nobody, (device,), (), 1))
    room, job = first_that_fits((way for way in ways if way[0].tokens == ways[0][0].tokens), available)
    return room if job is None or fits(predict(job), available) else None


def _streamed_share(arguments: dict[str, Any], device: str) -> float | None:
    """How much of the frozen weights would wait on the host, or None where that does not fit either."""
    try:
        _, plan = room_to_stream(arguments, device, _nobody, None)
    except PlacementInvalid:
        return None
    return len(plan.streamed) / plan.num_blocks


def _choose(
    arguments: dict[str, Any],
    device: str,
    fits: Mapping[Plan, bool],
    share: float | None,
    gpus_and_processes: tuple[int, int],
    wanted: Plan | None,
    tell: Tell,
) -> Choice | None:
    import torch

    from wanshim.core.strategy import store_of
    from wanshim.core.strategy.decide import Job, choose
    from wanshim.core.strategy.speeds import measure_speeds

    pipe, accelerator = arguments["model"].pipe, arguments["accelerator"]
    video = video_of(pipe, arguments.get("args"))
    assert video is not None  # or it had not come here
    gpus, processes = gpus_and_processes
    try:
        speeds = measure_speeds(torch.device(device))
    except torch.OutOfMemoryError:
        tell(f"no plan chosen by speed: {device} has no room to measure it")
        return None
    job = Job(
        tokens=video.tokens,
        num_blocks=len(pipe.dit.blocks),
        block_parameters=sum(parameter.numel() for parameter in pipe.dit.blocks[0].parameters()),
        dim=pipe.dit.dim,
        frozen_bytes=sum(store_of(block).frozen for block in pipe.dit.blocks),
        streamed_share=share if share is not None else 1.0,
        accumulation=accelerator.gradient_accumulation_steps,
        gpus=gpus,
        processes=processes,
    )
    return choose(job, speeds, fits, wanted)


def _nobody(text: str) -> None:
    """What the memory prediction says on the way is of a plan that may not be taken."""
