"""A call of one of DiffSynth's training launchers, and what is changed while it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wanshim.patching import Kind, Seam, SeamState
from wanshim.undo import Undo

Report = Callable[[str], None]

CHECKPOINTING = "use_gradient_checkpointing"
CHECKPOINT_OFFLOAD = "use_gradient_checkpointing_offload"
PLANNED = "_wanshim_plan"  # on a training module whose run `diffsynth.model_split` has planned
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
    def planned(self) -> bool:
        """Whether `diffsynth.model_split` has planned the run."""
        return hasattr(self.model, PLANNED)

    def option(self, name: str, default: object = None) -> Any:
        """The value of an option; `default` if neither the script nor the launcher has it."""
        return getattr(self.script, name, self.options.get(name, default))

    @property
    def checkpointing(self) -> bool:
        """Whether activations are recomputed in backward."""
        return bool(self.option(CHECKPOINTING, True)) or bool(self.option(CHECKPOINT_OFFLOAD, False))


Prepare = Callable[[TrainingCall, Undo, Report], None]


def while_training(prepare: Prepare) -> Callable[[Any, SeamState], Any]:
    """The replacement of a launcher: `prepare` changes what its call needs, and all of it ends with the call.

    Args:
        prepare: given the call, the `Undo` that takes its changes back, and what puts a statement into the report.
    """

    def replace(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def launch(*args: object, **kwargs: object) -> Any:
            if not seam.enter():
                return original(*args, **kwargs)
            with Undo() as undo:
                prepare(TrainingCall.bind(signature, args, kwargs), undo, seam.notes.append)
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
