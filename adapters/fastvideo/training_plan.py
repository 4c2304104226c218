"""What a FastVideo trainer is about to do, read from its own settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wanshim.core.training import GlobalSteps


@dataclass(frozen=True)
class TrainingPlan:
    """One rank's view of a run.

    Args:
        learning_rate: reads the rate of the step that begins, from the host.
        checkpoint_every, validate_every: global steps; 0: never.
        saves_last: the end of the run saves once more.
    """

    steps: GlobalSteps
    output_path: str
    rank: int
    device: str
    learning_rate: Callable[[], float | None]
    checkpoint_every: int
    validate_every: int
    saves_last: bool

    def checkpoints(self, done: int) -> int:
        """Still to come after `done` steps."""
        return _multiples(done, self.steps.steps, self.checkpoint_every) + self.saves_last

    def validations(self, done: int) -> int:
        """Still to come after `done` steps. The one before the first step is over when the bar is shown."""
        return _multiples(done, self.steps.steps, self.validate_every)


def _multiples(done: int, steps: int, every: int) -> int:
    return max(0, steps // every - done // every) if every > 0 else 0


def plan_of_trainer(trainer: Any, method: Any, max_steps: int, manager: Any) -> TrainingPlan:
    """Of `fastvideo.train.trainer.Trainer.run(method, max_steps=..., checkpoint_manager=manager)`."""
    config = trainer.training_config
    every = int(getattr(getattr(manager, "config", None), "save_steps", 0) or 0)
    callbacks = trainer.callbacks._callbacks.values()
    return TrainingPlan(
        steps=GlobalSteps(
            steps=int(max_steps),
            processes=int(trainer.world_group.world_size),
            sequence_parallel=int(trainer.sp_group.world_size),
            gradient_accumulation=max(1, int(config.loop.gradient_accumulation_steps or 1)),
            batch_size=max(1, int(config.data.train_batch_size or 1)),
        ),
        output_path=str(config.checkpoint.output_dir or "."),
        rank=int(trainer.global_rank),
        device=_device(),
        learning_rate=lambda: _rate(method.get_optimizers(0)),
        checkpoint_every=every,
        validate_every=max(map(validation_interval, callbacks), default=0),
        saves_last=every > 0,
    )


def validation_interval(callback: object) -> int:
    """Global steps between the validations of a callback; 0 for one that never does."""
    return int(getattr(callback, "every_steps", 0) or 0)


def plan_of_pipeline(pipeline: Any) -> TrainingPlan:
    """Of the `train()` of a pipeline in `fastvideo.training`, which always saves at the end."""
    args = pipeline.training_args
    return TrainingPlan(
        steps=GlobalSteps(
            steps=int(args.max_train_steps),
            processes=int(pipeline.world_size),
            sequence_parallel=int(args.sp_size),
            gradient_accumulation=max(1, int(args.gradient_accumulation_steps or 1)),
            batch_size=max(1, int(args.train_batch_size or 1)),
        ),
        output_path=str(args.output_dir or "."),
        rank=int(pipeline.global_rank),
        device=_device(),
        learning_rate=lambda: _rate([pipeline.optimizer]),
        checkpoint_every=int(args.training_state_checkpointing_steps or 0),
        validate_every=int(args.validation_steps or 0) if args.log_validation else 0,
        saves_last=True,
    )


def _rate(optimizers: Any) -> float | None:
    """Of the first optimizer's first parameter group."""
    return float(optimizers[0].param_groups[0]["lr"]) if optimizers else None


def _device() -> str:
    import torch
    from fastvideo.distributed import get_local_torch_device

    device = get_local_torch_device()
    # FastVideo calls every machine without CUDA an Apple one.
    return "cpu" if device.type == "mps" and not torch.backends.mps.is_available() else str(device)
