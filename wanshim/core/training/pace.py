"""How fast a run goes and when it ends.

The median of recent steps, because a mean follows every hiccup; without the first step of the attempt, which
compiles kernels and fills caches; checkpoints apart, because they come at their own intervals. The unit is a
whole accumulation group: its last micro-batch also reduces gradients and steps the optimizer, so a median
over single micro-batches would miss that part.
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 128


class Pace:
    """Step times of one process, fed in order.

    Args:
        micro_steps: of the whole run, or None where the dataset has no length.
        gradient_accumulation: micro-batches to an optimizer step.
        checkpoints: how many the whole run saves.
    """

    def __init__(self, micro_steps: int | None, gradient_accumulation: int = 1, checkpoints: int = 0) -> None:
        self.micro_steps = micro_steps
        self.checkpoints = checkpoints
        self.done = 0
        self._group = max(1, gradient_accumulation)
        self._seconds: deque[float] = deque(maxlen=max(WINDOW, 4 * self._group))
        self._saves: deque[float] = deque(maxlen=16)
        self._num_saves = 0
        self._first = 0.0

    def add(self, seconds: float, checkpoint_seconds: float = 0.0) -> None:
        """One more micro-step took `seconds`, and a checkpoint within or before it `checkpoint_seconds`."""
        self.done += 1
        if self.done == 1:
            self._first = seconds
        else:
            self._seconds.append(seconds)
        if checkpoint_seconds > 0:
            self._num_saves += 1
            self._saves.append(checkpoint_seconds)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a micro-step; None before the first one."""
        if self.done == 0:
            return None
        recent = list(self._seconds)
        if len(recent) < self._group:
            return median(recent) if recent else self._first
        sums = [sum(recent[i : i + self._group]) for i in range(len(recent) - self._group + 1)]
        return median(sums) / self._group

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end of the run, its remaining checkpoints included; None where that is unknown."""
        step = self.step_seconds
        if self.micro_steps is None or step is None:
            return None
        save = median(self._saves) if self._saves else 0.0
        return max(0, self.micro_steps - self.done) * step + max(0, self.checkpoints - self._num_saves) * save
