"""Accumulated micro-batches: DiffSynth's own loses all but the last, and every one counts with the repair.

Where the installed release has a right loop, one test holds it to that, and for the others the fault is put into it:
see `faulty_loop`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import runner
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

import wanshim
from tests.contract.diffsynth import ddp_jobs, ddp_worker
from tests.contract.diffsynth.faulty_loop import Tensors, install_faulty_loop, source_with, train_by_hand
from tests.contract.diffsynth.training import FEATURE as SPLIT
from tests.contract.diffsynth.training import Logger, Samples, Training
from wanshim.adapters.diffsynth import FRAMEWORK
from wanshim.adapters.diffsynth.gradient_accumulation import FEATURE
from wanshim.adapters.diffsynth.training_road import LAUNCHER
from wanshim.core.pipeline import Pipeline
from wanshim.patching import SourceTree
from wanshim.patching.verdict import Verdict
from wanshim.select.decision import decide
from wanshim.select.matrix import load
from wanshim.settings import Settings

NAME = FEATURE.name
PROGRESS = "diffsynth.progress"
HAS_FAULT = decide(FEATURE, FRAMEWORK, load(), Settings()).verdict is Verdict.PATCH
SAMPLES = 7  # neither 2 nor 4 divides it: the last step of an epoch is a partial one


def sweep(value: Any) -> Any:
    """Left to `make matrix`."""
    return pytest.param(value, marks=pytest.mark.sweep)


@pytest.fixture
def own_loop() -> None:
    """The installed release's loop, whatever it is."""


@pytest.fixture(autouse=True)
def _faulty_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_FAULT and "own_loop" not in request.fixturenames:
        install_faulty_loop(monkeypatch)


@pytest.fixture
def steps() -> Iterator[list[Tensors]]:
    """The gradients that each step of an optimizer sees."""
    seen: list[Tensors] = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append([p.grad.cpu().clone() for p in parameters])

    handle = register_optimizer_step_pre_hook(note)
    yield seen
    handle.remove()


def module_of(seed: int = 11, **kwargs: Any) -> Training:
    torch.manual_seed(seed)
    return Training(own_draws=True, **kwargs)


def launch(folder: Path, module: Training, accelerator: Accelerator, epochs: int = 2) -> dict[str, bytes]:
    """The files that DiffSynth's task leaves: a LoRA every second micro-batch."""
    torch.manual_seed(5)  # the order of the samples
    logger = Logger(folder)
    try:
        runner.launch_training_task(
            accelerator, Samples(SAMPLES), module, logger,
            learning_rate=1e-2, num_workers=0, save_steps=2, num_epochs=epochs,
        )  # fmt: skip
    finally:
        assert not {"prepare", "accumulate"} & vars(accelerator).keys()
        assert not [o for o in accelerator._optimizers if "zero_grad" in vars(o)]
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


def train(folder: Path, accumulation: int) -> dict[str, bytes]:
    return launch(folder, module_of(), Accelerator(gradient_accumulation_steps=accumulation))


@cache
def unsplit(accumulation: int) -> dict[str, bytes]:
    """The files of a run that the feature alone has repaired."""
    wanshim.activate(f"none,{NAME}")
    with TemporaryDirectory() as folder:
        return train(Path(folder), accumulation)


def in_steps(seen: list[int], accumulation: int) -> list[list[int]]:
    """The samples of each step; an epoch's last step takes what is left."""
    epochs = [seen[i : i + SAMPLES] for i in range(0, len(seen), SAMPLES)]
    return [epoch[i : i + accumulation] for epoch in epochs for i in range(0, SAMPLES, accumulation)]


def assert_same(found: list[Tensors], expected: list[Tensors]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert all(map(torch.equal, one, other))


def notes(name: str = NAME) -> tuple[str, ...]:
    return tuple(wanshim.report().row(name).notes)


@pytest.mark.slow
@pytest.mark.skipif(HAS_FAULT, reason="the installed release has the fault")
@pytest.mark.usefixtures("own_loop")
@pytest.mark.parametrize("accumulation", [2, 4, sweep(7)])
def test_release_that_is_native_counts_every_micro_batch_by_itself(
    tmp_path: Path, steps: list[Tensors], accumulation: int
) -> None:
    wanshim.activate(f"none,{NAME}")
    module = module_of()
    launch(tmp_path, module, Accelerator(gradient_accumulation_steps=accumulation))
    found = list(steps)
    assert_same(found, train_by_hand(module_of(), in_steps(module.seen, accumulation), accumulation))
    assert wanshim.report().row(NAME).state == "native"
    assert not hasattr(runner.launch_training_task, "__wanshim_state__")


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [2, sweep(4)])
def test_accumulation_without_the_feature_steps_on_the_last_micro_batch_alone(
    tmp_path: Path, steps: list[Tensors], accumulation: int
) -> None:
    """What a user gets of 2.0.0 to 2.0.9: the day this fails there, the feature can go."""
    wanshim.activate("none")
    module = module_of()
    launch(tmp_path, module, Accelerator(gradient_accumulation_steps=accumulation))
    lasts = [group[-1:] for group in in_steps(module.seen, accumulation)]
    found = list(steps)
    assert_same(found, train_by_hand(module_of(), lasts, accumulation))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [4, sweep(2), sweep(3), sweep(7)])
