"""One call of a DiffSynth launcher: the objects that it is given, and its options by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wanshim.patching import Kind, Seam, SeamState

CHECKPOINTING = "use_gradient_checkpointing"
CHECKPOINT_OFFLOAD = "use_gradient_checkpointing_offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCall:
    """What `launch_training_task` and its kin are called with.

    Args:
        accelerator: accelerate's.
        model: DiffSynth's training module, which holds the pipeline as `pipe`.
        logger: DiffSynth's, which saves checkpoints.
        dataset: of samples.
        options: the launcher's own arguments.
        script: the training script's, which go before the launcher's own; None where it is called without them.
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

    def option(self, name: str, default: object = None) -> Any:
        """An option's value, where neither the script nor the launcher has it the default."""
        return getattr(self.script, name, self.options.get(name, default))

    @property
    def checkpointing(self) -> bool:
        """Whether activations are recomputed in backward."""
        return bool(self.option(CHECKPOINTING, True)) or bool(self.option(CHECKPOINT_OFFLOAD, False))


def launcher_seams(
    replace: Callable[[Any, SeamState], Any], *, why: str, why_dmd2: str, upstream: str, remove_when: str
) -> tuple[Seam, Seam]:
    """What wraps both of DiffSynth's training launchers; a release without the second has the first alone."""

    def seam(target: str, reason: str, *, required: bool) -> Seam:
        return Seam(
            f"diffsynth.diffusion.{target}",
            replace,
            why=reason,
            upstream=upstream,
            remove_when=remove_when,
            kind=Kind.WRAPT,
            required=required,
            stacks=True,
        )

    return (
        seam("runner:launch_training_task", why, required=True),
        seam("dmd2:launch_dmd2_training_task", why_dmd2, required=False),
    )
