"""Lines of a process at its start and its end, on a framework made for the test."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import wanshim
from tests.unit.fake_framework import DECODE, REPAIR, Fake, a_seam, fails, wan
from wanshim import activation, hand_over, process_report
from wanshim.patching import SeamState, seam

__all__ = ["wan"]  # the fixture


class Process:
    """This one, as `wanshim run` starts it: what it said so far, and its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.at_exit: list[Callable[[], None]] = []
        monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
        monkeypatch.setattr(atexit, "register", self.at_exit.append)
        self.statuses: list[int] = []  # with which it ended itself
        monkeypatch.setattr(os, "_exit", self.statuses.append)
        monkeypatch.setattr(seam, "on_note", None)
        monkeypatch.setattr(activation.CURRENT, "announce", None)
        monkeypatch.setattr(activation.CURRENT, "process_report", None)
        monkeypatch.setattr(signal, "signal", lambda number, handler: None)
        monkeypatch.setenv("WANSHIM_RUN_PREFIX", sys.prefix)
        monkeypatch.setenv("WANSHIM_REPORT", "1")
        monkeypatch.delattr(sys, "last_value", raising=False)

    def said(self) -> list[str]:
        return self.capsys.readouterr().err.splitlines()

    def end(self) -> list[str]:
        for function in reversed(self.at_exit):
            function()
        return self.said()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Process:
    return Process(monkeypatch, capsys)


def start(features: str = "auto,decode") -> None:
    activation.CURRENT.process_report = None
    wanshim.activate(features)


def test_start_says_once_what_is_on_and_by_what_when_the_framework_is_imported(wan: Fake, process: Process) -> None:
    start()
    assert process.said() == []
    wan.dit()
    pid = os.getpid()
    assert process.said() == [f"wanshim: on in process {pid}: fakewan.repair (auto); fakewan.decode (decode)"]
    wan.vae()
    assert process.said() == []


@pytest.mark.parametrize("strict", ["0", "1"])
def test_rank_that_trained_nothing_says_so_and_fails_under_strict(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: str
) -> None:
    """As `wanshim run --gpus 2 -- python generate.py`, which makes everything twice."""
    monkeypatch.setenv("WANSHIM_STRICT", strict)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    wan.offer(replace(REPAIR, name="fakewan.model_split", auto=False, switched_on_by="plan"))
    monkeypatch.setenv("WANSHIM_PLAN", "sequence")
    monkeypatch.setenv("WANSHIM_RUN_RANK", "0/2")
    monkeypatch.setenv("WANSHIM_RUN_FAILURE", str(tmp_path / "0"))
    (tmp_path / "0.reached").write_text(str(os.getpid()))
    start("auto")
    assert (
        process.end()[: 1 + int(strict)]
        == [
            f"wanshim: {process_report.TRAINED_NOTHING}",
            f"wanshim: WANSHIM_STRICT: {process_report.TRAINED_NOTHING}.",
        ][: 1 + int(strict)]
    )
    assert process.statuses == [1] * int(strict)


def test_end_says_what_ran_and_names_fixes_that_nothing_called_in_one_line(wan: Fake, process: Process) -> None:
    start()
    wan.dit()
    wan.vae().decode(1)
    process.said()
    assert process.end() == [
        "wanshim: fakewan.decode exercised, 1 call of decode (tested: behaviour)",
        "wanshim: not needed in this run: fakewan.repair",
    ]


def test_named_feature_that_nothing_called_has_a_line_of_its_own(wan: Fake, process: Process) -> None:
    start("none,decode")
    wan.vae()
    process.said()
    assert process.end() == ["wanshim: fakewan.decode applied, never called (tested: behaviour)"]


def test_process_that_imports_no_selected_framework_says_nothing(wan: Fake, process: Process) -> None:
    start()
    assert process.end() == []


def falls_back(original: Any, seam: SeamState) -> Callable[[int], Any]:
    """Odd numbers are left to the framework; 0 changes nothing; what is below fails."""

    def replacement(x: int) -> Any:
        if seam.enter() and x % 2:
            seam.fall_back("odd numbers are not known")
        elif x == 0:
            seam.pass_by()
        elif x < 0:
            seam.fail()
            raise ValueError(x)
        return original(x)

    return replacement


FALLS_BACK = replace(DECODE, seams=(a_seam("vae:decode", falls_back),))


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        ((1, 3), "left to the framework 2 times: odd numbers are not known"),
        ((0, 1), "left to the framework 1 time: odd numbers are not known"),
        ((0,), "without effect, 1 call of decode"),
        ((1, 2, 0), "exercised, 3 calls of decode, of which left to the framework 1 time: odd numbers are not known"),
        ((-2, 2), "exercised, 2 calls of decode, of which 1 failed"),
        ((-2, -2), "without effect, 2 calls of decode, of which 2 failed"),
        (
            (-2, 1),
            "without effect, 2 calls of decode, of which 1 failed, left to the framework 1 time: "
            "odd numbers are not known",
        ),
    ],
)
def test_end_says_which_calls_failed_or_were_left_to_the_framework_and_why(
    wan: Fake, process: Process, calls: tuple[int, ...], line: str
) -> None:
    wan.offer(FALLS_BACK)
    start("decode")
    for x in calls:
        with suppress(ValueError):
            wan.vae().decode(x)
    process.said()
    assert process.end() == [f"wanshim: fakewan.decode {line} (tested: behaviour)"]


