"""A tiny transformer that calls its blocks as Wan's does, and one training step of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 4  # of one head


class Attention(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        split = [t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v)]
        return functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads, width = num_heads, num_heads * WIDTH
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(num_heads)

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        q, k = self.norm_q(self.q(x)), self.norm_k(self.k(x))
        v = self.v(x)
        q, k = (rotated(t, freqs, self.num_heads) for t in (q, k))
        return self.o(self.attn(q, k, v))


def rotated(x: torch.Tensor, freqs: torch.Tensor, heads: int) -> torch.Tensor:
    """Something that depends on the token and mixes no tokens; `freqs` (s, 1, head width)."""
    return (x.unflatten(2, (heads, -1)) * freqs).flatten(2).to(x.dtype)


class Block(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        width = num_heads * WIDTH
        self.self_attn = SelfAttention(num_heads)
        self.cross = nn.Linear(width, width, bias=False)  # a bias on keys has no gradient
        self.ffn = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, context: torch.Tensor, t_mod: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        shift, gate = t_mod.unbind(-2)
        if t_mod.dim() == 3:
            shift, gate = shift.unsqueeze(1), gate.unsqueeze(1)
        x = x + gate * self.self_attn(self.norm(x) + shift, freqs)
        keys = self.cross(context)
        x = x + functional.scaled_dot_product_attention(x, keys, context)
        return x + self.ffn(x)


class Transformer(nn.Module):
    """Latents (b, s, 3) in, (b, s, 3) out. `checkpointing`: none, saved or reentrant."""

    def __init__(self, num_heads: int, num_blocks: int = 3) -> None:
        super().__init__()
        width = num_heads * WIDTH
        self.patch, self.text, self.time = nn.Linear(3, width), nn.Linear(3, width), nn.Linear(1, 2 * width)
        self.blocks = nn.ModuleList(Block(num_heads) for _ in range(num_blocks))
        self.head = nn.Linear(width, 3)

    def forward(
        self, latents: torch.Tensor, time: torch.Tensor, context: torch.Tensor, checkpointing: str = "none"
    ) -> torch.Tensor:
        x, context = self.patch(latents), self.text(context)
        t_mod = self.time(time).unflatten(-1, (2, -1))
        freqs = torch.linspace(0.5, 1.5, x.size(1) * WIDTH, dtype=x.dtype, device=x.device).view(x.size(1), 1, WIDTH)
        for block in self.blocks:
            run = (
                block
                if checkpointing == "none"
                else partial(checkpoint, block, use_reentrant=checkpointing == "reentrant")
            )
            x = run(x, context, t_mod, freqs)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """One comparison with the unsharded step. `trained`: all parameters, or those of the blocks alone."""

    ranks: int = 2
    heads: int = 5
    tokens: int = 29
    batch: int = 1
    per_token: bool = False
    checkpointing: str = "none"
    trained: str = "all"
    accumulation: int = 1
    dtype: str = "float32"
    device: str = "cpu"

    def model(self) -> Transformer:
        torch.manual_seed(0)
        model = Transformer(self.heads).to(self.device, getattr(torch, self.dtype))
        if self.trained == "blocks":
            model.requires_grad_(False)
            model.blocks.requires_grad_(True)
        return model

    def sample(self, seed: int) -> dict[str, torch.Tensor]:
        """What the model takes, and `target`."""
        generator = torch.Generator().manual_seed(seed)
        times = (self.batch, self.tokens, 1) if self.per_token else (self.batch, 1)
        shapes = {"latents": (self.batch, self.tokens, 3), "target": (self.batch, self.tokens, 3), "time": times}
        shapes["context"] = (self.batch, 6, 3)
        sample = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        sample = {name: t.to(self.device, getattr(torch, self.dtype)) for name, t in sample.items()}
        sample["latents"].requires_grad_(self.trained == "blocks")  # reentrant checkpoints want an input that has one
        return sample

    def loss(self, model: nn.Module, seed: int) -> torch.Tensor:
        sample = self.sample(seed)
        target = sample.pop("target")
        return functional.mse_loss(model(**sample, checkpointing=self.checkpointing).float(), target.float())

    def step(self, model: nn.Module, first_seed: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
        """The losses of the micro-batches, and every gradient they leave."""
        model.zero_grad()
        losses = []
        for seed in range(first_seed, first_seed + self.accumulation):
            loss = self.loss(model, seed)
            loss.backward()
            losses.append(loss.item())
        return losses, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def farthest(found: tuple[Any, dict[str, torch.Tensor]], expected: tuple[Any, dict[str, torch.Tensor]]) -> float:
    """The largest relative distance of a loss or a gradient, by norm; NaN where either holds one."""
    assert found[1].keys() == expected[1].keys()
    distances = [abs(a - b) / abs(b) for a, b in zip(found[0], expected[0], strict=True)]
    for name, gradient in expected[1].items():
        distances.append(((found[1][name] - gradient).norm() / gradient.norm()).item())
    return torch.tensor(distances).max().item()
