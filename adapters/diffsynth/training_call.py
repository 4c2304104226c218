"""A call of one of DiffSynth's training launchers, and what is changed while it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wanshim.patching import Kind, Seam, SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

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
    def device(self) -> torch.device:
        """Where accelerate puts this process's model, always with an index."""
        from wanshim.core.shared.gpu_memory import indexed

        return indexed(self.accelerator.device)

    @property
    def pipe(self) -> Any:
        return getattr(self.model, "pipe", None)

    @property
    def dit(self) -> Any:
        return getattr(self.pipe, "dit", None)

    def end_others(self, error: BaseException) -> None:
        """The other ranks of the group stop with this rank's error, where the model is sharded."""
        from wanshim.core.sequence import sequence_of

        handle = sequence_of(self.dit) if self.dit is not None else None
        if handle is not None:
            handle.fail(error)

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


# The features that change how a run trains, in the order in which they do, whatever the order of their seams.
ORDER = (
    "diffsynth.model_split",
    "diffsynth.kept_attention",  # before blocks compute otherwise: it predicts what they need
    "diffsynth.eight_bit_compute",
    "diffsynth.compiled_blocks",
    "diffsynth.checkpoint_offload",
)
_seams: dict[str, dict[str, tuple[SeamState, Prepare]]] = {}  # launcher -> feature -> its seam there
_inside: ContextVar[bool] = ContextVar("wanshim_inside_training_call", default=False)


def in_order(feature: str, prepare: Prepare) -> Callable[[Any, SeamState], Any]:
    """The replacement of a launcher for one of the features in `ORDER`. The first that a call comes to prepares the run
    for all that are on; the others let it through."""

    def replace(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        signature = inspect.signature(original)
        features = _seams.setdefault(seam.seam.target, {})
        features[feature] = (seam, prepare)

        def launch(*args: object, **kwargs: object) -> Any:
            if seam.off or _inside.get():
                return original(*args, **kwargs)
            token = _inside.set(True)
            try:
                with Undo() as undo:
                    call = TrainingCall.bind(signature, args, kwargs)
                    try:
                        for state, each in (features[name] for name in ORDER if name in features):
                            if state.enter():
                                each(call, undo, state)
                        return original(*args, **kwargs)
                    except BaseException as error:
                        call.end_others(error)
                        raise
            finally:
                _inside.reset(token)

        return launch

    return replace


def launcher_seams(feature: str, prepare: Prepare, *, why: str, upstream: str, remove_when: str) -> tuple[Seam, Seam]:
    """What wraps both of DiffSynth's training launchers; a release without the second has the first alone."""

    def seam(target: str, reason: str, *, required: bool) -> Seam:
        return Seam(
            f"diffsynth.diffusion.{target}",
            in_order(feature, prepare),
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
