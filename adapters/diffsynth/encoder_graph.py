"""The encoders of DiffSynth's `WanVideoVAE` and `WanVideoVAE38`, bound to the core; see `decoder_graph.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .decoder_graph import expect_silu, read_block, read_conv, read_norm, unwrap

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Attention, Binding, Downsample, DownStage, EncoderGraph, ResBlock


def build(vae: Any) -> Binding:
    """Bind the core to `vae.single_encode`, which returns normalised means.

    Raises:
        VaeInvalid: the encoder is not built as the releases this adapter knows build it.
    """
    from wanshim.core.decoding import Binding

    return Binding(graph=read_graph(vae), target=vae, attribute="single_encode", replace=partial(_replace, vae))


def _replace(vae: Any, encode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def single_encode(video: torch.Tensor, device: torch.device | str) -> Any:
        return normalise(vae, encode(video.to(device)))

    return single_encode


def normalise(vae: Any, encoded: torch.Tensor) -> Any:
    """Latents from the encoder's output, with the arithmetic of `VideoVAE_.encode`."""
    mean = encoded.chunk(2, dim=1)[0]
    shift, scale = (value.to(dtype=mean.dtype, device=mean.device).view(1, -1, 1, 1, 1) for value in vae.scale)
    return (mean - shift) * scale


def read_graph(vae: Any) -> EncoderGraph:
    """The encoder of `vae`; the 2.2 layout is recognised by its residual stages."""
    from wanshim.core.decoding import EncoderGraph

    encoder = vae.model.encoder
    expect_silu(encoder.head[1], "head.1")
    residual = hasattr(encoder.downsamples[0], "downsamples")
    return EncoderGraph(
        name=f"{type(vae).__module__}.{type(vae).__qualname__}",
        conv_in=read_conv("conv1", encoder.conv1),
        stages=_residual_stages(encoder) if residual else _plain_stages(encoder),
        middle=tuple(read_block(f"middle.{i}", block) for i, block in enumerate(encoder.middle)),
        norm_out=read_norm("head.0", encoder.head[0]),
        conv_out=read_conv("head.2", encoder.head[2]),
        quant=read_conv("model.conv1", vae.model.conv1),
        patch_size=2 if residual else 1,
    )


def _plain_stages(encoder: Any) -> tuple[DownStage, ...]:
    """The 2.1 layout: one row of blocks, cut behind each downsampler."""
    from wanshim.core.decoding import DownStage

    stages: list[DownStage] = []
    blocks: list[ResBlock | Attention] = []
    for i, layer in enumerate(encoder.downsamples):
        name = f"downsamples.{i}"
        if hasattr(layer, "resample"):
            stages.append(DownStage(blocks=tuple(blocks), downsample=_downsample(name, layer), average=None))
            blocks = []
        else:
            blocks.append(read_block(name, layer))
    return (*stages, DownStage(blocks=tuple(blocks), downsample=None, average=None))


def _residual_stages(encoder: Any) -> tuple[DownStage, ...]:
    """The 2.2 layout: each stage holds its blocks, its downsampler and its shortcut."""
    from wanshim.core.decoding import DownStage, read_average

    stages = []
    for i, stage in enumerate(encoder.downsamples):
        layers = [(f"downsamples.{i}.{j}", layer) for j, layer in enumerate(stage.downsamples)]
        samplers = [_downsample(name, layer) for name, layer in layers if hasattr(layer, "resample")]
        stages.append(
            DownStage(
                blocks=tuple(read_block(name, layer) for name, layer in layers if not hasattr(layer, "resample")),
                downsample=samplers[0] if samplers else None,
                average=read_average(stage.avg_shortcut),
            )
        )
    return tuple(stages)


def _downsample(name: str, layer: Any) -> Downsample:
    from wanshim.core.decoding import read_downsample

    pad, conv = layer.resample
    time_conv = layer.time_conv if layer.mode == "downsample3d" else None
    return read_downsample(name, unwrap(pad), conv, time_conv, read_conv)


BUILDERS = {"diffsynth.models.wan_video_vae.WanVideoVAE": build}
