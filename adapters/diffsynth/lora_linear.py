"""A linear layer with LoRAs that are loaded under DiffSynth's VRAM management, without that management."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class LoraLinear(nn.Linear):
    """Computes as `diffsynth.core.vram.layers.AutoWrappedLinear` does, LoRA by LoRA."""

    def set_loras(self, downs: Sequence[torch.Tensor], ups: Sequence[torch.Tensor]) -> None:
        """Set the LoRAs, (rank, in) and (out, rank) each, in place of what there was."""
        self._buffers.clear()
        for number, pair in enumerate(zip(downs, ups, strict=True)):
            for name, weight in zip(("down", "up"), pair, strict=True):
                self.register_buffer(f"{name}_{number}", weight, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self.weight, self.bias)
        for number in range(len(self._buffers) // 2):
            out = out + x @ getattr(self, f"down_{number}").T @ getattr(self, f"up_{number}").T
        return out
