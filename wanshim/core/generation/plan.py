"""The plan of a pipeline's forwards, with its reasons: the answer of `decide`, which prints itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wanshim.core.model_split.plan import format_bytes


def describe(guidance: int, sequence: int) -> str:
    """A way to use GPUs, in words."""
    parts = [f"guidance over {guidance}"] * (guidance > 1) + [f"tokens over {sequence}"] * (sequence > 1)
    return " x ".join(parts) or "one GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """The plan of a pipeline's forwards.

    Args:
        pipeline: its name.
        guidance: 2: the forward without the prompt runs on other GPUs than the one with it. 1: one after the other.
        sequence: how many GPUs share the tokens of a forward.
        devices: that are used, the pipeline's own first.
        replaces_offload: the first GPU has blocks of the models as they are needed, from host memory, in place of the
            script's own offload.
        keeps_streamed: as many of them as have room stay there from forward to forward, which would wait for them.
        streamed: the other GPUs have blocks of the models as they are needed, from host memory.
        peaks: predicted bytes of models and forwards on each device; empty where they are not known.
        rejected: by way, why it was not taken.
        fast_forwards, fast_vae: see Request.
    """

    pipeline: str
    guidance: int
    sequence: int
    devices: tuple[str, ...]
    replaces_offload: bool = False
    keeps_streamed: bool = False
    streamed: bool = False
    peaks: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)
    fast_forwards: bool = False
    fast_vae: bool = False

    @property
    def gpus(self) -> int:
        return self.guidance * self.sequence

    def __str__(self) -> str:
        alone = ("one GPU" if self.gpus > 1 else "the script alone") + " with the same fast blocks" * self.fast_forwards
        exact = f"bit for bit the {'latents' if self.fast_vae else 'frames'} of {alone}"
        if self.sequence > 1:
            guidance = "guidance over GPUs changes no bit, " * (self.guidance > 1)
            exact = f"the frames of {alone} up to rounding ({guidance}tokens over GPUs round in another order)"
        lines = [f"{self.pipeline} on {', '.join(self.devices)}: {describe(self.guidance, self.sequence)}, {exact}"]
        own = f"{self.devices[0]} streams blocks of its models from host memory, where the script offloads them"
        kept = "; as many as have room stay, since forwards waited for them" * self.keeps_streamed
        lines += [own + kept] * self.replaces_offload
        lines += ["the others stream blocks of its models from host memory"] * self.streamed
        lines += [f"{device}: {format_bytes(peak)} predicted for its forwards" for device, peak in self.peaks.items()]
        lines += [f"not {way}: {reason}" for way, reason in self.rejected.items()]
        return "\n  ".join(lines)
