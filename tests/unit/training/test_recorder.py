from __future__ import annotations

import io
import json
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from rich.console import Console

from wanshim.core.shared.gpus import GpuMeter, GpuReading
from wanshim.core.training import progress_display
from wanshim.core.training import recorder as recorder_module
from wanshim.core.training.accounting import StepAccounting
from wanshim.core.training.eta import StepEta
from wanshim.core.training.progress_display import ProgressBar, ProgressLines, display_for, duration
from wanshim.core.training.recorder import RunRecorder, StepRecord, TrainingRun

RUN = TrainingRun("lora", "test 1.0", "out/lora", StepAccounting(6, gradient_accumulation=2))


class Clock:
    """What the recorder takes for the time; it stands still unless told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        fake = SimpleNamespace(perf_counter=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(recorder_module, "time", fake)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def records(recorder: RunRecorder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in next(recorder.folder.glob("*.jsonl")).read_text().splitlines()]


def records_once(recorder: RunRecorder, count: int) -> list[dict[str, Any]]:
    """Records of a log, once its thread has written so many."""
    for _ in range(1000):
        with suppress(StopIteration):
            if len(found := records(recorder)) >= count:
                return found
        time.sleep(0.01)
    raise AssertionError(f"there are no {count} records")


def test_checkpoint_time_is_kept_out_of_the_step(tmp_path: Path, clock: Clock) -> None:
    recorder = RunRecorder(tmp_path, RUN, 0, ["cpu"])
    recorder.end_step(1.0, steps_optimizer=False)
    clock.now += 2.0
    with recorder.pause("checkpoint"), recorder.pause("checkpoint"):
        clock.now += 30.0
    clock.now += 1.0
    recorder.end_step(float("inf"), steps_optimizer=True)
    recorder.close()
    first, second = (record for record in records(recorder) if "event" not in record)
    assert "checkpoint_seconds" not in first
    assert (second["seconds"], second["checkpoint_seconds"]) == (3.0, 30.0)
    assert (second["loss"], second["optimizer_step"]) == ("inf", 1)
    assert [r["event"] for r in records(recorder) if "event" in r] == ["start", "checkpoint", "checkpoint saved", "end"]


def test_log_that_somebody_removes_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a cleaner of /tmp does: what is written to a removed file reaches nobody."""
    recorder = RunRecorder(tmp_path, RUN, 0, ["cpu"])
    begin = records_once(recorder, 1)
    shutil.rmtree(recorder.folder)
    for _ in range(2):
        recorder.end_step(1.0, steps_optimizer=False)
    assert records_once(recorder, 3)[0] == begin[0]
    assert json.loads((recorder.folder / "run.json").read_text())["state"] == "running"
    recorder.close()
    assert [record.get("step") for record in records(recorder)] == [None, 1, 2, 2]
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"wanshim: the progress log in {recorder.folder} was removed, and begins anew"]


def test_device_that_is_no_gpu_is_said_to_be_absent(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, RUN, 0, ["cpu"])
    recorder.close()
    assert records(recorder)[0]["gpu_absent"] == "cpu is no GPU"


def test_failure_inside_the_recorder_never_reaches_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RunRecorder(tmp_path, RUN, 0, ["cpu"])
    recorder.end_step("no number", steps_optimizer=True)
    for _ in range(3):
        recorder.end_step(1.0, steps_optimizer=True)
    recorder.close()
    assert ["no longer recorded" in r.getMessage() for r in caplog.records] == [True]


def test_other_ranks_leave_run_json_alone(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, RUN, 1, ["cpu"])
    recorder.close()
    assert not (recorder.folder / "run.json").exists()


def shown(display: type[ProgressBar] | type[ProgressLines], folder: Path, terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=160)
    assert type(display_for(console)) is display
    recorder = RunRecorder(folder, RUN, 0, ["cpu"], display(console))
    for _ in range(6):
        recorder.begin_step(0, 1e-4)
        recorder.end_step(0.25, steps_optimizer=True)
    recorder.close()
    return text.getvalue()


def test_without_a_terminal_plain_lines_are_printed(tmp_path: Path) -> None:
    text = shown(ProgressLines, tmp_path, terminal=False)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "wanshim: lora: 6 micro-steps of each of 1 process(es), 3 optimizer steps, 1 epoch(s)"
    # The ETA is that of the machine's clock, which a busy machine holds up.
    assert re.match(r"wanshim: step 1/6 \(16\.7 %\), ETA \d:\d\d:\d\d, loss 0\.25", lines[1])
    assert lines[-2].startswith("wanshim: step 6/6 (100.0 %)")
    assert lines[-1] == "wanshim: finished"


def test_without_a_terminal_a_line_a_minute_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty hours of two seconds a step."""
    text, now = io.StringIO(), 0.0
    monkeypatch.setattr(progress_display, "time", SimpleNamespace(monotonic=lambda: now))
    lines = ProgressLines(Console(file=text))
    pace = StepEta(36_000)
    for step in range(36_000):
        now = 2.0 * step
        lines.step(StepRecord(step, step, 0, now, 2.0, 0.0, 0.0, 1e-4), pace)
    assert len(text.getvalue().splitlines()) == 20 * 60


def test_on_a_terminal_the_bar_ends_at_all_steps(tmp_path: Path) -> None:
    assert "step 6/6 (100.0 %), ETA 0:00:00, loss 0.25" in shown(ProgressBar, tmp_path, terminal=True)


def test_duration_is_hours_minutes_seconds() -> None:
    assert [duration(s) for s in (None, 0, 59.6, 3723)] == ["-", "0:00:00", "0:01:00", "1:02:03"]


def test_meter_without_a_driver_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", none)
    meter = GpuMeter(["cuda:0", "cpu"])
    assert meter.absent == {"cuda:0": "Driver Not Loaded", "cpu": "cpu is no GPU"}
    assert meter.read() == {}


def test_meter_reads_memory_and_utilisation_of_the_card_with_that_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    def divided(handle: str) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"a{index}"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", {"GPU-a1": "one"}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", {"one": SimpleNamespace(used=3, total=8)}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", {"one": SimpleNamespace(gpu=50)}.__getitem__)
    assert GpuMeter(["cuda:1"]).read() == {"cuda:1": GpuReading(3, 8, 50)}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", divided)  # by MIG
    assert GpuMeter(["cuda:1"]).read() == {"cuda:1": GpuReading(3, 8, None)}


def test_validation_is_kept_apart_and_a_checkpoint_inside_it_counts_as_it(tmp_path: Path, clock: Clock) -> None:
    recorder = RunRecorder(tmp_path, RUN, 0, ["cpu"])
    with recorder.pause("validation"), recorder.pause("checkpoint"):
        clock.now += 20.0
    clock.now += 1.0
    recorder.end_step(1.0, steps_optimizer=True)
    recorder.close()
    (step,) = (record for record in records(recorder) if "event" not in record)
    assert (step["seconds"], step["validation_seconds"]) == (1.0, 20.0)
    assert "checkpoint_seconds" not in step
    assert [r["event"] for r in records(recorder) if "event" in r] == ["start", "validation", "validated", "end"]
