"""A call of one of DiffSynth's training launchers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


CHECKPOINTING = "use_gradient_checkpointing"
CHECKPOINT_OFFLOAD = "use_gradient_checkpointing_offload"


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

    def option(self, name: str, default: object = None) -> Any:
        """The value of an option; `default` if neither the script nor the launcher has it."""
        return getattr(self.script, name, self.options.get(name, default))

    @property
    def checkpointing(self) -> bool:
        """Whether activations are recomputed in backward."""
        return bool(self.option(CHECKPOINTING, True)) or bool(self.option(CHECKPOINT_OFFLOAD, False))
