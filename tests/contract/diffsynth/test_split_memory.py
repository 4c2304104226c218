"""A split Wan DiT's room under `launch_training_task`: predicted and told, chunked where needed, refused in time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffsynth.models import wan_video_dit

import wanshim
from tests.contract.diffsynth import wan
from tests.contract.diffsynth.training import FEATURE
from tests.contract.diffsynth.video_job import limit, predicted_bytes, train
from wanshim.adapters.diffsynth.splitting import job, micro_batch
from wanshim.adapters.diffsynth.splitting import launch as split_launch
from wanshim.adapters.diffsynth.splitting.wan import FAMILY
from wanshim.adapters.diffsynth.training_road import Row, Run, Step
from wanshim.errors import PlacementInvalid
from wanshim.undo import Undo


def notes() -> str:
    return "\n".join(wanshim.report(strict=False).row(FEATURE).notes)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("split")
def test_peak_is_predicted_and_told_and_nothing_is_chunked_where_it_fits(tmp_path: Path) -> None:
    expected, _ = train(tmp_path / "unsplit")
    wanshim.activate(f"none,{FEATURE}")
    found, _ = train(tmp_path / "split")
    assert found == expected
    assert "predicted peak for 48 tokens: cpu: " in notes()
    assert "in chunks of" not in notes()


@pytest.mark.slow
def test_chunks_asked_for_train_and_are_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: None
) -> None:
    rope, calls = wan_video_dit.rope_apply, []
    in_chunks = micro_batch.chunk_rope
    monkeypatch.setattr(micro_batch, "chunk_rope", lambda *a: (calls.append(a[0]), in_chunks(*a))[1])
    monkeypatch.setenv("WANSHIM_CHUNK", "17")
    wanshim.activate(f"none,{FEATURE}")
    _, module = train(tmp_path)
    assert len(calls) == 3  # traced for a whole sample and for one rank's share, then put in
    assert set(calls) == {17}
    assert "in chunks of 17 tokens" in notes()
    assert wan_video_dit.rope_apply is rope
    assert not [m for m in module.pipe.dit.blocks.modules() if "forward" in vars(m)]


@pytest.mark.slow
def test_other_plans_are_weighed_with_blocks_that_have_no_chunks_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: None
) -> None:
    replaced: list[bool] = []

    def watch(run: Run, row: Row) -> None:
        assert len(run.plan.alternatives) == 4
        replaced.append(any("forward" in vars(module) for module in run.call.dit.blocks.modules()))

    monkeypatch.setattr(split_launch, "STEPS", (Step(apply=watch), *split_launch.STEPS))
    monkeypatch.setenv("WANSHIM_CHUNK", "17")
    wanshim.activate(f"none,{FEATURE}")
    train(tmp_path)
    assert "in chunks of 17 tokens" in notes()
    assert replaced == [False]


@pytest.mark.slow
def test_step_that_fits_only_in_chunks_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: None) -> None:
    monkeypatch.setattr(job, "CHUNK_TOKENS", 16)
    wanshim.activate(f"none,{FEATURE}")
    whole = predicted_bytes(tmp_path, monkeypatch, None)
    chunked = predicted_bytes(tmp_path, monkeypatch, 16)
    assert chunked < whole
    wanshim.deactivate()  # the notes so far are those of the runs above
    wanshim.activate(f"none,{FEATURE}")
    limit(monkeypatch, (chunked + whole) // 2)
    train(tmp_path / "chunked")
    assert "in chunks of 16 tokens" in notes()


def test_step_that_cannot_fit_is_refused_before_the_first_step_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: None
) -> None:
    wanshim.activate(f"none,{FEATURE}")
    limit(monkeypatch, 1000)
    with pytest.raises(PlacementInvalid, match=r"does not fit: cpu would need .* of 0.00 MiB"):
        train(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_fewer_frames_are_proposed_where_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: None) -> None:
    monkeypatch.setenv("WANSHIM_CHUNK", "off")
    monkeypatch.setenv("WANSHIM_OFFLOAD", "off")
    wanshim.activate(f"none,{FEATURE}")
    whole = predicted_bytes(tmp_path, monkeypatch, None)
    limit(monkeypatch, whole - 1)
    with pytest.raises(PlacementInvalid) as caught:
        train(tmp_path / "refused")
    assert "fewer frames: --num_frames 5 (cpu" in str(caught.value)
    assert "WANSHIM_CHUNK=auto" not in str(caught.value)  # 48 tokens are less than a chunk: no gain


def test_chunked_model_gives_the_loss_and_nearly_the_gradients_of_the_whole() -> None:
    expected = wan.train_step(wan.lora_model(), "t2v", "cpu", torch.float32, use_gradient_checkpointing=True)
    model = wan.lora_model()
    with Undo() as undo:
        for block in model.blocks:
            micro_batch.chunk_block(block, 5, undo, FAMILY.chunked)
        micro_batch.chunk_rope(5, undo)
        found = wan.train_step(model, "t2v", "cpu", torch.float32, use_gradient_checkpointing=True)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_norms_and_rotary_embedding_in_chunks_give_the_bits_of_the_whole() -> None:
    expected = wan.train_step(
        wan.lora_model(dtype=torch.bfloat16), "t2v", "cpu", torch.bfloat16, use_gradient_checkpointing=True
    )
    model = wan.lora_model(dtype=torch.bfloat16)
    with Undo() as undo:
        for block in model.blocks:
            micro_batch.chunk_block(block, 5, undo, FAMILY.chunked[:-1])
        micro_batch.chunk_rope(5, undo)
        found = wan.train_step(model, "t2v", "cpu", torch.bfloat16, use_gradient_checkpointing=True)
    assert all(map(torch.equal, expected, found))
