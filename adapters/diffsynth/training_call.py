"""A call of one of DiffSynth's training launchers, and what is changed while it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wanshim.patching import Kind, Seam, SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.strategy import TrainingPlan

Report = Callable[[str], None]

CHECKPOINTING = "use_gradient_checkpointing"
CHECKPOINT_OFFLOAD = "use_gradient_checkpointing_offload"
PLANNED = "_wanshim_plan"  # on a training module: the plan that `diffsynth.model_split` made of its run
BY_PLAN = "diffsynth.model_split has planned this run, and its report says what is done"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCall:
    """The arguments of `launch_training_task` or `launch_dmd2_training_task`.

    Args:
        accelerator: the `accelerate.Accelerator`.
        model: DiffSynth's training module, which holds the pipeline as `pipe`.
        logger: DiffSynth's `ModelLogger`, which saves checkpoints.
        dataset: the samples.
        options: all arguments of the launcher, by name.
        script: the training script's arguments, which take precedence; None if the launcher is called without them.
    """

    accelerator: Any
    model: Any
    logger: Any
    dataset: Any
    options: Mapping[str, object]
    script: object

    @classmethod
    def bind(cls, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingCall:
        """The call of a launcher with this signature."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        return cls(
            accelerator=given["accelerator"],
            model=given.get("model"),
            logger=given.get("model_logger"),
            dataset=given.get("dataset"),
            options=given,
            script=given.get("args"),
        )

    @property
    def pipe(self) -> Any:
        return getattr(self.model, "pipe", None)

    @property
    def dit(self) -> Any:
        return getattr(self.pipe, "dit", None)

    @property
    def plan(self) -> TrainingPlan | None:
        """The plan of the run, if `diffsynth.model_split` has made one."""
        plan: TrainingPlan | None = getattr(self.model, PLANNED, None)
        return plan

    def option(self, name: str, default: object = None) -> Any:
        """The value of an option; `default` if neither the script nor the launcher has it."""
        return getattr(self.script, name, self.options.get(name, default))

    @property
    def checkpointing(self) -> bool:
        """Whether activations are recomputed in backward."""
        return bool(self.option(CHECKPOINTING, True)) or bool(self.option(CHECKPOINT_OFFLOAD, False))


Prepare = Callable[[TrainingCall, Undo, SeamState], None]


def while_training(
    prepare: Prepare, applies: Callable[[TrainingCall], bool] = lambda call: True
) -> Callable[[Any, SeamState], Any]:
    """The replacement of a launcher: `prepare` changes what its call needs, and all of it ends with the call.

    Args:
        prepare: given the call, the `Undo` that takes its changes back, and the seam, for its notes or its `fall_back`.
        applies: False: the call needs nothing of it, and is not counted.
    """

    def replace(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def launch(*args: object, **kwargs: object) -> Any:
            call = None if seam.off else TrainingCall.bind(signature, args, kwargs)
            if call is None or not applies(call) or not seam.enter():
                return original(*args, **kwargs)
            with Undo() as undo:
                prepare(call, undo, seam)
                return original(*args, **kwargs)

        return launch

    return replace


def launcher_seams(prepare: Prepare, *, why: str, upstream: str, remove_when: str) -> tuple[Seam, Seam]:
    """What wraps both of DiffSynth's training launchers; a release without the second has the first alone."""

    def seam(target: str, reason: str, *, required: bool) -> Seam:
        return Seam(
            f"diffsynth.diffusion.{target}",
            while_training(prepare),
            why=reason,
            upstream=upstream,
            remove_when=remove_when,
            kind=Kind.WRAPT,
            required=required,
            stacks=True,
        )

    return (
        seam("runner:launch_training_task", why, required=True),
        seam("dmd2:launch_dmd2_training_task", "the same, for a loop of its own", required=False),
    )
