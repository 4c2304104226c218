"""`diffsynth.progress` on DiffSynth's own runner: what the log and the totals say against what happened."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import ModelLogger

import wanshim
from tests.contract.diffsynth import jobs, progress_job
from tests.unit.monitor.logs import folder_of
from wanshim.core.training.progress_log import run_folder
from wanshim.demo import wan_checkpoint
from wanshim.monitor import status
from wanshim.monitor.health import Patience

FEATURE = "diffsynth.progress"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    wan_checkpoint.register(wan_checkpoint.write(folder))
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


OPTIONS = ["--epochs", "2", "--accumulation", "3", "--clock", "--seconds", "0.5", "--save-steps", "4"]


@pytest.mark.slow  # several processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("processes", "samples", "options", "variables"),
    [
        pytest.param(2, 13, [], {}, marks=pytest.mark.sweep),
        pytest.param(1, 7, [], {"WANSHIM_DEVICES": "cpu,cpu"}, marks=pytest.mark.sweep),
        (2, 13, ["--split"], {}),
    ],
    ids=["two processes", "split", "two processes, each split"],
)
def test_run_ends_at_100_percent_with_the_totals_that_happened(
    checkpoint: Path, tmp_path: Path, processes: int, samples: int, options: list[str], variables: dict[str, str]
) -> None:
    """Accumulation 3 over epochs of 7 micro-batches, which neither samples nor groups divide. The ETA is judged by
    the job's own clock; benchmarks/progress_eta.py judges it by the machine's."""
    results = jobs.run(
        checkpoint, tmp_path / "out", tmp_path / "logs", *options, *OPTIONS, "--samples", str(samples),
        processes=processes, variables=variables, features=FEATURE + (",diffsynth.model_split" if variables else ""),
    )  # fmt: skip
    run = run_folder(tmp_path / "logs", tmp_path / "out")
    found = assert_finished_at(run, micro=14, optimizer=6)
    assert found["processes"] == processes
    assert [gpu["rank"] for gpu in found["gpus"]] == list(range(processes))
    for rank, result in enumerate(results):
        assert (result["micro"], result["optimizer"]) == (14, 6)
        records = lines(next(run.glob(f"rank-{rank:05d}.*.jsonl")))
        printed = [json.loads(line)["own loss"] for line in result["output"].splitlines() if '{"own' in line]
        assert [record["loss"] for record in records if "event" not in record] == pytest.approx(printed)


def assert_finished_at(run: Path, micro: int, optimizer: int) -> dict[str, Any]:
    """The run's status says it made these steps and all of them, and its ETA at half-way was right."""
    found = status.of_folder(folder_of(run.parent), Patience())[0]
    assert (found["state"], found["progress_percent"]) == ("finished", 100)
    assert (found["current_step"], found["total_steps"]) == (micro, micro)
    assert (found["optimizer_step"], found["total_optimizer_steps"]) == (optimizer, optimizer)
    eta, took = jobs.eta_at_half(run)
    assert took > 2 * progress_job.SAVE_S + micro / 2 * 0.5
    assert eta == pytest.approx(took, rel=0.1)
    return found


class Job:
    """The same job in this process: quick, for everything that needs no second one."""

    def __init__(self, checkpoint: Path, output: Path) -> None:
        files = wan_checkpoint.CheckpointFiles(checkpoint)
        self.module = progress_job.Training(files, torch.device("cpu"), rank=2, checkpointing=False)
        self.output = output

    def train(
        self, samples: int = 3, accumulation: int = 2, nan_at: int = 0, seconds: float = 0.0, clock: Any = time,
        **options: Any,
    ) -> None:  # fmt: skip
        from diffsynth.diffusion import runner

        accelerator = Accelerator(gradient_accumulation_steps=accumulation)
        logger = ModelLogger(str(self.output), remove_prefix_in_ckpt="pipe.dit.")
        dataset = progress_job.SlowClips(samples, seconds, nan_at, clock)
        runner.launch_training_task(accelerator, dataset, self.module, logger, num_workers=0, **options)

    def records(self) -> list[dict[str, Any]]:
        logs = list(run_folder(self.output / "training_logs", self.output).glob("*.jsonl"))
        assert len(logs) == 1
        return lines(logs[0])


@pytest.fixture
def job(checkpoint: Path, tmp_path: Path) -> Job:
    return Job(checkpoint, tmp_path / "lora")


