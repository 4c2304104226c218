"""A small transformer and a loop with guidance, of torch alone: its workers start sooner than those of a framework."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wanshim.core.generation import Forward, PipelineBinding
from wanshim.core.sequence import BlockList

HEADS, DIM = 5, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(HEADS * DIM, HEADS * DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.does = Attention(), ""
        self.home = os.getpid()

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.home:
            FAULTS[self.does]()
        return x + self.attention(x).tanh() * prompt


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, *, x: torch.Tensor, prompt: torch.Tensor) -> tuple[torch.Tensor]:
        for block in self.blocks:
            x = block(x, prompt)
        return (x,)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, Callable[[], object]] = {
    "": lambda: None,
    "raises": out_of_memory,
    "ends": end,
    "stops": stop,
    "sleeps": lambda: time.sleep(600),
}


def blocks_of(model: Model, *_: object, **__: object) -> list[BlockList]:
    return [
        BlockList(
            blocks=list(model.blocks),
            output="attention.out",
            projections=("attention.q", "attention.k", "attention.v"),
            num_heads=("attention.heads",),
            per_token={"x": {3: 1}},
            whole=(),
        )
    ]


def bind(model: Model, guided: bool = True) -> PipelineBinding:
    forward = Forward(
        owner=model,
        attribute="forward",
        function=model,
        modules={"model": model},
        empty=lambda **given: (torch.empty_like(given["x"]),),
        same="x",
        blocks=blocks_of,
    )
    return PipelineBinding(name="Toy", forwards=(forward,), is_guided=lambda: guided, heads=HEADS)


def generate(model: Model, tokens: int, batch: int = 1, guided: bool = True, **_: Any) -> torch.Tensor:
    """Three steps, (batch, tokens, width)."""
    seeded = torch.Generator().manual_seed(tokens)
    x = torch.randn(batch, tokens, HEADS * DIM, generator=seeded)
    prompts = [torch.randn(1, 1, HEADS * DIM, generator=seeded) for _ in range(2)]
    with torch.no_grad():
        for _ in range(3):
            (wanted,) = model(x=x, prompt=prompts[0])
            if guided:
                (other,) = model(x=x, prompt=prompts[1])
                wanted = other + 2.0 * (wanted - other)
            x = x - 0.3 * wanted
    return x
