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
from wanshim.core.sequence import BlockList, TextStream

HEADS, DIM = 5, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.early = HEADS, ""  # which projection it reads before the last has run, and how
        self.q, self.k, self.v, self.out = (nn.Linear(HEADS * DIM, HEADS * DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self._read(self.q(x), "q"), self._read(self.k(x), "k")
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (q, k, self.v(x)))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def _read(self, part: torch.Tensor, name: str) -> torch.Tensor:
        if self.early[:1] != name:
            return part
        return nn.functional.layer_norm(part, part.shape[-1:]) if self.early.endswith("normed") else part * 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.does = Attention(), ""
        self.home = os.getpid()
        self.raises_together_in = 0  # the process that does, where it has a part of the tokens

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.home:
            FAULTS[self.does]()
            x = x + (self.does == "differs")
        if os.getpid() == self.raises_together_in and self.attention.heads != HEADS:
            out_of_memory()
        return x + self.attention(x).tanh() * prompt


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, *, x: torch.Tensor, prompt: torch.Tensor) -> tuple[torch.Tensor]:
        for block in self.blocks:
            x = block(x, prompt)
        return (x,)


class JointAttention(nn.Module):
    """Of text and tokens together; an entry of the mask for each token of text."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = HEADS, HEADS * DIM
        self.q, self.k, self.v, self.out = (nn.Linear(self.width, self.width) for _ in range(4))
        self.text_q, self.text_k, self.text_v, self.text_out = (nn.Linear(self.width, self.width) for _ in range(4))

    def forward(self, x: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.cat([mask, mask.new_ones(x.shape[:2])], dim=1)[:, None, None]
        both = zip((self.text_q, self.text_k, self.text_v), (self.q(x), self.k(x), self.v(x)), strict=True)
        joined = (
            torch.cat([part(text), own], dim=1).unflatten(2, (-1, self.width // self.heads)) for part, own in both
        )
        q, k, v = (part.transpose(1, 2) for part in joined)
        done = nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return self.out(done[:, text.size(1) :]), self.text_out(done[:, : text.size(1)])


class JointBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = JointAttention()

    def forward(self, x: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        more, more_text = self.attention(x, text, mask)
        return x + more.tanh(), text + more_text.tanh()


class JointModel(nn.Module):
    """Two streams, as Qwen-Image's transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(JointBlock() for _ in range(3))
        self.exit = nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, *, x: torch.Tensor, prompt: torch.Tensor) -> tuple[torch.Tensor]:
        text = prompt.expand(x.size(0), 3, -1) * torch.arange(1.0, 4.0).view(3, 1)
        mask = torch.tensor([True, True, False]).expand(x.size(0), 3)
        for block in self.blocks:
            x, text = block(x, text, mask)
        return (self.exit(x),)


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
    "differs": lambda: None,
}


def blocks_of(model: Model | JointModel, *_: object, **__: object) -> list[BlockList]:
    two: dict[str, Any] = {}
    if isinstance(model, JointModel):
        projections = ("attention.text_q", "attention.text_k", "attention.text_v")
        text = TextStream(projections=projections, output="attention.text_out", mask="mask")
        two = {"exit": model.exit, "widths": ("attention.width",), "text": text}
    return [
        BlockList(
            **two,
            blocks=list(model.blocks),
            output="attention.out",
            projections=("attention.q", "attention.k", "attention.v"),
            num_heads=("attention.heads",),
            per_token={"x": {3: 1}},
            whole=(),
        )
    ]


def few(args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return args, {**kwargs, "x": kwargs["x"][:, :4].contiguous()}


def count(args: Any, kwargs: dict[str, Any]) -> int:
    return int(kwargs["x"].shape[1])


def bind(model: Model | JointModel, guided: bool = True, *, compares: bool = False) -> PipelineBinding:
    forward = Forward(
        owner=model,
        attribute="forward",
        function=model,
        modules={"model": model},
        empty=lambda **given: (torch.empty_like(given["x"]),),
        same="x",
        blocks=blocks_of,
        few=few if compares else None,
        count=count if compares else None,
    )
    return PipelineBinding(name="Toy", forwards=(forward,), is_guided=lambda: guided, heads=HEADS)


def generate(model: Model | JointModel, tokens: int, batch: int = 1, guided: bool = True, **_: Any) -> torch.Tensor:
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
