from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit.monitor.logs import folder_of, make_run, start_line, steps, write_log
from wanshim.cli.main import app
from wanshim.errors import WanshimError
from wanshim.monitor import export
from wanshim.monitor.runs import RunLog


@pytest.fixture
def run(tmp_path: Path) -> RunLog:
    folder = make_run(tmp_path / "logs" / "run")
    write_log(folder, [start_line(), *steps(3), {"step": 4, "seconds": 1, "loss": "=cmd()", "t": 9.0}])
    write_log(folder, [start_line(), *list(steps(2, memory=7)), {"step": 3, "seconds": 1, "loss": "nan", "t": 9.0}])
    return folder_of(tmp_path / "logs").runs["run"]


def test_csv_has_every_step_of_every_attempt_and_no_formula(run: RunLog, tmp_path: Path) -> None:
    (path,) = export.to_csv(run, tmp_path / "csv")
    assert path.name == "rank-00000.cuda-0.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["attempt"], row["step"]) for row in rows] == [
        ("1", "1"), ("1", "2"), ("1", "3"), ("1", "4"), ("2", "5"), ("2", "6"), ("2", "7"),
    ]  # fmt: skip
    assert [row["loss"] for row in rows] == ["1.0", "0.5", str(1 / 3), "", "1.0", "0.5", "nan"]
    assert rows[4]["memory"] == "7"


def test_json_stands_alone_on_standard_output_beside_an_export(run: RunLog, tmp_path: Path) -> None:
    into = tmp_path / "csv"
    result = CliRunner().invoke(app, ["monitor", str(run.folder), "--json", "--export", "csv", "--output", str(into)])
    assert [found["id"] for found in json.loads(result.stdout)["runs"]] == ["run"]
    assert str(into) in result.stderr


def test_tensorboard_reads_back_what_was_logged(run: RunLog, tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    (folder,) = export.to_tensorboard(run, tmp_path / "tb")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    loss = events.Scalars("train/loss")
    assert [event.step for event in loss] == [1, 2, 3, 5, 6, 7]
    assert [event.value for event in loss][:3] == pytest.approx([1, 0.5, 1 / 3])
    assert loss[-1].value != loss[-1].value
    assert [event.value for event in events.Scalars("gpu/memory_bytes")] == [7, 7]
    assert [event.value for event in events.Scalars("time/step_seconds")][:2] == pytest.approx([0.1, 0.1])
    with pytest.raises(WanshimError, match="holds event files already"):
        export.to_tensorboard(run, tmp_path / "tb")


def test_resumed_attempt_replaces_the_points_after_its_state_in_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    write_log(make_run(tmp_path / "logs" / "run"), [start_line(), *steps(5), start_line(done=3), *list(steps(7))[3:]])
    run = folder_of(tmp_path / "logs").runs["run"]
    (table,) = export.to_csv(run, tmp_path / "csv")
    with table.open(newline="") as file:
        found = [(row["attempt"], row["step"]) for row in csv.DictReader(file)]
    assert found == [*(("1", str(step)) for step in range(1, 6)), *(("2", str(step)) for step in range(4, 8))]
    (folder,) = export.to_tensorboard(run, tmp_path / "tb")
    loss = accumulator.EventAccumulator(str(folder)).Reload().Scalars("train/loss")
    assert [event.step for event in loss] == list(range(1, 8))
