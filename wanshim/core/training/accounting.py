"""How many steps a training run has.

A data loader prepared by accelerate gives each *process* the same number of micro-batches, filling up the last
round; a process may own one GPU, or several when its model is split. Gradient accumulation joins micro-batches
to one optimizer step and, as accelerate does it, also steps at the end of an epoch with what it has.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from wanshim.errors import TrainingInvalid


@dataclass(frozen=True)
class StepAccounting:
    """The steps of one process; every process of the run has the same.

    Args:
        samples: items of the dataset, before `repeat`.
        repeat: how often an epoch goes through them.
        epochs: of the run.
        processes: data-parallel processes. Not GPUs: a model split over two GPUs is one process.
        gradient_accumulation: micro-batches to an optimizer step.
        batch_size: samples in a micro-batch of one process (DiffSynth: always 1).
        groups_cross_epochs: accumulation goes on over the end of an epoch
            (accelerate's `sync_with_dataloader=False`); a partial group at the very end then never steps.

    Raises:
        TrainingInvalid: a count is not a whole number above zero.
    """

    samples: int
    repeat: int = 1
    epochs: int = 1
    processes: int = 1
    gradient_accumulation: int = 1
    batch_size: int = 1
    groups_cross_epochs: bool = False

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "groups_cross_epochs" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise TrainingInvalid(f"{name}={value!r}", expected="a whole number above zero")

    @property
    def micro_steps_per_epoch(self) -> int:
        return -(-self.samples * self.repeat // (self.processes * self.batch_size))

    @property
    def micro_steps(self) -> int:
        return self.micro_steps_per_epoch * self.epochs

    @property
    def optimizer_steps_per_epoch(self) -> int:
        """Of one epoch alone, its last partial group counted."""
        return -(-self.micro_steps_per_epoch // self.gradient_accumulation)

    @property
    def optimizer_steps(self) -> int:
        if self.groups_cross_epochs:
            return self.micro_steps // self.gradient_accumulation
        return self.optimizer_steps_per_epoch * self.epochs

    def to_dict(self) -> dict[str, int | bool]:
        """What went in and what came out, for run.json."""
        return {
            **asdict(self),
            "micro_steps_per_epoch": self.micro_steps_per_epoch,
            "micro_steps": self.micro_steps,
            "optimizer_steps": self.optimizer_steps,
        }
