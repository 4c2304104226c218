"""Lines on standard error about this process: what is on and what was planned, and in the end what ran.

WANSHIM_REPORT asks for them, in whatever process `activate` is called: by `wanshim run`, by vLLM's plugins or by the
program. They come at the end of the process, by whichever way it ends but SIGKILL, and on SIGUSR2 while it runs. Local
rank 0 reports for all. A process that imports no selected framework, such as a launcher, prints nothing. One that
multiprocessing starts prints its end if it called what is patched; one of `wanshim.core.workers` prints nothing. Under
WANSHIM_STRICT a process fails at its end if a feature that the user named was called without effect.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from wanshim import hand_over, settings
from wanshim.errors import FeatureUnavailable
from wanshim.patching import seam
from wanshim.patching.seam import SeamState, State
from wanshim.reporting import Report, ReportRow, check

TRAINED_NOTHING = (
    "--gpus had no effect: nothing was trained that wanshim plans, nor encoded, and each process ran the whole program "
    "by itself"
)
GENERATED_NOTHING = "{} had no effect: this process called no pipeline that wanshim runs on several GPUs"
SILENT = (State.REGISTERED.value, State.ABSENT.value, State.OFF.value)
DONE = (State.EXERCISED.value, State.UNNEEDED.value)
ON_REQUEST = signal.SIGUSR2
LOCK_WAIT_S = 2.0
STARTS = (("os", "fork"), ("os", "posix_spawn"), ("_posixsubprocess", "fork_exec"), ("subprocess", "_fork_exec"))
AGAIN_S = 5.0  # in which a signal to end that comes again is the same one
_pending: list[Any] = []  # calls that the main thread may have yet to make: Python holds no reference to them


class Process(Protocol):
    """State of this process: `wanshim.activation.Activation`."""

    settings: settings.Settings
    lock: Any
    announce: Callable[[], None] | None

    @property
    def runs(self) -> Mapping[str, Any]: ...
    def report(self) -> Report: ...
    def applies(self, name: str) -> bool: ...


def say(line: str) -> None:
    """A line on standard error; nowhere where that is closed, since `print` would take standard output instead."""
    if sys.stderr is not None:
        print(f"wanshim: {line}", file=sys.stderr, flush=True)


class ProcessReport:
    """The lines of one process.

    Args:
        process: what is on in it.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self._is_program = hand_over.is_program()
        self._ending: float | None = None  # since when, by a signal
        self._ended_in = 0  # the process that has printed its end: a forked child has one of its own
        self._started_in = os.getpid()
        self._is_child = any(argument.startswith("from multiprocessing.") for argument in sys.orig_argv)

    def begin(self, read: settings.Settings) -> None:
        """Print from now on what `read` asks for."""
        if any("wanshim.core.workers." in argument for argument in sys.orig_argv):
            return
        if read.strict and not self._is_child and hand_over.has_run():
            atexit.register(self._check_strict)  # before all others, so that it runs after them
        if not read.report or read.local_rank != 0:
            return
        if not self._is_child:
            self.process.announce = self._open
            if any(run.feature.framework in sys.modules for run in self.process.runs.values()):
                self._open()
        seam.on_note = self._print_note
        atexit.register(self.end)
        self._end_before_exit()
        _in_main_thread(lambda: self._take_signals(read))

    # -- the ways in which a process ends -------------------------------------------------------------

    def _end_before_exit(self) -> None:
        """`os._exit` passes over atexit: multiprocessing ends a forked worker by it, and services themselves."""
        leave = os._exit

        def _exit(status: int) -> None:
            with suppress(Exception):
                self.end()
            leave(status)

        os._exit = _exit  # type: ignore[assignment]

    def _take_signals(self, read: settings.Settings) -> None:
        """Those that nobody handles yet; a handler that the program installs later takes the place of ours. A rank of a
        launcher and a child keep their SIGTERM: one that waits inside NCCL is to end at once, and Python would have to
        come back from there first (vllm-project/vllm-omni#5342)."""
        if signal.getsignal(ON_REQUEST) is signal.SIG_DFL:
            signal.signal(ON_REQUEST, self._print_now)
        is_one_of_several = self._is_child or "local_rank" in read.sources
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not is_one_of_several:
            signal.signal(signal.SIGTERM, self._end_by)
            os.register_at_fork(after_in_child=self._leave_sigterm)

    def _print_now(self, number: int, frame: object) -> None:
        with suppress(Exception):  # as a write to standard error that the signal has interrupted
            if self._can_look():
                say(f"in process {os.getpid()} so far:")
                self._print_rows(None)

    def _end_by(self, number: int, frame: object) -> None:
        if self._ending is None:
            self._ending = time.monotonic()
            _hold_starts()
            with suppress(Exception):
                if self._can_look():
                    self.end()
            pools = sys.modules.get("multiprocessing")  # what is not imported has started nothing
            for worker in pools.active_children() if pools is not None else ():
                if worker.daemon:  # as Python ends them at its exit: a pool may have replaced those that got the signal
                    worker.terminate()
        elif time.monotonic() - self._ending < AGAIN_S:  # a group's end, which the launcher passes on besides
            return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def _leave_sigterm(self) -> None:
        with suppress(ValueError):  # not in the main thread of a subinterpreter
            if signal.getsignal(signal.SIGTERM) == self._end_by:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _can_look(self) -> bool:
        """Whether no other thread is in the middle of a change: it might wait for the one that the signal stopped."""
        if not self.process.lock.acquire(timeout=LOCK_WAIT_S):
            return False
        self.process.lock.release()
        return True

    # -- the lines ------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Print what is on, and by what: once, when the first framework of a selected feature has been imported."""
        self.process.announce = None
        on: dict[str, list[str]] = {}
        with self.process.lock:
            for name, run in self.process.runs.items():
                if self.process.applies(name):
                    on.setdefault(run.selected_by, []).append(name)
        if on:
            groups = (f"{', '.join(names)} ({by})" for by, names in on.items())
            say(f"on in process {os.getpid()}: {'; '.join(groups)}")

    def _reports(self) -> bool:
        """Whether this process still speaks for its machine: a worker learns its local rank after it has started, and
        a program that starts workers may name theirs in its own environment."""
        is_worker = self._is_child or self._started_in != os.getpid()
        return not is_worker or settings.is_local_rank_0()

    def _print_note(self, state: SeamState, text: str) -> None:
        if not self._reports():
            return
        feature = next((name for name, run in self.process.runs.items() if state in run.seams), state.seam.target)
        say(f"{feature}: " + text.replace("\n", "\n  "))

    def end(self) -> None:
        """Print what ran, once a process; nothing where no selected framework was imported."""
        if self._ended_in == os.getpid() or not self._reports():
            return
        self._ended_in = os.getpid()
        selected = self.process.report().selected
        if self._is_child or self._started_in != os.getpid():
            if not any(row.calls for row in selected):
                return  # as a worker that loads data
            say(f"process {os.getpid()} ends:")
        failed = _ended_by()
        self._print_rows(failed)
        for text in self._without_purpose(selected) if failed is None else ():
            say(text)
        for row in selected:
            if failed is not None and row.headline and row.notes[-1] == row.headline:  # how a run goes on
                say(f"{row.feature}: {row.headline}")
        if isinstance(failed, KeyboardInterrupt):
            _end_as_interrupted()

    def _print_rows(self, failed: BaseException | None) -> None:
        unused, lines = [], []
        for row in self.process.report().selected:
            name = f"{row.feature} from {row.origin}" if row.origin else row.feature
            native = row.state == State.NATIVE.value  # known before the import
            waits = row.state == State.REGISTERED.value and row.modules[0] not in sys.modules
            if waits and row.named_in_list and row.framework in sys.modules:
                lines.append(f"{name} not used: {row.modules[0]} was never imported")
            elif row.state in SILENT or (native and row.framework not in sys.modules):
                continue
            elif not row.named and (native or row.state == State.APPLIED.value):
                unused.append(name)
            elif failed is not None and row.state == State.EXERCISED.value:
                lines.append(f"{name} in place{row.outcome.removeprefix(row.state)}")
            else:
                lines.append(f"{name} {row.outcome} ({row.reason})")
        if failed is not None and lines:
            say(f"the program ended with {type(failed).__name__}; until then:")
        for line in lines:
            say(line)
        if unused:
            say(f"not needed in this run: {', '.join(unused)}")

    # -- what was asked for and did not happen --------------------------------------------------------

    def _without_purpose(self, selected: Iterable[ReportRow]) -> list[str]:
        """A sentence for each thing that a command line or a variable asks of this very process, and that no feature
        has done, declined or left to the framework with a reason, here or in a process that it has started."""
        done = {
            row.feature.partition(".")[2]
            for row in selected
            if row.state in DONE or row.fallbacks or _ran_beneath_another(row)
        }
        tried = {row.feature.partition(".")[2] for row in selected if row.failed_calls}
        wanted = self.process.settings.generate is not None and (self._is_program or "torch" in sys.modules)
        asked = {"model_split": hand_over.is_rank(), "generate": wanted}
        sentences = {
            "model_split": TRAINED_NOTHING,
            "generate": GENERATED_NOTHING.format(hand_over.as_written("WANSHIM_GENERATE")),
        }
        for ability in done & sentences.keys():
            hand_over.mark_done(ability)
        missing = (one for one in sentences if asked[one] and one not in done | tried and not hand_over.is_done(one))
        return [sentences[ability] for ability in missing]

    def _check_strict(self) -> None:
        """End with status 1 for what had no effect. What was never called passes: not every process of a job
        trains."""
        if _ended_by() is not None or self._started_in != os.getpid():
            return  # it fails by itself, or is a forked child
        broken = (State.FAILED.value, State.DISPLACED.value)
        selected = self.process.report().selected
        try:
            for text in self._without_purpose(selected):
                if text == TRAINED_NOTHING or self._is_program:
                    raise FeatureUnavailable(text)
            check(row for row in selected if row.calls or row.state in broken)
        except FeatureUnavailable as error:
            say(f"WANSHIM_STRICT: {error}")
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit(1)  # Python ignores an exception and a SystemExit of an exit handler


