"""The begin and the end of a log for an adapter: its place, what happens when it cannot be opened, how it closes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from wanshim.core.training.progress_display import display_for
from wanshim.core.training.recorder import RunRecorder, TrainingRun

log = logging.getLogger("wanshim")

DEFAULT_FOLDER = "training_logs"  # in the run's output folder
ERROR_CHARACTERS = 500  # of an error in the log
RESUMES_AT = "wanshim_resumes_at"  # of an exception that ends a run whose state is saved: the optimizer step


class Recording:
    """The log of one run for an adapter: opened at its first step, closed whichever way it ends. A run that cannot be
    recorded goes on without.

    Args:
        folder: of all logs; None: in the run's output folder.
        feature: named in the warning.
        strict: raise what opening the log raises.
        note: takes a line for the report.
        without_effect: takes the line that the run is not recorded.
    """

    def __init__(
        self,
        folder: str | None,
        feature: str,
        *,
        strict: bool,
        note: Callable[[str], object],
        without_effect: Callable[[str], object],
    ) -> None:
        self.recorder: RunRecorder | None = None
        self.was_opened = False
        self._folder, self._feature, self._strict = folder, feature, strict
        self._note, self._without_effect = note, without_effect

    def open(self, describe: Callable[[], tuple[TrainingRun, int, Sequence[str]]]) -> None:
        """Begin to record. Rank 0 shows the run, too.

        Args:
            describe: returns the run, this process's rank and its devices; may raise anything.
        """
        self.was_opened = True
        try:
            run, rank, devices = describe()
            display = display_for() if rank == 0 else None
            folder = Path(self._folder) if self._folder else Path(run.output_path, DEFAULT_FOLDER)
            recorder = RunRecorder(folder, run, rank, devices, display)
        except Exception as error:
            if self._strict:
                raise
            self._without_effect(f"not recorded: {error}")
            log.warning("wanshim: %s: not recorded: %s", self._feature, error)
            return
        self.recorder = recorder
        self._note(f"rank {rank} on {', '.join(recorder.devices)} logs to {recorder.folder}")

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """A context for the run. Every way out closes its log: finished, also where the program ends itself with status
        0, stopped with a state that it resumes from, or failed with the error."""
        state, error, resumes_at = "failed", None, None
        try:
            yield
            state = "finished"
        except BaseException as raised:
            resumes_at = getattr(raised, RESUMES_AT, None)
            if resumes_at is None and isinstance(raised, SystemExit) and _is_success(raised.code):
                state = "finished"
            else:
                error = f"{type(raised).__name__}: {raised}"[:ERROR_CHARACTERS]
                state = "failed" if resumes_at is None else "stopped"
            raise
        finally:
            if self.recorder is not None:
                self.recorder.close(state, error, resumes_at)
        if not self.was_opened:
            self._without_effect("not recorded: no step ran")


def _is_success(code: object) -> bool:
    """Whether Python ends with status 0 for it."""
    return code is None or (isinstance(code, int) and code == 0)
