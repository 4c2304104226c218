"""FastVideo's VAEs of Cosmos 2.5 and LingBot-World: the Wan 2.1 VAE under the names of Wan's own code.

Both take and give normalised latents. What else they do around encoder and decoder is the data of a `Fork`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Call, Graph

Own = Callable[[Any, "torch.Tensor"], "torch.Tensor"]
_AS_IT_IS = (0.0, 1.0)  # mean and inverse deviation that change no value


@dataclass(frozen=True, kw_only=True)
class Fork:
    """One of these VAEs.

    Args:
        module, name: of its class.
        classes: the classes whose `forward` the decode room computes, without those of the encoder and the decoder.
        model: returns the module that holds encoder and decoder.
        scale: returns mean and inverse deviation of the latents, to be used with a tensor.
        whole: computes a batch at once, in the precision of its weights, and leaves frames unclamped. False: sample by
            sample under its own autocast, to clamped fp32.
        own_decode: FastVideo's own frames of latents that are not normalised.
        own_encode: FastVideo's own means of a video, not normalised.
        wrap_output: what encode returns, around the means.
        refuses: why an encode of so many frames stays with FastVideo, if it does.
    """

    module: str
    name: str
    classes: tuple[str, ...]
    model: Callable[[Any], Any]
    scale: Callable[[Any, torch.Tensor], Sequence[torch.Tensor]]
    whole: bool
    own_decode: Own
    own_encode: Own
    wrap_output: Callable[[torch.Tensor], Any]
    refuses: Callable[[Any, int], str | None]

    def targets(self, coder: str) -> tuple[str, ...]:
        """Targets that the decode room counts on: the code around, and that of the "Encoder3d" or the "Decoder3d"."""
        prefix = self.classes[0].removesuffix("CausalConv3d")
        return tuple(f"{self.module}:{name}.forward" for name in (*self.classes, f"{prefix}{coder}"))

    def read(self, verb: str, vae: Any) -> Graph:
        import torch

        from wanshim.core.decoding import read_wan_graph

        return read_wan_graph(
            vae,
            self.model(vae),
            verb,
            output_dtype=None if self.whole or verb == "encode" else torch.float32,
            clamped=not self.whole,
            own=self.own_encode if verb == "encode" else self.own_decode,
        )

    def decode(self, vae: Any, call: Call, latents: torch.Tensor) -> Any:
        """Frames of normalised latents; without elements where `call` gives none."""
        mean, inverse = self.scale(vae, latents)
        return self._each(vae, lambda z: call(z / inverse + mean), latents)

    def encode(self, vae: Any, call: Call, video: torch.Tensor) -> Any:
        """The class's result for `video`, from the encoder's output."""

        def means(sample: torch.Tensor) -> torch.Tensor:
            encoded = call(sample)
            mean, inverse = self.scale(vae, encoded)
            found = (encoded.chunk(2, dim=1)[0] - mean) * inverse
            return found if self.whole else found.float()

        return self.wrap_output(self._each(vae, means, video))

    def _each(self, vae: Any, call: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> Any:
        import torch

        if self.whole:
            results = [call(given)]
        else:
            half = vae.dtype in (torch.float16, torch.bfloat16)  # autocast knows no other
            with torch.autocast("cuda", dtype=vae.dtype if half else None, enabled=half and given.is_cuda):
                results = [call(sample) for sample in given.split(1)]
        return torch.cat(results)


def _cosmos_output(means: torch.Tensor) -> Any:
    from fastvideo.models.vaes.cosmos25wanvae import _TensorLatentDist

    return _TensorLatentDist(means)


def _cosmos_decode(vae: Any, z: torch.Tensor) -> torch.Tensor:
    with Undo() as undo:
        undo.set(vae, {"_scale": lambda like: _AS_IT_IS})
        frames: torch.Tensor = vae.decode(z)
    return frames


def _cosmos_encode(vae: Any, video: torch.Tensor) -> torch.Tensor:
    with Undo() as undo:
        undo.set(vae, {"_scale": lambda like: _AS_IT_IS})
        means: torch.Tensor = vae.encode(video).mean
    return means


def _cosmos_refuses(vae: Any, frames: int) -> str | None:
    if vae.temporal_window != 4:
        return f"its temporal_window is {vae.temporal_window}; the decode room takes 4 frames a latent frame"
    if (frames - 1) % 4:
        return f"{frames} frames are not 1 + 4 n: this VAE encodes the remainder too"
    return None


FORKS = (
    Fork(
        module="fastvideo.models.vaes.cosmos25wanvae",
        name="Cosmos25WanVAE",
        classes=(
            "Cosmos25CausalConv3d",
            "Cosmos25RMSNorm",
            "Cosmos25Upsample",
            "Cosmos25Resample",
            "Cosmos25ResidualBlock",
            "Cosmos25AttentionBlock",
        ),
        model=lambda vae: vae,
        scale=lambda vae, like: vae._scale(like),
        whole=True,
        own_decode=_cosmos_decode,
        own_encode=_cosmos_encode,
        wrap_output=_cosmos_output,
        refuses=_cosmos_refuses,
    ),
    Fork(
        module="fastvideo.models.vaes.lingbotworld2_wanvae",
        name="LingBotWorld2WanVAE",
        classes=("CausalConv3d", "RMS_norm", "Upsample", "Resample", "ResidualBlock", "AttentionBlock"),
        model=lambda vae: vae.model,
        scale=lambda vae, like: [value.to(like.device).view(1, -1, 1, 1, 1) for value in vae.scale],
        whole=False,
        own_decode=lambda vae, z: vae.model.decode(z, _AS_IT_IS).float().clamp_(-1, 1),
        own_encode=lambda vae, video: vae.model.encode(video, _AS_IT_IS),
        wrap_output=lambda means: SimpleNamespace(mean=means),
        refuses=lambda vae, frames: None,
    ),
)