def _in_main_thread(call: Callable[[], None]) -> None:
    """Python sets handlers of signals in the main thread alone, and vLLM-Omni's engine loads plugins in another: the
    call is left to the main thread then, which makes it as soon as it runs Python."""
    if threading.current_thread() is threading.main_thread():
        call()
        return
    import ctypes  # needed by few

    process = os.getpid()

    def pending(_: object) -> int:
        with suppress(Exception):  # nobody is there to catch it
            if os.getpid() == process:  # and no child that was forked meanwhile
                call()
        return 0

    _pending.append(ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(pending))
    ctypes.pythonapi.Py_AddPendingCall(_pending[-1], None)


def _ended_by() -> BaseException | None:
    """The exception that has ended the program. In an interactive session, as of a notebook, one ends an input, and the
    session goes on."""
    is_session = sys.flags.interactive or hasattr(sys, "ps1")
    return None if is_session else getattr(sys, "last_value", None)


def _ran_beneath_another(row: ReportRow) -> bool:
    """Whether what the program put on top of a feature has called it."""
    return row.state == State.DISPLACED.value and row.calls > row.failed_calls


def _hold_starts() -> None:
    """No other thread starts a process from now on: without the report this one would have ended already, and a pool
    replaces workers that the same signal has ended by ones that it does not reach."""
    ender = threading.get_ident()

    def held(start: Callable[..., int]) -> Callable[..., int]:
        def start_unless_held(*args: Any, **kwargs: Any) -> int:
            while threading.get_ident() != ender:
                time.sleep(AGAIN_S)
            return start(*args, **kwargs)

        return start_unless_held

    for module, name in STARTS:
        if (start := getattr(sys.modules.get(module), name, None)) is not None:
            setattr(sys.modules[module], name, held(start))


def _end_as_interrupted() -> None:
    """Python ends by SIGINT, for which a shell ends its loop, if Ctrl+C ended the last text that was run; the
    dataclasses of what the report imported are such texts."""
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")  # noqa: S102
