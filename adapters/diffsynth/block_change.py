"""What the blocks of a training run can compute otherwise, each by a switch of its own: asked for, refused by name,
applied while a launcher runs. Bits change.

If `diffsynth.model_split` plans the run, its plan applies it (`splitting/apply.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.adapters.diffsynth.kept_attention import PLANNED
from wanshim.adapters.diffsynth.training_call import TrainingCall
from wanshim.errors import FeatureUnavailable
from wanshim.patching import SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.strategy import TrainingPlan

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BlockChange:
    """One of them.

    Args:
        feature: its feature's name.
        setting: the field of the settings that asks for it.
        statement: what is done and that bits change; `{value}` is the setting's.
        without: the statement that it is not done.
        refusal: why it cannot be done in a training job, or None.
        apply: do it until `undo` ends; given the pipeline, the setting's value, `undo`, what gets each further
            statement, and the run's plan if there is one.
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

    def while_training(self, original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        """A launcher during which it is done, unless a plan does it."""
        signature = inspect.signature(original)

        def launch(*args: object, **kwargs: object) -> Any:
            if not seam.enter():
                return original(*args, **kwargs)
            call, read = TrainingCall.bind(signature, args, kwargs), settings.read()
            report = seam.notes.append
            if hasattr(call.model, PLANNED):
                report("diffsynth.model_split has planned this run, and its report says what is done")
                return original(*args, **kwargs)
            with Undo() as undo:
                wanted, reason = getattr(read, self.setting), self.refused(call, read)
                if wanted and reason is None:
                    report(self.stated(read))
                    self.apply(call.pipe, wanted, undo, report, None)
                else:
                    report(f"{self.without}: {reason or 'it is not asked for'}")
                return original(*args, **kwargs)

        return launch


def attached_refusal(call: TrainingCall) -> str | None:
    """What attaches itself to the parameters of this job's blocks, or None."""
    state = call.accelerator.state
    for plugin, name in (("deepspeed_plugin", "DeepSpeed"), ("fsdp_plugin", "FSDP")):
        if getattr(state, plugin, None) is not None:
            return f"{name} attaches itself to parameters inside the blocks"
    if getattr(call.dit, "vram_management_enabled", False):
        return "--fp8_models and --offload_models move the weights inside the blocks"
    return None
