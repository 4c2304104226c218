"""A training loop of the user's own is seen at its first optimizer step: the plan that was asked for is not in force
there, and each process would train by itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from wanshim.adapters.diffsynth.splitting.load import trains_on_one_device
from wanshim.errors import FeatureUnavailable
from wanshim.settings import Settings
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.patching import SeamState

log = logging.getLogger("wanshim")

_planned = 0  # calls of the launcher under way that come with a plan, or were left to DiffSynth with the reason


def expect_steps(undo: Undo) -> None:
    """Until `undo` ends, optimizer steps are those of a call that was planned."""
    global _planned
    _planned += 1
    undo.add(_expect_no_more)


def _expect_no_more() -> None:
    global _planned
    _planned -= 1


def watch_steps(seam: SeamState) -> None:
    """Until `seam` is taken out, look at each optimizer step whether its run has the plan that the settings ask for."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    said = False

    def look(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        nonlocal said
        if seam.off or _planned or said:
            return
        read = seam.settings
        if (reason := _without_effect(read)) is None:
            return
        said = True
        assert read.plan is not None  # or there had been no reason
        if read.strict or read.plan.name == "sequence":
            raise FeatureUnavailable(
                reason,
                hint="Train through launch_training_task, or unset WANSHIM_PLAN and leave out `wanshim run --gpus`",
            )
        seam.enter()
        seam.fall_back(reason)
        log.warning("wanshim: diffsynth.model_split: %s", reason)

    seam.earlier.append(register_optimizer_step_pre_hook(look).remove)


def _without_effect(read: Settings) -> str | None:
    """Why a step outside of DiffSynth's launcher is not what the settings ask for, or None."""
    if read.plan is None or not (trains_on_one_device(read) or read.plan.name == "pipeline"):
        return None
    each = ", and each process trains by itself" if read.local_world_size > 1 else ""
    return (
        f"WANSHIM_PLAN={read.plan.name} has no effect on this training loop: "
        f"an optimizer steps outside of DiffSynth's launch_training_task{each}"
    )
