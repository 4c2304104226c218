"""Facts of a training run come from what its module gives the pipeline, not from the arguments of its script."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import runner

import wanshim
from tests.contract.diffsynth import video_job
from tests.contract.diffsynth.training import FEATURE, Logger, Samples, Training
from wanshim.adapters.diffsynth.splitting import facts as run_facts
from wanshim.adapters.diffsynth.training_road import RunFacts, TrainingCall
from wanshim.core.strategy import Video
from wanshim.core.streaming import stream_of
from wanshim.errors import FeatureUnavailable, PlacementInvalid, WanshimError

DEFAULTS = {"height": None, "width": None, "max_pixels": 1024 * 1024, "num_frames": 81}  # of DiffSynth's parser


class Sized(Samples):
    """Samples that say how many latent frames they have."""

    def __init__(self, *frames: int) -> None:
        super().__init__(len(frames))
        self.frames = frames

    def __getitem__(self, index: int) -> dict[str, Any]:
        torch.rand(())  # a draw of the dataset's
        return {"number": index, "frames": self.frames[index]}


class Sizes(Training):
    """A module whose forward has the sample's size.

    Args:
        checkpointing: what it passes on, whatever the script says.
    """

    def __init__(self, checkpointing: bool = True, offload: bool = False) -> None:
        super().__init__()
        for name, value in (
            ("height_division_factor", 16), ("width_division_factor", 16), ("time_division_factor", 4),
        ):  # fmt: skip
            setattr(self.pipe, name, value)
        self.checkpointing, self.offload = checkpointing, offload

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        from diffsynth.diffusion import FlowMatchSFTLoss

        made = self.inputs(data["number"])
        latents = made["latents"].repeat_interleave(data["frames"], 2)[:, :, : data["frames"]]
        loss: torch.Tensor = FlowMatchSFTLoss(
            self.pipe, input_latents=latents, context=made["context"],
            use_gradient_checkpointing=self.checkpointing, use_gradient_checkpointing_offload=self.offload,
        )  # fmt: skip
        self.seen.append(data["number"])
        return loss


def call_of(module: Training, dataset: Any, **script: Any) -> TrainingCall:
    return TrainingCall(
        accelerator=Accelerator(), model=module, logger=None, dataset=dataset, options={}, script=Namespace(**script)
    )


def train(folder: Path, module: Training, dataset: Any, **script: Any) -> Training:
    torch.manual_seed(11)
    runner.launch_training_task(
        Accelerator(), dataset, module, Logger(folder), args=Namespace(**DEFAULTS | video_job.REST | script)
    )
    return module


def notes() -> str:
    return "\n".join(wanshim.report(strict=False).row(FEATURE).notes)


def planned(monkeypatch: pytest.MonkeyPatch, plan: str = "auto", limit: int | None = None) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", plan)
    if limit is not None:
        video_job.limit(monkeypatch, limit)
    wanshim.activate(f"none,{FEATURE}")


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("passed", [False, True])
def test_what_the_module_passes_on_decides_whatever_the_flag_says(passed: bool, flag: bool) -> None:
    call = call_of(Sizes(passed), Sized(3), use_gradient_checkpointing=flag, **DEFAULTS)
    assert run_facts.read_facts(call).checkpointing is passed


def test_offload_that_the_module_forces_is_seen() -> None:
    facts = run_facts.read_facts(call_of(Sizes(False, offload=True), Sized(3), **DEFAULTS))
    assert (facts.checkpointing, facts.offloading) == (True, True)


def test_attribute_that_a_script_sets_after_construction_counts_where_no_sample_can_be_looked_at() -> None:
    module = Sizes()
    module.use_gradient_checkpointing = False
    facts = run_facts.read_facts(call_of(module, None, use_gradient_checkpointing=True, **DEFAULTS))
    assert not facts.checkpointing
    assert facts.video == Video(frames=21, tokens_per_frame=4096, stride=4)
    assert "sizes are assumed: 86016 tokens" in facts.sizes
    assert "default" in facts.sizes


def test_the_largest_of_the_samples_that_were_looked_at_counts() -> None:
    facts = run_facts.read_facts(call_of(Sizes(), Sized(1, 1, 5, 1), **DEFAULTS))
    assert facts == RunFacts(
        checkpointing=True, offloading=False, video=Video(frames=5, tokens_per_frame=16, stride=4), samples=4
    )


def test_a_large_dataset_is_looked_at_in_a_few_places() -> None:
    facts = run_facts.read_facts(call_of(Sizes(), Sized(*[1] * 9_999, 3), **DEFAULTS))
    assert (facts.samples, facts.video and facts.video.frames) == (run_facts.SAMPLES, 3)


def test_looking_at_samples_changes_nothing_of_the_run() -> None:
    module, dataset = Sizes(), Sized(1, 2)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run_facts.read_facts(call_of(module, dataset, **DEFAULTS))
    assert torch.equal(torch.get_rng_state(), before)
    assert not module.seen
    assert "unit_runner" not in vars(module.pipe)


def test_images_are_not_planned_as_the_parser_s_81_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, limit=2 << 20)
    module = train(tmp_path, Sizes(), Sized(1, 1), use_gradient_checkpointing=False)
    assert stream_of(module.pipe.dit) is None
    assert "plan: resident" in notes()
    assert "assumed" not in notes()


def test_streaming_works_where_the_module_checkpoints_against_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, "stream")
    module = train(tmp_path, Sizes(), Sized(1, 1), use_gradient_checkpointing=False)
    assert stream_of(module.pipe.dit) is not None


def test_streaming_is_refused_where_the_module_does_not_checkpoint_in_spite_of_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, "stream")
    with pytest.raises(FeatureUnavailable, match="backward needs each block's weights again"):
        train(tmp_path, Sizes(False), Sized(1, 1), use_gradient_checkpointing=True)


def test_blocks_that_ignore_what_is_passed_end_a_streamed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Sizes()
    model_fn = module.pipe.model_fn
    module.pipe.model_fn = lambda *args, **given: model_fn(*args, **given | {"use_gradient_checkpointing": False})
    planned(monkeypatch, "stream")
    with pytest.raises(WanshimError, match="ran with gradients and without checkpointing"):
        train(tmp_path, module, Sized(1, 1), use_gradient_checkpointing=True)


@pytest.mark.slow
def test_a_larger_sample_is_planned_for_when_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 samples 8 are looked at; the large one is not among them."""
    frames = [1] * 40
    frames[1] = 9
    planned(monkeypatch, limit=2 << 20)
    train(tmp_path, Sizes(), Sized(*frames))
    assert "planned again for 144 tokens with activations recomputed, after 16 tokens" in notes()


