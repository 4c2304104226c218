"""A training loop in a program that has imported no framework whose training is planned: `wanshim run --gpus` would do
nothing for it, and each rank train by itself. Where such a framework is imported, its feature watches all loops."""

from __future__ import annotations

import sys

from wanshim import activation, hand_over
from wanshim.errors import FeatureUnavailable
from wanshim.patching.hooks import ImportHook
from wanshim.process_report import say
from wanshim.settings import PLAN

BY_ITSELF = {"wanshim.core.model_split", "wanshim.core.sequence"}  # by which a program splits or shards its model
_hook = ImportHook()
_seen: list[bool] = []


def watch() -> None:
    """Look at the first optimizer step of this process, if the option set the plan."""
    if hand_over.as_written(PLAN) != PLAN:
        _hook.watch(["torch.optim.optimizer"], lambda module: module.register_optimizer_step_pre_hook(_look))


def _look(*step: object) -> None:
    """Raises:
    FeatureUnavailable: there are several ranks, or under strict.
    """
    if _seen:
        return
    _seen.append(True)
    current, option = activation.CURRENT, hand_over.as_written(PLAN)
    planning = [run for name, run in current.runs.items() if name.endswith(".model_split") and current.applies(name)]
    if (
        BY_ITSELF & sys.modules.keys()
        or not planning
        or any(state.undo is not None for run in planning for state in run.seams)
    ):
        return
    names = " or ".join(run.feature.framework for run in planning)
    _, count = hand_over.run_rank() or (0, 1)
    each = f", and each of {count} processes trains by itself" if count > 1 else ""
    reason = f"{option} has no effect on this training loop: the program has not imported {names}{each}"
    if count > 1 or current.settings.strict:
        raise FeatureUnavailable(reason, hint=f"Train through the training task of {names}, or leave out {option}")
    say(reason)
