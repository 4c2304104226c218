"""A change of what the blocks of a training run compute: each has a setting of its own, can be refused by name, and
lasts as long as a launcher runs. Bits change.

If `diffsynth.model_split` plans the run, its plan applies the change (`splitting/apply.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.adapters.diffsynth.training_call import BY_PLAN, Report, TrainingCall
from wanshim.errors import FeatureUnavailable
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.strategy import TrainingPlan
    from wanshim.patching import SeamState


@dataclass(frozen=True, kw_only=True)
class BlockChange:
    """One such change.

    Args:
        feature: the name of its feature.
        setting: the field of the settings that asks for it.
        statement: what is done and that bits change; `{value}` stands for the setting's value.
        without: the statement that it is not done.
        refusal: returns why it cannot be done in a training job, or None.
        apply: makes the change until `undo` ends. It is given the pipeline, the setting's value, `undo`, what puts
            each further statement into the report, and the run's plan or None.
    """

    feature: str
    setting: str
    statement: str
    without: str
    refusal: Callable[[TrainingCall, settings.Settings], str | None]
    apply: Callable[[Any, Any, Undo, Report, TrainingPlan | None], None]

    def asked(self, call: TrainingCall, read: settings.Settings) -> bool:
        """Whether it is asked for in this call of a training task, and can be done."""
        return bool(getattr(read, self.setting)) and self.refusal(call, read) is None

    def stated(self, read: settings.Settings) -> str:
        return self.statement.format(value=getattr(read, self.setting))

    def refused(self, call: TrainingCall, read: settings.Settings) -> str | None:
        """Why it is not done although it was asked for, or None.

        Raises:
            FeatureUnavailable: it is not, under strict.
        """
        reason = self.refusal(call, read) if getattr(read, self.setting) else None
        if reason is None:
            return None
        variable = read.sources.get(self.setting, self.setting)
        if read.strict:
            raise FeatureUnavailable(f"{variable} is unavailable here: {reason}", hint=f"Unset {variable}")
        import logging  # needed by few: not at activation

        logging.getLogger("wanshim").warning("wanshim: %s: %s: %s", self.feature, self.without, reason)
        return reason

    def prepare(self, call: TrainingCall, undo: Undo, seam: SeamState) -> None:
        """Do it until `undo` ends, unless the run's plan does it."""
        read, report = settings.read(), seam.notes.append
        wanted = getattr(read, self.setting)
        if call.plan is not None and self.feature in call.plan.block_changes:
            report(BY_PLAN)
        elif (reason := self.refused(call, read)) is not None or not wanted:
            seam.fall_back(f"{self.without}: {reason or 'it is not asked for'}")
        elif call.plan is not None:
            seam.fall_back(f"{self.without}: the plan of this run leaves it out")
        else:
            report(self.stated(read))
            self.apply(call.pipe, wanted, undo, report, None)


def attached_refusal(call: TrainingCall) -> str | None:
    """What attaches itself to the parameters of this job's blocks, or None."""
    state = call.accelerator.state
    for plugin, name in (("deepspeed_plugin", "DeepSpeed"), ("fsdp_plugin", "FSDP")):
        if getattr(state, plugin, None) is not None:
            return f"{name} attaches itself to parameters inside the blocks"
    if getattr(call.dit, "vram_management_enabled", False):
        return "--fp8_models and --offload_models move the weights inside the blocks"
    return None
