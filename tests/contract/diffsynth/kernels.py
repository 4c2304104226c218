"""Doubles of attention kernels: SageAttention needs a GPU and has no operator for the CPU.

Each computes another value than torch's attention, so that a test sees which of the two computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

Kernel = Callable[..., torch.Tensor]


def other(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """A kernel of its own rounding, with a backward."""
    return scaled_dot_product_attention(q, k, v) * 1.01


@torch.no_grad()
def sage(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return other(q, k, v)


def detached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return other(q, k, v).detach()


def values_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return other(q.detach(), k.detach(), v)


class _Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return other(q, k, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, gradients[0]


class _Unwritten(_Half):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("this kernel has no backward")


def half_a_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return _Half.apply(q, k, v)  # type: ignore[no-any-return,no-untyped-call]


def unwritten(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return _Unwritten.apply(q, k, v)  # type: ignore[no-any-return,no-untyped-call]


WITHOUT = [sage, detached, values_alone, half_a_backward, unwritten]


def install(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    """As if SageAttention were installed, in both places in which DiffSynth looks for it."""
    from diffsynth.core.attention import attention as core
    from diffsynth.models import wan_video_dit

    monkeypatch.setattr(wan_video_dit, "SAGE_ATTN_AVAILABLE", True)
    monkeypatch.setattr(core, "ATTENTION_IMPLEMENTATION", "sage_attention")
    for module in (wan_video_dit, core):
        monkeypatch.setattr(module, "sageattn", kernel, raising=False)
