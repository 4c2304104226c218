"""Checkpoint offload and streamed weights over the real link, where a copy in the wrong order is a wrong number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wanshim.core.model_split import split_model
from wanshim.core.offload import CheckpointOffload
from wanshim.core.pipeline import Pipeline
from wanshim.core.streaming import stream_model

BLOCKS, WIDTH, ROWS = 12, 2048, 4096
pytestmark = [pytest.mark.gpu(1), pytest.mark.usefixtures("deterministic_kernels")]
Saving = Callable[[], AbstractContextManager[object]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        for _ in range(4):  # long enough for a copy to be overtaken
            x = x + torch.tanh(self.base(x) + self.up(self.down(x))) * shared
        return x


class Model(nn.Module):
    def __init__(self, saving: Saving = nullcontext) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)
        self.saving = saving

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = torch.sigmoid(x)
        for block in self.blocks:
            with self.saving():
                x = checkpoint(block, x, shared, use_reentrant=False, preserve_rng_state=False)
        return self.head(x).pow(2).mean()


def data(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to("cuda:0", torch.bfloat16)


def gradients(model: Model, steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for seed in range(steps):
        loss = model(data(seed))
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


def on_gpu(saving: Saving = nullcontext) -> Model:
    return Model(saving).to("cuda:0", torch.bfloat16)


def equal(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    return len(expected) == len(found) > BLOCKS and all(map(torch.equal, expected, found))


def test_offload_over_the_link_gives_the_same_gradients() -> None:
    offload = CheckpointOffload()
    assert equal(gradients(on_gpu()), gradients(on_gpu(offload.saving)))
    assert offload.count.sent == 3 * (BLOCKS + 1)
    assert offload.count.ahead > 3 * (BLOCKS - 5)


def test_offload_keeps_few_block_inputs_on_the_device() -> None:
    def peak(saving: Saving) -> int:
        model = on_gpu(saving)
        gradients(model, 1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(model, 1)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    one_input = ROWS * WIDTH * 2
    assert peak(nullcontext) - peak(CheckpointOffload().saving) > (BLOCKS - 6) * one_input


def test_streamed_weights_over_the_link_give_the_same_gradients() -> None:
    expected = gradients(on_gpu())
    for count, slots in ((BLOCKS, 2), (BLOCKS // 2, 2), (BLOCKS, 3)):
        model = on_gpu()
        handle = stream_model(model, "cuda:0", count=count, slots=slots)
        assert equal(expected, gradients(model))
        assert handle.ring.count.late == 1
        handle.remove()
        model.zero_grad()
        assert equal(expected, gradients(model))


def test_streaming_together_with_offload_gives_the_same_gradients() -> None:
    expected, model = gradients(on_gpu()), on_gpu(CheckpointOffload().saving)
    stream_model(model, "cuda:0", count=BLOCKS)
    assert equal(expected, gradients(model))


@pytest.mark.gpu(2)
def test_offload_in_lanes_gives_the_same_gradients() -> None:
    expected = gradients(on_gpu(), 4)
    offload = CheckpointOffload()
    model = on_gpu(offload.saving)
    pipeline = Pipeline(split_model(model, ["cuda:0", "cuda:1"], blocks="blocks", exits=("head",)))
    losses = []
    for seed in range(4):
        inputs = data(seed)
        losses.append(pipeline.submit(partial(model, inputs), inputs))
        pipeline.backward(losses[-1], torch.Tensor.backward)
    pipeline.join()
    found = [loss.wait() for loss in losses] + [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    assert equal(expected, found)
    assert offload.count.sent > 0
