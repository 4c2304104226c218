"""What the workers of these tests hold and call: they import it, so it is a module of its own."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import nn


class Scale(nn.Module):
    """A model with a parameter, a buffer, a tied weight, a transposed one and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.tied = self.linear
        self.register_buffer("offset", torch.arange(7.0), persistent=False)
        self.turned = nn.Parameter(torch.randn(3, 7).t())
        self.plain = (torch.full((1, 7), 2.0).expand(4, 7), torch.ones(7, dtype=torch.complex64))
        self.factor = 1.5

    def forward(self, x: torch.Tensor, *, then: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.factor * self.tied(x) + self.offset * self.plain[0][0] * self.plain[1].real
        return then * y, y @ self.turned


def addresses(model: Scale) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
    return model.tied is model.linear, model.turned.stride(), model.plain[0].stride()


def context() -> tuple[bool, bool, bool, torch.dtype, int]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )


def strides(x: torch.Tensor) -> tuple[int, ...]:
    return x.stride()


def fail(message: str) -> None:
    raise ValueError(message)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(600)


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


def block_beats(seconds: float) -> None:
    """As a hung process: nothing of it runs."""
    os.kill(os.getpid(), signal.SIGSTOP)
