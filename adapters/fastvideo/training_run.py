"""The run that a FastVideo trainer is about to do, read from its own settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wanshim.core.training.recorder import TrainingRun

Description = tuple["TrainingRun", int, tuple[str, ...]]  # the run, this process's rank and its devices


def run_of_trainer(trainer: Any, method: Any, max_steps: int, manager: Any, done: int) -> Description:
    """The run of `fastvideo.train.trainer.Trainer.run(method, max_steps=..., checkpoint_manager=manager)`."""
    from wanshim.core.training import GlobalSteps

    config, callbacks = trainer.training_config, trainer.callbacks._callbacks.values()
    every = int(getattr(getattr(manager, "config", None), "save_steps", 0) or 0)
    steps = GlobalSteps(
        steps=int(max_steps),
        processes=int(trainer.world_group.world_size),
        sequence_parallel=int(trainer.sp_group.world_size),
        gradient_accumulation=max(1, int(config.loop.gradient_accumulation_steps or 1)),
        batch_size=max(1, int(config.data.train_batch_size or 1)),
    )
    run = describe(
        steps,
        config.checkpoint.output_dir,
        done,
        checkpoint_every=every,
        validate_every=max(*map(validation_interval, callbacks), validation_interval_of_method(method), 0),
        saves_last=every > 0,
    )
    return run, int(trainer.global_rank), (_device(),)


def validation_interval(callback: object) -> int:
    """Global steps between the validations of a callback; 0 for one that never does."""
    return int(getattr(callback, "every_steps", 0) or 0)


def validation_interval_of_method(method: object) -> int:
    """The same of a training method, which may validate beside the callbacks."""
    return validation_interval(getattr(method, "_validation_config", None))


def run_of_pipeline(pipeline: Any, done: int) -> Description:
    """The run of `train()` of a pipeline in `fastvideo.training`, which always saves at the end."""
    from wanshim.core.training import GlobalSteps

    args = pipeline.training_args
    steps = GlobalSteps(
        steps=int(args.max_train_steps),
        processes=int(pipeline.world_size),
        sequence_parallel=int(args.sp_size),
        gradient_accumulation=max(1, int(args.gradient_accumulation_steps or 1)),
        batch_size=max(1, int(args.train_batch_size or 1)),
    )
    run = describe(
        steps,
        args.output_dir,
        done,
        checkpoint_every=int(args.training_state_checkpointing_steps or 0),
        validate_every=int(args.validation_steps or 0) if args.log_validation else 0,
        saves_last=True,
    )
    return run, int(pipeline.global_rank), (_device(),)


def describe(
    steps: Any, output_path: str | None, done: int, *, checkpoint_every: int, validate_every: int, saves_last: bool
) -> TrainingRun:
    """A run that goes on after `done` steps. A validation before the first step is over when the bar is shown.

    Args:
        checkpoint_every, validate_every: global steps; 0: never.
        saves_last: the end of the run saves once more.
    """
    from importlib.metadata import version

    from wanshim.core.training.recorder import TrainingRun

    output = Path(output_path or ".").resolve()
    return TrainingRun(
        name=output.name,
        framework=f"fastvideo {version('fastvideo')}",
        output_path=str(output),
        accounting=steps,
        checkpoints=_still(done, steps.steps, checkpoint_every) + saves_last,
        validations=_still(done, steps.steps, validate_every),
        done=done,
    )


def _still(done: int, steps: int, every: int) -> int:
    """The number that comes after `done` steps."""
    return max(0, steps // every - done // every) if every > 0 else 0


def _device() -> str:
    import torch
    from fastvideo.distributed import get_local_torch_device

    device = get_local_torch_device()
    # FastVideo calls every machine without CUDA an Apple one.
    return "cpu" if device.type == "mps" and not torch.backends.mps.is_available() else str(device)
