"""Reads the graphs from modules named as diffusers names them, which FastVideo and vLLM-Omni do too.

Whatever is not built as these frameworks build it is an error that names the module: a graph is read whole or not
at all. A framework with other names reads its own modules with `read_conv` and `read_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wanshim.errors import VaeInvalid

from .encoder_graph import Average, Downsample, DownStage, EncoderGraph
from .graph import Attention, Conv, DecoderGraph, Duplicate, Norm, ResBlock, Stage, Upsample


def read_graph(vae: Any, output_dtype: torch.dtype | None = None) -> DecoderGraph:
    """The decoder of `vae`.

    Args:
        output_dtype: what the framework converts its frames to.

    Raises:
        VaeInvalid: a module is not what these frameworks build.
    """
    decoder = vae.decoder
    expect_silu(decoder.nonlinearity, "decoder.nonlinearity")
    return DecoderGraph(
        name=f"{type(vae).__module__}.{type(vae).__qualname__}",
        post_quant=read_conv("post_quant_conv", vae.post_quant_conv),
        conv_in=read_conv("conv_in", decoder.conv_in),
        middle=_middle(decoder.mid_block),
        stages=tuple(_stage(f"up_blocks.{i}", block) for i, block in enumerate(decoder.up_blocks)),
        norm_out=read_norm("norm_out", decoder.norm_out),
        conv_out=read_conv("conv_out", decoder.conv_out),
        patch_size=int(getattr(vae.config, "patch_size", None) or 1),  # before the 2.2 layout there was none
        output_dtype=output_dtype,
    )


def read_encoder(vae: Any, output_dtype: torch.dtype | None = None) -> EncoderGraph:
    """The encoder of `vae`.

    Args:
        output_dtype: what the framework converts its latents to.

    Raises:
        VaeInvalid: a module is not what these frameworks build.
    """
    encoder = vae.encoder
    expect_silu(encoder.nonlinearity, "encoder.nonlinearity")
    return EncoderGraph(
        name=f"{type(vae).__module__}.{type(vae).__qualname__}",
        conv_in=read_conv("conv_in", encoder.conv_in),
        stages=_down_stages(encoder.down_blocks),
        middle=_middle(encoder.mid_block),
        norm_out=read_norm("norm_out", encoder.norm_out),
        conv_out=read_conv("conv_out", encoder.conv_out),
        quant=read_conv("quant_conv", vae.quant_conv),
        patch_size=int(getattr(vae.config, "patch_size", None) or 1),  # before the 2.2 layout there was none
        output_dtype=output_dtype,
    )


def _down_stages(layers: Any) -> tuple[DownStage, ...]:
    """The 2.2 layout has a module for each stage; the 2.1 layout has one row of blocks, cut behind each downsampler."""
    stages: list[DownStage] = []
    blocks: list[ResBlock | Attention] = []
    for i, layer in enumerate(layers):
        name = f"down_blocks.{i}"
        if hasattr(layer, "avg_shortcut"):
            stages.append(_down_stage(name, layer))
        elif hasattr(layer, "resample"):
            stages.append(DownStage(blocks=tuple(blocks), downsample=_downsample(name, layer), average=None))
            blocks = []
        else:
            blocks.append(_attention(name, layer) if hasattr(layer, "to_qkv") else _res_block(name, layer))
    return (*stages, DownStage(blocks=tuple(blocks), downsample=None, average=None)) if blocks else tuple(stages)


def _down_stage(name: str, block: Any) -> DownStage:
    return DownStage(
        blocks=tuple(_res_block(f"{name}.resnets.{i}", resnet) for i, resnet in enumerate(block.resnets)),
        downsample=None if block.downsampler is None else _downsample(f"{name}.downsampler", block.downsampler),
        average=read_average(block.avg_shortcut),
    )


def _middle(block: Any) -> tuple[ResBlock | Attention, ...]:
    parts: list[ResBlock | Attention] = [_res_block("mid_block.resnets.0", block.resnets[0])]
    for i, (attention, resnet) in enumerate(zip(block.attentions, block.resnets[1:])):
        if attention is not None:
            parts.append(_attention(f"mid_block.attentions.{i}", attention))
        parts.append(_res_block(f"mid_block.resnets.{i + 1}", resnet))
    return tuple(parts)


def _stage(name: str, block: Any) -> Stage:
    sampler = block.upsampler if hasattr(block, "upsampler") else (block.upsamplers or [None])[0]
    shortcut = getattr(block, "avg_shortcut", None)
    return Stage(
        blocks=tuple(_res_block(f"{name}.resnets.{i}", resnet) for i, resnet in enumerate(block.resnets)),
        upsample=None if sampler is None else _upsample(f"{name}.upsampler", sampler),
        duplicate=None if shortcut is None else read_duplicate(shortcut),
    )


def _res_block(name: str, block: Any) -> ResBlock:
    expect_silu(block.nonlinearity, f"{name}.nonlinearity")
    shortcut = block.conv_shortcut
    return ResBlock(
        norm1=read_norm(f"{name}.norm1", block.norm1),
        conv1=read_conv(f"{name}.conv1", block.conv1),
        norm2=read_norm(f"{name}.norm2", block.norm2),
        conv2=read_conv(f"{name}.conv2", block.conv2),
        shortcut=None if isinstance(shortcut, nn.Identity) else read_conv(f"{name}.conv_shortcut", shortcut),
    )


def _attention(name: str, block: Any) -> Attention:
    return Attention(
        norm=read_norm(f"{name}.norm", block.norm),
        qkv=read_conv(f"{name}.to_qkv", block.to_qkv),
        proj=read_conv(f"{name}.proj", block.proj),
    )


def _upsample(name: str, block: Any) -> Upsample:
    if block.mode not in ("upsample2d", "upsample3d"):
        raise _unknown(f"{name}.mode", block.mode, "upsample2d or upsample3d")
    resize, conv = block.resample
    if not isinstance(resize, nn.Upsample) or resize.mode != "nearest-exact" or resize.scale_factor != (2.0, 2.0):
        raise _unknown(f"{name}.resample.0", resize, "nearest-exact upsampling by 2")
    time_conv = read_conv(f"{name}.time_conv", block.time_conv) if block.mode == "upsample3d" else None
    return Upsample(resize=resize, conv=read_conv(f"{name}.resample.1", conv), time_conv=time_conv)


def _downsample(name: str, block: Any) -> Downsample:
    if block.mode not in ("downsample2d", "downsample3d"):
        raise _unknown(f"{name}.mode", block.mode, "downsample2d or downsample3d")
    pad, conv = block.resample
    return read_downsample(name, pad, conv, block.time_conv if block.mode == "downsample3d" else None)


def read_downsample(
    name: str, pad: Any, conv: Any, time_conv: Any, read: Callable[..., Conv] | None = None
) -> Downsample:
    """A downsampler of a Wan encoder.

    Args:
        time_conv: its convolution in time; None: it halves height and width alone.
        read: reads a convolution; None: `read_conv`.
    """
    read = read or read_conv
    if not isinstance(pad, nn.ZeroPad2d) or tuple(pad.padding) != (0, 1, 0, 1):
        raise _unknown(f"{name}.resample.0", pad, "a row and a column of zeros at the end")
    return Downsample(
        conv=read(f"{name}.resample.1", conv, stride=(2, 2)),
        time_conv=None if time_conv is None else read(f"{name}.time_conv", time_conv, stride=(2, 1, 1)),
    )


def read_average(module: Any) -> Average:
    return Average(
        module=module,
        factor_t=int(module.factor_t),
        factor_s=int(module.factor_s),
        group=int(module.group_size),
        out_channels=int(module.out_channels),
    )


def read_duplicate(module: Any) -> Duplicate:
    return Duplicate(
        module=module,
        factor_t=int(module.factor_t),
        factor_s=int(module.factor_s),
        repeats=int(module.repeats),
        out_channels=int(module.out_channels),
    )


def read_conv(
    name: str,
    module: Any,
    resolve: Callable[[], nn.Module] | None = None,
    *,
    stride: tuple[int, ...] | None = None,
) -> Conv:
    """A convolution, known to be of this stride; None: 1 everywhere. `resolve`: see `Conv`."""
    if not isinstance(module, (nn.Conv2d, nn.Conv3d)) or module.stride != (stride or (1,) * len(module.stride)):
        raise _unknown(name, module, f"a convolution of stride {stride or 1}")
    return Conv(name=name, module=module, resolve=resolve)


def read_norm(name: str, module: Any) -> Norm:
    """An RMS norm. torch's `normalize` has eps 1e-12; vLLM-Omni's stand-in carries an epsilon of its own."""
    if not getattr(module, "channel_first", False):
        raise _unknown(name, module, "an RMS norm over the channel dimension")
    return Norm(module=module, scale=float(module.scale), eps=float(getattr(module, "epsilon", 1e-12)))


def expect_silu(module: Any, name: str) -> None:
    if not isinstance(module, nn.SiLU):
        raise _unknown(name, module, "SiLU")


def _unknown(name: str, found: object, expected: str) -> VaeInvalid:
    return VaeInvalid(
        f"{name} of the VAE is {found!r}",
        expected=expected,
        hint="This release builds its VAE in a way wanshim does not know; the VAE is left as it was",
    )