def test_after_an_exception_calls_without_effect_are_not_in_place(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    wan.offer(FALLS_BACK)
    start("decode")
    wan.vae().decode(1)
    process.said()
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError("mine"), raising=False)
    assert process.end()[1] == (
        "wanshim: fakewan.decode left to the framework 1 time: odd numbers are not known (tested: behaviour)"
    )


@pytest.mark.parametrize("reported", ["1", "0"])
def test_strict_ends_a_process_with_status_1_if_every_call_was_left_to_the_framework(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch, reported: str
) -> None:
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    monkeypatch.setenv("WANSHIM_REPORT", reported)
    wan.offer(FALLS_BACK)
    start("decode")
    process.end()
    assert not process.statuses  # never called: a process that only prepares
    wan.vae().decode(1)
    last = process.end()[-1]
    assert process.statuses == [1]
    assert last.startswith(
        "wanshim: WANSHIM_STRICT: fakewan.decode was selected by decode and is left to the framework 1 time: odd"
    )
    wan.vae().decode(2)
    process.end()
    assert process.statuses == [1]


def test_strict_leaves_the_status_of_a_program_that_failed(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("it fails by itself"))
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wan.offer(FALLS_BACK)
    start("decode")
    wan.vae().decode(1)
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError("mine"), raising=False)
    process.end()


def test_note_is_said_when_it_is_made_and_not_again_at_the_end(wan: Fake, process: Process) -> None:
    start()
    wan.vae()
    process.said()
    activation.CURRENT.runs["fakewan.decode"].seams[0].notes.append("a plan\n  of two lines")
    assert process.said() == ["wanshim: fakewan.decode: a plan", "    of two lines"]
    assert "a plan" in str(wanshim.report())
    assert not any("plan" in line for line in process.end())


def test_after_an_exception_the_end_says_what_ran_until_then_and_calls_nothing_exercised(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    wan.dit()
    wan.vae().decode(1)
    process.said()
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError("mine"), raising=False)
    assert process.end() == [
        "wanshim: the program ended with ZeroDivisionError; until then:",
        "wanshim: fakewan.decode in place, 1 call of decode",
        "wanshim: not needed in this run: fakewan.repair",
    ]


@pytest.mark.parametrize("strict", ["0", "1"])
def test_session_whose_input_failed_went_on_and_ends_as_one_without_an_error(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch, strict: str
) -> None:
    """As a notebook, in which a cell was interrupted: IPython sets both."""
    monkeypatch.setenv("WANSHIM_STRICT", strict)
    wan.offer(FALLS_BACK)
    start("decode")
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    wan.vae().decode(1)
    process.said()
    assert process.end()[0].startswith("wanshim: fakewan.decode left to the framework 1 time: odd numbers")
    assert process.statuses == [1] * int(strict)


@pytest.mark.parametrize("since", [[], ["a later note"]])
def test_after_an_exception_the_last_line_is_a_headline_that_nothing_was_said_after(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch, since: list[str]
) -> None:
    start()
    wan.vae().decode(1)
    notes = activation.CURRENT.runs["fakewan.decode"].seams[0].notes
    notes.lead("goes on from step 3")
    for text in since:
        notes.append(text)
    process.said()
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError("mine"), raising=False)
    assert (process.end()[-1] == "wanshim: fakewan.decode: goes on from step 3") is (not since)


def test_patch_that_failed_is_said_at_the_end_and_is_not_on_at_the_start(wan: Fake, process: Process) -> None:
    wan.offer(replace(REPAIR, seams=(a_seam("dit:forward", fails),)), DECODE)
    start()
    wan.dit()
    assert process.said()[-1].endswith(": fakewan.decode (decode)")
    assert process.end()[0] == "wanshim: fakewan.repair failed (RuntimeError: the factory fails)"


def test_judge_that_breaks_never_reaches_the_import_of_another_module(wan: Fake, process: Process) -> None:
    def judge(source: Any) -> None:
        raise ZeroDivisionError

    wan.offer(REPAIR, DECODE)
    broken = replace(DECODE, name="fakewan.broken", seams=(a_seam("vae:decode"),), judge=judge)
    activation.CURRENT.known().features["fakewan.broken"] = broken
    start("auto,broken")
    wan.dit()
    assert process.said() == [f"wanshim: on in process {os.getpid()}: fakewan.repair (auto)"]


