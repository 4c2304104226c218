"""What a process under `wanshim run` says on standard error: what is on and what was planned, and in the end what ran.

Local rank 0 speaks for all. A process that imports no selected framework, such as a launcher, says nothing, and neither
does one that multiprocessing or `wanshim.core.workers` starts. Under WANSHIM_STRICT a process fails at its end if a
feature that the user named was called without effect.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

from wanshim import activation, settings
from wanshim.errors import FeatureUnavailable
from wanshim.patching import seam
from wanshim.patching.seam import SeamState, State

TRAINED_NOTHING = (
    "--gpus had no effect: nothing was trained that wanshim plans, and each process ran the whole program by itself"
)
SILENT = (State.REGISTERED.value, State.ABSENT.value, State.OFF.value)


def report_this_process() -> None:
    """Arrange for both blocks, unless another local rank says them or none was asked for."""
    if any(name in argument for argument in sys.orig_argv for name in ("multiprocessing.", "wanshim.core.workers.")):
        return
    read = settings.read()
    if read.disable:
        return
    if read.strict:
        atexit.register(_check_strict)  # before all others, so that it runs after them
    if read.report and read.local_rank == 0:
        activation.CURRENT.announce = _open
        seam.on_note = _tell_note
        atexit.register(_close)


def say(line: str) -> None:
    """A line on standard error; nowhere where that is closed, since `print` would take standard output instead."""
    if sys.stderr is not None:
        print(f"wanshim: {line}", file=sys.stderr, flush=True)


def _open() -> None:
    """What is on, by what: once, when the first framework of a selected feature has been imported."""
    activation.CURRENT.announce = None
    on: dict[str, list[str]] = {}
    with activation.CURRENT.lock:
        for name, run in activation.CURRENT.runs.items():
            if _applies(run):
                on.setdefault(run.selected_by, []).append(name)
    if on:
        groups = (f"{', '.join(names)} ({by})" for by, names in on.items())
        say(f"on in process {os.getpid()}: {'; '.join(groups)}")


def _applies(run: activation.FeatureRun) -> bool:
    try:
        return run.error is None and activation.CURRENT.decide(run).applies
    except Exception:
        return False  # as a broken judge, which is reported when the feature's own module is imported


def _tell_note(state: SeamState, text: str) -> None:
    feature = next((name for name, run in activation.CURRENT.runs.items() if state in run.seams), state.seam.target)
    say(f"{feature}: " + text.replace("\n", "\n  "))


def _close() -> None:
    """What ran. Nothing where no selected framework was imported."""
    failed = getattr(sys, "last_value", None)  # what ended the program, if that was an exception
    unused, lines = [], []
    selected = activation.report().selected
    for row in selected:
        native = row.state == State.NATIVE.value
        if row.state in SILENT or (native and row.framework not in sys.modules):  # native is known before the import
            continue
        name = f"{row.feature} from {row.origin}" if row.origin else row.feature
        if not row.named and (native or row.state == State.APPLIED.value):
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
    if _trained_nothing():
        say(TRAINED_NOTHING)
    for row in selected:
        if failed is not None and row.headline and row.notes[-1] == row.headline:  # how a run goes on, said at its end
            say(f"{row.feature}: {row.headline}")
    generated = any(row.calls for row in selected if row.feature.endswith(".generate"))
    wanted = activation.CURRENT.settings.generate is not None
    if failed is None and wanted and not generated and "torch" in sys.modules:
        say("WANSHIM_GENERATE had no effect: this process called no pipeline that wanshim runs on several GPUs")
    if isinstance(failed, KeyboardInterrupt) and not (sys.flags.interactive or hasattr(sys, "ps1")):
        _end_as_interrupted()


def _end_as_interrupted() -> None:
    """Python ends by SIGINT, for which a shell ends its loop, if Ctrl+C ended the last text that was run; the
    dataclasses of what the report imported are such texts."""
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")  # noqa: S102


def _trained_nothing() -> bool:
    """Whether a rank of `wanshim run --gpus` has come to no place that a plan changes."""
    planned = any(row.calls for row in activation.report().selected if row.feature.endswith(".model_split"))
    return settings.is_rank() and not planned and "torch" in sys.modules and not hasattr(sys, "last_value")


def _check_strict() -> None:
    """What had no effect makes the exit status 1. What was never called passes: not every process of a job trains."""
    if getattr(sys, "last_value", None) is not None:
        return  # it fails by itself
    broken = (State.FAILED.value, State.DISPLACED.value)
    try:
        activation.check(row for row in activation.report().selected if row.calls or row.state in broken)
        if _trained_nothing():
            raise FeatureUnavailable(TRAINED_NOTHING)
    except FeatureUnavailable as error:
        say(f"WANSHIM_STRICT: {error}")
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(1)  # Python ignores an exception and a SystemExit of an exit handler
