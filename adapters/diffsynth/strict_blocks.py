"""`diffsynth.strict_blocks`: the blocks of a Wan DiT with fewer kernels, and the same bits.

Between its matrix products and attentions a block modulates, gates, normalizes queries and keys and turns them, each of
which takes several kernels over all tokens, the last of them in complex numbers of 16 bytes. Here each is one or two
that round where DiffSynth rounds. They are compared with DiffSynth's own steps on the data at hand, and where they
differ or fail these compute. It serves denoising: without gradients, on a GPU, in bf16 or fp16, outside of
torch.compile.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.strict_steps import steps_seam

if TYPE_CHECKING:
    from wanshim.core.strict_blocks import StrictOperators

DIT = "diffsynth.models.wan_video_dit"


def modulation(operators: StrictOperators, original: Any) -> Any:
    """`modulate`."""

    def modulate(x: Any, shift: Any, scale: Any) -> Any:
        if not _fits(x, scale, shift):
            return original(x, shift, scale)
        return operators.modulated(x, scale, shift)

    return modulate


def gate(operators: StrictOperators, original: Any) -> Any:
    """`GateModule.forward`."""

    def forward(self: Any, x: Any, gate: Any, residual: Any) -> Any:
        return operators.gated(x, gate, residual) if _fits(x, gate) else original(self, x, gate, residual)

    return forward


def rms_norm(operators: StrictOperators, original: Any) -> Any:
    """`RMSNorm.forward` of queries and keys."""

    def forward(self: Any, x: Any) -> Any:
        if getattr(self, "use_torch_norm", False) or not (_fits(x) and self.weight.dtype == x.dtype):
            return original(self, x)
        return operators.rms(x, self.weight, self.eps, partial(original, self, x))

    return forward


def rotary(operators: StrictOperators, original: Any) -> Any:
    """`rope_apply`."""
    import torch

    def rope_apply(x: Any, freqs: Any, num_heads: int) -> Any:
        head = x.shape[-1] // num_heads
        known = freqs.shape == (x.shape[1], 1, head // 2) and freqs.dtype == torch.complex128
        if not (known and freqs.is_contiguous() and x.is_contiguous() and freqs.device == x.device):
            return original(x, freqs, num_heads)
        return operators.rotated(x, freqs, head, partial(original, x, freqs, num_heads))

    return rope_apply


def _fits(x: Any, *others: Any) -> bool:
    """Whether all are (batch, tokens, channels) of one dtype: `GateModule` of other models has other shapes."""
    plain = all(each.ndim == 3 and each.dtype == x.dtype and each.stride(-1) == 1 for each in others)
    return plain and x.ndim == 3 and x.is_contiguous()


def _seam(name: str, method: Any, tokens: int = 0) -> Seam:
    return steps_seam(
        f"{DIT}:{name}",
        method,
        tokens,
        "x",
        upstream="https://github.com/modelscope/DiffSynth-Studio (none)",
        remove_when="DiffSynth's blocks are as fast, with the same bits",
    )


FEATURE = Feature(
    name="diffsynth.strict_blocks",
    summary="a Wan DiT's blocks with fewer kernels, the same bits",
    switched_on_by="generate",
    seams=(
        _seam("modulate", modulation),
        _seam("GateModule.forward", gate, 1),
        _seam("RMSNorm.forward", rms_norm, 1),
        _seam("rope_apply", rotary),
    ),
)