@pytest.mark.parametrize(
    ("variables", "argv"),
    [
        ({"WANSHIM_REPORT": "0"}, ["python", "train.py"]),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ["python", "train.py"]),
        ({}, ["python", "-c", "from wanshim.core.workers.process import run; run(7)"]),
    ],
    ids=["not asked for", "another local rank", "a worker of the core"],
)
def test_process_that_is_not_to_speak_says_nothing(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], argv: list[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", argv)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    start()
    wan.vae().decode(1)
    assert process.end() == []


@pytest.mark.parametrize("calls", [0, 1])
def test_worker_of_multiprocessing_reports_what_it_called_itself(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Such as a worker of vLLM's; one that loads data calls nothing."""
    argv = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=7)"]
    monkeypatch.setattr(sys, "orig_argv", argv)
    start()
    for _ in range(calls):
        wan.vae().decode(1)
    wan.vae()
    expected = [
        f"wanshim: process {os.getpid()} ends:",
        "wanshim: fakewan.decode exercised, 1 call of decode (tested: ",
    ]
    assert [line[: len(text)] for line, text in zip(process.end(), expected, strict=False)] == expected[: 2 * calls]


def test_feature_of_a_list_whose_module_was_never_imported_is_reported(wan: Fake, process: Process) -> None:
    start("none,decode")
    wan.dit()  # the framework, and not the module of the feature
    assert process.end() == ["wanshim: fakewan.decode not used: fakewan.vae was never imported"]


def test_call_that_needs_no_change_is_not_needed_and_passes_strict(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fits(original: Any, seam: SeamState) -> Callable[[int], Any]:
        def replacement(x: int) -> Any:
            if seam.enter():
                seam.not_needed("the framework does it")
            return original(x)

        return replacement

    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wan.offer(replace(DECODE, seams=(a_seam("vae:decode", fits),)))
    start("none,decode")
    wan.vae().decode(1)
    assert "wanshim: fakewan.decode: the framework does it" in process.said()
    assert process.end() == ["wanshim: fakewan.decode not needed in this run (tested: behaviour)"]
    assert process.statuses == []


def test_with_standard_error_closed_nothing_goes_to_standard_output(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    monkeypatch.setattr(sys, "stderr", None)
    wan.vae().decode(1)
    for function in process.at_exit:
        function()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("with_torch", [True, False])
@pytest.mark.parametrize(
    ("value", "program", "status"),
    [("2", True, 1), ("2", False, None), ("", True, None), ("off", True, None)],
    ids=["the program", "a process of its own", "not asked for", "off"],
)
def test_program_that_was_to_generate_and_called_no_pipeline_says_so_and_fails_under_strict(
    wan: Fake,
    process: Process,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    value: str,
    program: bool,
    status: int | None,
    with_torch: bool,
) -> None:
    monkeypatch.setenv("WANSHIM_GENERATE", value)
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    monkeypatch.setenv("WANSHIM_RUN_FAILURE", str(tmp_path / "0"))
    (tmp_path / "0.reached").write_text(str(os.getpid() if program else 1))
    if with_torch:
        monkeypatch.setitem(sys.modules, "torch", sys)
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    wan.offer(replace(REPAIR, name="fakewan.generate", auto=False, switched_on_by="generate"))
    start("auto")
    said = any(
        line == f"wanshim: {process_report.GENERATED_NOTHING.format('WANSHIM_GENERATE')}" for line in process.end()
    )
    assert said is (value == "2" and (program or with_torch))
    assert process.statuses == ([] if status is None else [status])


@pytest.mark.parametrize(
    ("planned", "has_purpose"),
    [
        ("passes by", False),
        ("has an effect", True),
        ("left to the framework", True),
        ("done by a process that it started", True),
        ("has an effect beneath the program's own", True),
    ],
)
def test_rank_that_only_loaded_a_model_has_trained_nothing(
    wan: Fake, process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planned: str, has_purpose: bool
) -> None:
    def loads(original: Any, seam: SeamState) -> Callable[..., Any]:
        def forward(x: int) -> Any:
            if seam.enter() and planned in ("passes by", "done by a process that it started"):
                seam.pass_by()
            elif planned == "left to the framework":
                seam.fall_back("no reason")
            return original(x)

        return forward

    monkeypatch.setenv("WANSHIM_PLAN", "sequence")
    monkeypatch.setenv("WANSHIM_RUN_RANK", "0/2")
    monkeypatch.setenv("WANSHIM_RUN_FAILURE", str(tmp_path / "0"))
    (tmp_path / "0.reached").write_text(str(os.getpid()))
    plan = replace(REPAIR, name="fakewan.model_split", auto=False, switched_on_by="plan")
    wan.offer(replace(plan, seams=(a_seam("dit:forward", loads),)))
    start("auto")
    dit = wan.dit()
    if "beneath" in planned:
        beneath = dit.forward
        dit.forward = lambda x: beneath(x)
    dit.forward(1)
    if planned.startswith("done by"):
        hand_over.mark_done("model_split")
    assert (f"wanshim: {process_report.TRAINED_NOTHING}" in process.end()) is not has_purpose
