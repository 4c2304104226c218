"""A Wan2.2 pair of experts: both are split for inference; the one that is not trained waits on the host."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import wanshim
from tests.contract.diffsynth import training, wan
from wanshim.adapters.diffsynth.splitting.wan import FAMILY
from wanshim.core.model_split import split_of
from wanshim.demo import wan_checkpoint
from wanshim.errors import FeatureUnavailable

FEATURE = "diffsynth.model_split"


class PairTraining(training.Training):
    """With the second expert, and what the loss saw of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.pipe.dit2 = wan.wan_model("t2v").requires_grad_(False)
        self.pipe.vace2 = None
        self.beside: list[Any] = []

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        self.beside.append(self.pipe.dit2)
        return super().forward(data, inputs)


def train(module: PairTraining, folder: Path, accumulation: int) -> dict[str, bytes]:
    from diffsynth.diffusion import runner

    torch.manual_seed(11)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    runner.launch_training_task(
        accelerator,
        training.Samples(),
        module,
        training.Logger(folder),
        learning_rate=1e-2,
        num_workers=0,
        num_epochs=1,
    )
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "accumulation", "split_before"),
    [
        *((2, 1, True), (3, 3, False)),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in ((2, 1, False), (3, 3, True), (4, 1, False), (4, 1, True))
        ),
    ],
)
def test_training_one_expert_writes_the_files_of_unsplit_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int, accumulation: int, split_before: bool
) -> None:
    expected = train(PairTraining(), tmp_path / "unsplit", accumulation)
    monkeypatch.setenv("WANSHIM_DEVICES", ",".join(["cpu"] * stages))
    wanshim.activate(f"none,{FEATURE}")
    module = PairTraining()
    second = module.pipe.dit2
    if split_before:  # as from_pretrained does
        FAMILY.split(module.pipe, ("cpu",) * stages)
        FAMILY.split(FAMILY.second_of(module.pipe), ("cpu",) * stages)
    assert train(module, tmp_path / "split", accumulation) == expected
    assert len(expected) == 1
    assert len(split_of(module.pipe.dit).plan.stages) == stages
    assert set(module.beside) == {None}  # neither loss, optimizer nor DDP meets it
    assert module.pipe.dit2 is second  # it is back
    assert split_of(second) is None
    assert {p.device.type for p in second.parameters()} == {"cpu"}
    assert any("dit2 is not trained and waits on the CPU" in note for note in wanshim.report().row(FEATURE).notes)


@pytest.mark.parametrize("both", [False, True])
def test_training_the_second_expert_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both: bool
) -> None:
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.activate(f"none,{FEATURE}")
    module = PairTraining()
    module.pipe.dit2.requires_grad_(True)
    if not both:
        module.pipe.dit.requires_grad_(False)
    with pytest.raises(FeatureUnavailable, match="dit2 is to be trained"):
        train(module, tmp_path, 1)
    assert split_of(module.pipe.dit) is None
    assert module.pipe.dit2 is not None


@pytest.fixture
def files(tmp_path: Path) -> tuple[wan_checkpoint.CheckpointFiles, Path]:
    made = wan_checkpoint.write(tmp_path / "checkpoint")
    wan_checkpoint.register(made)
    other = wan_checkpoint.write(tmp_path / "other", seed=9)
    return made, Path(shutil.copy(other.dit, made.folder / "low_noise.safetensors"))


def load(files: tuple[wan_checkpoint.CheckpointFiles, Path]) -> Any:
    from diffsynth.core import ModelConfig
    from diffsynth.pipelines import wan_video

    first, second = files
    return wan_video.WanVideoPipeline.from_pretrained(
        torch_dtype=torch.bfloat16,
        device="cpu",
        model_configs=[ModelConfig(path=str(path)) for path in (*first.models, second)],
        tokenizer_config=ModelConfig(path=str(first.tokenizer)),
        redirect_common_files=False,
    )


def video(pipe: Any) -> list[bytes]:
    frames = pipe(
        prompt="a clip", seed=1, height=32, width=48, num_frames=5, num_inference_steps=4, tiled=False, cfg_scale=1.0,
        switch_DiT_boundary=0.9,
    )  # fmt: skip
    return [frame.tobytes() for frame in frames]


@pytest.mark.slow
def test_inference_with_both_experts_split_gives_the_unsplit_video(
    files: tuple[wan_checkpoint.CheckpointFiles, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = video(load(files))
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    pipe = load(files)
    assert split_of(pipe.dit2).plan.split_at == split_of(pipe.dit).plan.split_at
    ran = dict.fromkeys(("dit", "dit2"), 0)
    for name in ran:
        getattr(pipe, name).blocks[0].register_forward_pre_hook(lambda *_, name=name: ran.update({name: ran[name] + 1}))
    assert video(pipe) == expected
    assert all(ran.values())


@pytest.mark.slow
def test_second_expert_that_does_not_fit_stays_on_the_host_and_says_so(
    files: tuple[wan_checkpoint.CheckpointFiles, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from wanshim.core.model_split import SplitHandle

    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    move, moved = SplitHandle.move, []

    def move_the_first(handle: SplitHandle, module: torch.nn.Module, device: torch.device) -> None:
        if moved and moved[0] is not handle:
            raise torch.OutOfMemoryError("no memory left for a second one")
        moved.append(handle)
        move(handle, module, device)

    monkeypatch.setattr(SplitHandle, "move", move_the_first)
    pipe = load(files)
    assert split_of(pipe.dit) is not None
    assert split_of(pipe.dit2) is None
    assert any("second expert stays on the host" in note for note in wanshim.report().row(FEATURE).notes)
