"""The encoders of DiffSynth's Wan and Qwen-Image VAEs, bound to the core; see `decoder_graph.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from wanshim.core.decoding import Binding, EncoderGraph, read_encoder, read_wan_encoder

from .decoder_graph import module_reader, qwen_image_methods, unscaled, without_scale


def build(vae: Any) -> Binding:
    """Bind the core to `vae.single_encode`, which returns normalised means.

    Raises:
        VaeInvalid: the encoder is not built as the releases this adapter knows build it.
    """
    return Binding(graph=read_graph(vae), target=vae, methods={"single_encode": partial(_replace, vae)})


def _replace(vae: Any, encode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def single_encode(video: torch.Tensor, device: torch.device | str) -> Any:
        return normalise(vae, encode(video.to(device)))

    return single_encode


def normalise(vae: Any, encoded: torch.Tensor) -> Any:
    """Latents from the encoder's output, with the arithmetic of `VideoVAE_.encode`."""
    mean = encoded.chunk(2, dim=1)[0]
    shift, scale = (value.to(dtype=mean.dtype, device=mean.device).view(1, -1, 1, 1, 1) for value in vae.scale)
    return (mean - shift) * scale


def build_qwen_image(vae: Any) -> Binding:
    """Bind the core to `vae.encode`, which takes images, and to `vae.encode_video` where the release has it.

    Raises:
        VaeInvalid: the encoder is not built as the releases this adapter knows build it.
    """

    def whole(encode: Callable[..., Any], x: torch.Tensor, **lean: bool) -> Any:
        return normalise_qwen_image(vae, encode(x, **lean))

    return Binding(graph=read_qwen_image_graph(vae), target=vae, methods=qwen_image_methods(vae, "encode", whole))


def normalise_qwen_image(vae: Any, encoded: torch.Tensor) -> Any:
    """Latents from the encoder's output, with the arithmetic of `QwenImageVAE.encode`."""
    mean = encoded.chunk(2, dim=1)[0]
    shift, scale = (value.to(dtype=mean.dtype, device=mean.device) for value in (vae.mean, vae.std))
    return (mean - shift) * scale


def read_qwen_image_graph(vae: Any) -> EncoderGraph:
    return read_encoder(vae, modules=module_reader(), own=_own_image)


def _own_image(vae: Any, x: torch.Tensor) -> Any:
    if x.shape[2] > 1:
        return type(vae).encode_video(without_scale(vae), x)  # the means alone
    return vae.quant_conv(vae.encoder(x))


def read_graph(vae: Any) -> EncoderGraph:
    return read_wan_encoder(vae, vae.model, modules=module_reader(), own=_own)


def _own(vae: Any, video: torch.Tensor) -> Any:
    return vae.model.encode(video, unscaled(vae))  # the means alone


BUILDERS = {
    "diffsynth.models.wan_video_vae.WanVideoVAE": build,
    "diffsynth.models.qwen_image_vae.QwenImageVAE": build_qwen_image,
}
