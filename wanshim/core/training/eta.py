"""The pace of a run and when it ends.

The median of recent steps, because a mean follows every hiccup; without the first step of the attempt, which
compiles kernels and fills caches; checkpoints and validations apart, because they come at their own
intervals. The unit is a
whole accumulation group: its last micro-batch also reduces gradients and steps the optimizer, so a median
over single micro-batches would miss that part.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from statistics import median

WINDOW = 128


class PauseEta:
    """Pauses between the steps of a run: `planned` times in this attempt."""

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self._done = 0
        self._seconds: deque[float] = deque(maxlen=16)

    def add(self, seconds: float) -> None:
        if seconds > 0:
            self._done += 1
            self._seconds.append(seconds)

    @property
    def eta_seconds(self) -> float:
        """Seconds of the pauses still to come; nothing before the first has shown its length."""
        return max(0, self.planned - self._done) * median(self._seconds) if self._seconds else 0.0


class StepEta:
    """Step times of one process, fed in order.

    Args:
        steps: of the whole run, as it is recorded; None where the dataset has no length.
        group: steps of the record to an optimizer step.
        checkpoints, validations: how many this attempt makes.
        done: steps that earlier attempts made and this one goes on from.
    """

    def __init__(
        self, steps: int | None, group: int = 1, checkpoints: int = 0, validations: int = 0, done: int = 0
    ) -> None:
        self.steps = steps
        self.checkpoints, self.validations = PauseEta(checkpoints), PauseEta(validations)
        self.done = done
        self._started = False
        self._group = max(1, group)
        self._seconds: deque[float] = deque(maxlen=max(WINDOW, 4 * self._group))
        self._first = 0.0
        self._step_seconds: float | None = None  # computed when asked for, once a step

    def add(self, seconds: float, checkpoint_seconds: float = 0.0, validation_seconds: float = 0.0) -> None:
        """One more step took `seconds`; a checkpoint or a validation before or within it took its own."""
        self.done += 1
        self._step_seconds = None
        if self._started:
            self._seconds.append(seconds)
        else:
            self._started, self._first = True, seconds
        self.checkpoints.add(checkpoint_seconds)
        self.validations.add(validation_seconds)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step; None before the first one."""
        if self._started and self._step_seconds is None:
            self._step_seconds = self._median()
        return self._step_seconds

    def _median(self) -> float:
        if self._group == 1 or len(self._seconds) < self._group:
            return median(self._seconds) if self._seconds else self._first
        until = list(accumulate(self._seconds, initial=0.0))
        return max(0.0, median(after - before for before, after in zip(until, until[self._group :]))) / self._group

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end of the run, its remaining pauses included; None where that is unknown."""
        step = self.step_seconds
        if self.steps is None or step is None:
            return None
        return max(0, self.steps - self.done) * step + self.checkpoints.eta_seconds + self.validations.eta_seconds
