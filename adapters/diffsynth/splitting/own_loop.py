"""A training loop that no plan is for: DiffSynth's DMD2 when it begins, one of the user's own at its first optimizer
step. The plan that was asked for is not in force there, and each process would train by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanshim import hand_over
from wanshim.adapters.diffsynth.splitting.load import trains_on_one_device
from wanshim.adapters.diffsynth.splitting.refusals import ranks_here
from wanshim.adapters.diffsynth.training_road import MODEL_SPLIT, take_road, watch_steps, why_outside
from wanshim.errors import FeatureUnavailable
from wanshim.settings import PLAN
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.patching import SeamState

log = logging.getLogger("wanshim")

_planned: list[Undo] = []  # of calls of a launcher that come with a plan, or were left to DiffSynth with the reason


def expect_steps(undo: Undo) -> None:
    """Until `undo` ends, optimizer steps are those of a call that was planned."""
    _planned.append(undo)
    undo.add(lambda: _planned.remove(undo))


def with_plan(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """For the launcher that plans are for. Until `seam` is taken out, each optimizer step is looked at: whether its run
    has the plan that the settings ask for."""
    watch_steps(seam, lambda: not _planned and _say_without_plan(seam, *why_outside()))
    return take_road(MODEL_SPLIT, original, seam)


def without_plan(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """For a launcher whose loop trains several models in turn."""

    def launch(*args: object, **kwargs: object) -> Any:
        if seam.off:
            return original(*args, **kwargs)
        why = f"{original.__name__} trains several models in turn, and a plan is for one"
        _say_without_plan(seam, why, "Train through launch_training_task")
        with Undo() as undo:
            expect_steps(undo)
            return original(*args, **kwargs)

    return launch


def _say_without_plan(seam: SeamState, why: str, remedy: str) -> bool:
    """Report that the plan which the settings ask for has no effect; False: they ask for none.

    Raises:
        FeatureUnavailable: under strict, or each process would train by itself what one sample was meant for.
    """
    read = seam.settings
    if not (trains_on_one_device(read) or read.plan_name == "pipeline"):
        return False
    each = ", and each process trains by itself" if ranks_here().size > 1 else ""
    reason = f"{hand_over.as_given(PLAN, read.plan_name)} has no effect on this training loop: {why}{each}"
    if read.strict or read.plan_name == "sequence":
        raise FeatureUnavailable(
            reason,
            hint=f"{remedy}, or leave out {hand_over.as_written(PLAN)}",
        )
    seam.enter()
    seam.fall_back(reason)
    log.warning("wanshim: diffsynth.model_split: %s", reason)
    return True
