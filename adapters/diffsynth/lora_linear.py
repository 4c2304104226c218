"""A linear layer with LoRAs that are loaded under DiffSynth's VRAM management, without that management."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffsynth.core.vram.layers import AutoWrappedLinear
from torch import nn


class LoraLinear(nn.Linear):
    """Computes LoRA by LoRA, by the method of `AutoWrappedLinear`, which converts them to its input's dtype."""

    lora_merger = None

    def set_loras(self, downs: Sequence[torch.Tensor], ups: Sequence[torch.Tensor]) -> None:
        """Set the LoRAs, (rank, in) and (out, rank) each, in place of what there was."""
        self._buffers.clear()
        for number, pair in enumerate(zip(downs, ups, strict=True)):
            for name, weight in zip(("down", "up"), pair, strict=True):
                self.register_buffer(f"{name}_{number}", weight, persistent=False)

    @property
    def lora_A_weights(self) -> list[torch.Tensor]:
        """A matrices of the LoRAs, by the name that `lora_forward` reads."""
        return list(self._buffers.values())[::2]

    @property
    def lora_B_weights(self) -> list[torch.Tensor]:
        """B matrices of the LoRAs, by the name that `lora_forward` reads."""
        return list(self._buffers.values())[1::2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = AutoWrappedLinear.lora_forward(self, x, super().forward(x))
        return out
