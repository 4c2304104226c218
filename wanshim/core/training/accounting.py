"""The number of steps of a training run.

A data loader prepared by accelerate gives each *process* the same number of micro-batches, filling up the last
round; a process may own one GPU, or several when its model is split. Gradient accumulation joins micro-batches
to one optimizer step and, as accelerate does it, also steps at the end of an epoch with what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from wanshim.errors import SettingInvalid


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
        SettingInvalid: a count is not a whole number above zero.
    """

    samples: int
    repeat: int = 1
    epochs: int = 1
    processes: int = 1
    gradient_accumulation: int = 1
    batch_size: int = 1
    groups_cross_epochs: bool = False

    def __post_init__(self) -> None:
        _check_counts({name: value for name, value in asdict(self).items() if name != "groups_cross_epochs"})

    @property
    def micro_steps_per_epoch(self) -> int:
        return -(-self.samples * self.repeat // (self.processes * self.batch_size))

    @property
    def micro_steps(self) -> int:
        return self.micro_steps_per_epoch * self.epochs

    @property
    def optimizer_steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch alone, its last partial group counted."""
        return -(-self.micro_steps_per_epoch // self.gradient_accumulation)

    @property
    def optimizer_steps(self) -> int:
        if self.groups_cross_epochs:
            return self.micro_steps // self.gradient_accumulation
        return self.optimizer_steps_per_epoch * self.epochs

    def optimizer_steps_in(self, recorded: int) -> int:
        """Optimizer steps in the first `recorded` lines of the log."""
        if self.groups_cross_epochs:
            return recorded // self.gradient_accumulation
        epochs, rest = divmod(recorded, self.micro_steps_per_epoch)
        return epochs * self.optimizer_steps_per_epoch + -(-rest // self.gradient_accumulation)

    @property
    def recorded_steps(self) -> int:
        """Lines of the log: one a micro-step."""
        return self.micro_steps

    @property
    def recorded_group(self) -> int:
        """Lines of the log to an optimizer step."""
        return self.gradient_accumulation

    def to_dict(self) -> dict[str, int | bool]:
        """The arguments and the results, for run.json."""
        return _with_derived(self, "micro_steps_per_epoch", "recorded_group")


@dataclass(frozen=True)
class GlobalSteps:
    """The steps of a trainer that is given how many optimizer steps to make and loops over its data until then.

    Ranks of one sequence-parallel group work on parts of the same sample, so they count once.

    Args:
        steps: optimizer steps of the whole run.
        processes: all of them.
        sequence_parallel: processes that share a sample.
        gradient_accumulation: micro-batches to an optimizer step.
        batch_size: samples in a micro-batch of one sequence-parallel group.

    Raises:
        SettingInvalid: a count is not a whole number above zero, or the groups do not divide the processes.
    """

    steps: int
    processes: int = 1
    sequence_parallel: int = 1
    gradient_accumulation: int = 1
    batch_size: int = 1
    recorded_group: int = field(default=1, init=False)  # a line of the log is an optimizer step

    def __post_init__(self) -> None:
        _check_counts(asdict(self))
        if self.processes % self.sequence_parallel:
            raise SettingInvalid(
                f"processes={self.processes} with sequence_parallel={self.sequence_parallel}",
                expected="groups of equal size",
            )

    @property
    def data_parallel(self) -> int:
        """Groups that work on samples of their own."""
        return self.processes // self.sequence_parallel

    @property
    def samples_per_step(self) -> int:
        return self.data_parallel * self.batch_size * self.gradient_accumulation

    @property
    def micro_steps(self) -> int:
        """Micro-steps of one process."""
        return self.steps * self.gradient_accumulation

    @property
    def optimizer_steps(self) -> int:
        return self.steps

    @staticmethod
    def optimizer_steps_in(recorded: int) -> int:
        """Optimizer steps in the first `recorded` lines of the log."""
        return recorded

    @property
    def recorded_steps(self) -> int:
        return self.steps

    def to_dict(self) -> dict[str, int | bool]:
        """The arguments and the results, for run.json."""
        return _with_derived(self, "data_parallel", "samples_per_step")


def _check_counts(counts: Mapping[str, object]) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingInvalid(f"{name}={value!r}", expected="a whole number above zero")


def _with_derived(steps: StepAccounting | GlobalSteps, *own: str) -> dict[str, int | bool]:
    names = ("micro_steps", "optimizer_steps", "recorded_steps", *own)
    return {**asdict(steps), **{name: getattr(steps, name) for name in names}}
