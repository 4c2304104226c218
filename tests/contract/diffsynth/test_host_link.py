"""Checkpoint offload and streamed weights with DiffSynth's own model function: gradients bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.contract.diffsynth import wan
from tests.contract.diffsynth.stages import stage_devices
from wanshim.core.model_split import split_model
from wanshim.core.offload import CheckpointOffload
from wanshim.core.streaming import stream_model

pytestmark = pytest.mark.slow  # real modules over several steps; `make matrix` runs it

OFFLOAD = {"use_gradient_checkpointing": True, "use_gradient_checkpointing_offload": True}


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_offload_in_place_of_save_on_cpu_gives_its_gradients(
    kind: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = wan.train_step(wan.lora_model(kind), kind, "cpu", torch.float32, **OFFLOAD)
    model, offload = wan.lora_model(kind), CheckpointOffload(min_bytes=0)
    if stages > 1:
        split_model(model, stage_devices("cpu", stages))
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", offload.saving)
    found = wan.train_step(model, kind, "cpu", torch.float32, **OFFLOAD)
    assert all(map(torch.equal, expected, found))
    assert offload.count.shared >= 2 * 2 * (len(model.blocks) - 1)  # context and t_mod at least, in both micro-batches
    assert offload.count.sent <= 2 * (len(model.blocks) + 3)


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_streamed_wan_gives_the_resident_gradients(kind: str) -> None:
    options = {"use_gradient_checkpointing": True}
    expected = wan.train_step(wan.lora_model(kind), kind, "cpu", torch.float32, **options)
    model = wan.lora_model(kind)
    handle = stream_model(model, "cpu", blocks="blocks", count=4)
    assert all(map(torch.equal, expected, wan.train_step(model, kind, "cpu", torch.float32, **options)))
    assert handle.ring.count.loads > 4