def test_accumulation_gives_the_gradients_and_lora_of_a_right_loop_by_hand(
    tmp_path: Path, steps: list[Tensors], accumulation: int
) -> None:
    """Two epochs, enough for the learning rate to change; the same bits in every step and in the file."""
    wanshim.activate(f"none,{NAME}")
    module, by_hand = module_of(), module_of()
    files = launch(tmp_path, module, Accelerator(gradient_accumulation_steps=accumulation))
    found = list(steps)
    assert_same(found, train_by_hand(by_hand, in_steps(module.seen, accumulation), accumulation))
    assert len(files) == SAMPLES
    saved = load_file(tmp_path / "step-14.safetensors")
    expected = {name: p for name, p in by_hand.named_parameters() if p.requires_grad}
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert notes() == (
        f"{accumulation} micro-batches make a step, and every one counts: without this the last alone would",
    )
    assert wanshim.report().row(NAME).state == "exercised"


@pytest.mark.sweep
@pytest.mark.slow
def test_accumulation_of_one_leaves_every_byte_and_the_optimizer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanshim.activate("none")
    expected = train(tmp_path / "without", 1)
    wanshim.activate(f"none,{NAME}")
    monkeypatch.setattr("wanshim.adapters.diffsynth.gradient_accumulation.keep_until_the_step", None)
    assert train(tmp_path / "with", 1) == expected
    assert wanshim.report().row(NAME).state == "applied"
    assert wanshim.report().row(NAME).calls == 0


@pytest.mark.slow
def test_gradients_from_before_the_task_and_of_one_that_failed_do_not_leak_into_its_first_step(
    tmp_path: Path, steps: list[Tensors]
) -> None:
    """The second forward fails, between two micro-batches of a step. accelerate counts on from there, so that the
    next task's first step has two."""
    wanshim.activate(f"none,{NAME}")
    accelerator, module = Accelerator(gradient_accumulation_steps=4), module_of(fault=1)
    for parameter in module.trainable_modules():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(torch.OutOfMemoryError):
        launch(tmp_path, module, accelerator, epochs=1)
    assert not steps
    assert all(p.grad is not None for p in module.trainable_modules())
    module.seen.clear()
    module.fault = None
    launch(tmp_path, module, accelerator, epochs=1)
    found, seen = list(steps), module.seen
    assert_same(found, train_by_hand(module_of(), [seen[:2], seen[2:6], seen[6:]], 4))


def test_optimizer_that_the_loop_did_not_prepare_keeps_its_own_zero_grad(tmp_path: Path) -> None:
    wanshim.activate(f"none,{NAME}")
    accelerator = Accelerator(gradient_accumulation_steps=2)
    parameter = torch.nn.Parameter(torch.ones(1))
    outside = accelerator.prepare(torch.optim.SGD([parameter], lr=0.1))
    parameter.grad = torch.ones(1)
    module, taken = module_of(), []
    module.register_forward_pre_hook(lambda *_: taken.append(["zero_grad" in vars(o) for o in accelerator._optimizers]))
    launch(tmp_path, module, accelerator, epochs=1)
    assert taken == [[False, True]] * SAMPLES
    assert torch.equal(parameter.grad, torch.ones(1))
    outside.zero_grad(set_to_none=False)
    assert torch.equal(parameter.grad, torch.zeros(1))


@pytest.mark.parametrize("set_to_none", [None, True, False])
def test_gradients_are_cleared_as_the_loop_asks(set_to_none: bool | None) -> None:
    from wanshim.adapters.diffsynth.gradient_accumulation import GradientsOfOneStep

    accelerator = Accelerator(gradient_accumulation_steps=2)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=0.1))
    parameter.grad = torch.ones(1)
    with accelerator.accumulate():
        GradientsOfOneStep(accelerator, optimizer).zero_grad(
            **{} if set_to_none is None else {"set_to_none": set_to_none}
        )
    assert parameter.grad is None if set_to_none is not False else not parameter.grad.any()