@pytest.mark.slow
def test_one_process_ends_at_100_percent_with_the_totals_that_happened(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanshim.activate(f"none,{FEATURE}")
    clock = progress_job.Clock()
    optimizer_steps = progress_job.instrument(clock, monkeypatch.setattr)
    job.train(samples=7, accumulation=3, seconds=0.5, clock=clock, num_epochs=2, save_steps=4)
    assert len(optimizer_steps) == 6
    assert_finished_at(run_folder(job.output / "training_logs", job.output), micro=14, optimizer=6)


@pytest.mark.sweep
@pytest.mark.slow
def test_step_that_saves_a_checkpoint_is_not_longer_for_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Accelerator.save
    monkeypatch.setattr(Accelerator, "save", lambda *a, **k: (time.sleep(1.5), save(*a, **k))[1])
    wanshim.activate(f"none,{FEATURE}")
    job.train(samples=5, save_steps=2)
    saved = [r for r in job.records() if r.get("event") == "checkpoint saved"]
    assert [r["step"] for r in saved] == [2, 4, 5]
    assert all(r["seconds"] >= 1.5 for r in saved)
    steps = [r for r in job.records() if "event" not in r]
    assert [r.get("checkpoint_seconds", 0) > 1.4 for r in steps] == [False, False, True, False, True]
    run = json.loads((run_folder(job.output / "training_logs", job.output) / "run.json").read_text())
    assert run["checkpoints"] == 3


@pytest.mark.slow
def test_learning_rate_is_the_one_the_step_was_made_with(job: Job) -> None:
    """ConstantLR gives a third of the rate for its first five optimizer steps."""
    wanshim.activate(f"none,{FEATURE}")
    job.train(samples=12, learning_rate=3e-3)
    rates = [record["lr"] for record in job.records() if "event" not in record]
    assert rates == pytest.approx([1e-3] * 10 + [3e-3] * 2)


@pytest.mark.slow
def test_training_that_fails_is_logged_as_failed_and_raises_what_it_raised(job: Job) -> None:
    from diffsynth.diffusion import runner

    wanshim.activate(f"none,{FEATURE}")
    bar = runner.tqdm
    forward = progress_job.Training.forward

    def fail(self: Any, data: Any, inputs: Any = None) -> Any:
        if len(calls) == 2:
            raise MemoryError("no room")
        calls.append(data)
        return forward(self, data, inputs)

    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_job.Training, "forward", fail)
        with pytest.raises(MemoryError, match="no room"):
            job.train(samples=5)
    assert runner.tqdm is bar
    assert job.records()[-1]["state"] == "failed"
    assert job.records()[-1]["error"] == "MemoryError: no room"
    run = status.of_folder(folder_of(job.output / "training_logs"), Patience())[0]
    assert run["state"] == "failed"
    assert run["current_step"] == 2


@pytest.mark.slow
def test_second_attempt_continues_the_log(job: Job) -> None:
    wanshim.activate(f"none,{FEATURE}")
    job.train()
    job.train()
    assert [r["event"] for r in job.records() if r.get("event") in ("start", "end")] == ["start", "end"] * 2
    run = status.of_folder(folder_of(job.output / "training_logs"), Patience())[0]
    assert (run["attempt"], run["current_step"], run["progress_percent"]) == (2, 3, 100)


@pytest.mark.slow
def test_nan_loss_is_logged_and_seen(job: Job) -> None:
    wanshim.activate(f"none,{FEATURE}")
    job.train(samples=3, nan_at=3)
    assert [r["loss"] for r in job.records() if "event" not in r][-1] == "nan"
    run = status.of_folder(folder_of(job.output / "training_logs"), Patience())[0]
    assert [problem["kind"] for problem in run["problems"]] == ["nan"]


@pytest.mark.sweep
@pytest.mark.slow
def test_log_that_cannot_be_opened_does_not_stop_training(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WANSHIM_PROGRESS_DIR", str(tmp_path / "file"))
    wanshim.activate(f"none,{FEATURE}")
    job.train()
    assert (job.output / "epoch-0.safetensors").is_file()
    row = wanshim.report().row(FEATURE)
    assert (row.state, row.calls) == ("ineffective", 1)
    assert "not recorded: " in next(iter(row.fallbacks))


@pytest.mark.sweep
@pytest.mark.slow
def test_off_leaves_runner_and_logger_as_they_are(job: Job) -> None:
    from diffsynth.diffusion import logger, runner

    places = [(runner, "launch_training_task"), (runner, "tqdm")]
    places += [(logger.ModelLogger, name) for name in ("on_step_end", "on_epoch_end", "save_model")]
    before = [vars(owner)[name] for owner, name in places]
    wanshim.activate("none,diffsynth.progress,diffsynth.model_split")
    assert [vars(owner)[name] is old for (owner, name), old in zip(places, before)] == [False, True, *[False] * 3]
    wanshim.activate("none,diffsynth.progress")  # the split goes from under it
    wanshim.deactivate()
    assert all(vars(owner)[name] is old for (owner, name), old in zip(places, before))
    job.train()
    assert not (job.output / "training_logs").exists()