@pytest.mark.slow
def test_a_sample_that_does_not_fit_ends_the_run_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [1] * 40
    frames[1] = 41
    planned(monkeypatch, limit=2 << 20)
    with pytest.raises(PlacementInvalid, match=r"a forward of 656 tokens .* does not fit the plan, .* 16 tokens"):
        train(tmp_path, Sizes(), Sized(*frames))


def test_job_whose_parameters_another_places_is_not_predicted_and_goes_on_whatever_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has a shard of what would be counted. FSDP's mark on accelerate's state is what is read: it comes up
    on GPUs alone."""
    monkeypatch.setitem(vars(Accelerator().state), "fsdp_plugin", object())
    monkeypatch.setattr(run_facts, "_look_at_samples", lambda call: [])  # the first sample is another than is assumed
    planned(monkeypatch, limit=1 << 10)
    module = train(tmp_path, Sizes(), Sized(1, 1))
    assert len(module.seen) == 2
    assert "not planned: FSDP places the parameters itself" in notes()
    assert "peak not predicted: FSDP places the parameters itself" in notes()


@pytest.mark.slow
def test_a_plan_on_assumed_sizes_says_so_and_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_facts, "_look_at_samples", lambda call: [])
    planned(monkeypatch, limit=2 << 30)
    train(tmp_path, Sizes(), Sized(1, 1))
    assert "sizes are assumed: 86016 tokens" in notes()
    assert "planned again for 16 tokens with activations recomputed, after 86016 tokens (assumed)" in notes()
    assert "the plan stays" in notes()