def activate_in_turn(*names: str) -> Callable[[], None]:
    """The features one after the other: each later one lies around those before it."""

    def activate() -> None:
        for last in range(len(names)):
            wanshim.activate("none," + ",".join(names[: last + 1]))

    return activate


@pytest.mark.slow
@pytest.mark.parametrize("order", [sweep((NAME, SPLIT)), (SPLIT, NAME)], ids=["split outside", "split inside"])
@pytest.mark.parametrize("pipeline", ["1", sweep("0")], ids=["pipeline", "serial"])
def test_accumulation_over_a_split_writes_the_files_of_the_unsplit_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str], pipeline: str
) -> None:
    """In pipeline, the micro-batches of a step are joined once, before its optimizer step."""
    expected = unsplit(4)
    joined, join = [], Pipeline.join
    monkeypatch.setattr(Pipeline, "join", lambda self: (joined.append(self.pending), join(self))[1])
    for name, value in {"WANSHIM_DEVICES": "cpu,cpu", "WANSHIM_PIPELINE": pipeline}.items():
        monkeypatch.setenv(name, value)
    activate_in_turn(*order)()
    assert train(tmp_path / "split", 4) == expected
    assert joined == ([4, 3, 4, 3] if pipeline == "1" else [])
    assert any("4 micro-batches in a pipeline of 2 stages" in note for note in notes(SPLIT)) is (pipeline == "1")


@pytest.mark.slow
@pytest.mark.parametrize("order", [sweep((NAME, PROGRESS, SPLIT)), (PROGRESS, SPLIT, NAME)], ids=["first", "last"])
def test_accumulation_under_progress_and_split_writes_the_same_files_and_every_feature_is_exercised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]
) -> None:
    expected = unsplit(2)
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    monkeypatch.setenv("WANSHIM_PROGRESS_DIR", str(tmp_path / "logs"))
    activate_in_turn(*order)()
    assert train(tmp_path / "all", 2) == expected
    assert all(wanshim.report().row(name).state == "exercised" for name in (NAME, PROGRESS))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_FAULT, reason="the processes run the installed release, and its loop is right")
@pytest.mark.parametrize("variables", [{}, {"WANSHIM_DEVICES": "cpu,cpu,cpu,cpu", "WANSHIM_PIPELINE": "0"}], ids=str)
def test_accumulation_under_ddp_gives_the_gradients_of_one_process_with_the_same_global_batch(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    """Unsplit, and each rank over a serial split; `test_split_ddp` has the pipeline."""
    wanshim.activate(f"none,{NAME}")
    job = ddp_jobs.Job("job", samples=4, accumulation=2, dtype="float32")
    ddp_worker.run(ddp_jobs.in_one_process(job), tmp_path / "alone")
    ddp_jobs.launch(tmp_path / "ranks", [job], **variables)
    ddp_jobs.check_same_step(job, tmp_path / "alone", tmp_path / "ranks", exact=False)


def judged(source: SourceTree) -> Any:
    assert FEATURE.judge is not None
    return FEATURE.judge(source)


def test_judge_tells_the_fault_from_the_right_loop_by_the_source_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty, right = source_with(faulty=True), source_with(faulty=False)
    gone = replace(faulty, _trees={LAUNCHER.split(":")[0]: None})
    assert judged(SourceTree.of_installed("diffsynth")).verdict is (Verdict.PATCH if HAS_FAULT else Verdict.NATIVE)
    assert [judged(source).verdict for source in (faulty, right, gone)] == [
        Verdict.PATCH, Verdict.NATIVE, Verdict.ABSENT,
    ]  # fmt: skip
    for source, rows, verdict in ((faulty, (), Verdict.UNKNOWN), (right, load().rows, Verdict.NATIVE)):
        monkeypatch.setattr(SourceTree, "of_installed", lambda package, source=source: source)
        assert decide(FEATURE, FRAMEWORK, replace(load(), rows=rows), Settings()).verdict is verdict


@pytest.mark.parametrize(
    "loop",
    [
        "optimizer.zero_grad(); accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()",
        "accelerator.backward(loss); optimizer.zero_grad(); optimizer.step()",
        "accelerator.backward(loss); optimizer.step()",
        "optimizer.zero_grad(); loss.backward2(); optimizer.step()",
    ],
)
def test_judge_leaves_a_loop_it_does_not_know_to_the_fingerprints(loop: str) -> None:
    text = f"def launch_training_task():\n with accelerator.accumulate(model):\n  {loop}\n"
    source = replace(SourceTree.of_installed("diffsynth"), _trees={LAUNCHER.split(":")[0]: ast.parse(text)})
    assert judged(source) is None


def test_accumulation_is_a_repair_that_auto_selects() -> None:
    wanshim.activate("auto")
    assert wanshim.report().row(NAME).state in ("applied", "exercised")
