"""Reads a decoder graph from modules named as diffusers names them, which FastVideo and vLLM-Omni do too.

Whatever is not built as these frameworks build it is an error that names the module: a graph is read whole or not
at all. A framework with other names reads its own modules with `read_conv` and `read_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wanshim.errors import DecodeInvalid

from .graph import Attention, Conv, DecoderGraph, Duplicate, Norm, ResBlock, Stage, Upsample


def read_graph(vae: Any, output_dtype: torch.dtype | None = None) -> DecoderGraph:
    """The decoder of `vae`.

    Args:
        output_dtype: what the framework converts its frames to.

    Raises:
        DecodeInvalid: a module is not what these frameworks build.
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


def read_duplicate(module: Any) -> Duplicate:
    return Duplicate(
        module=module,
        factor_t=int(module.factor_t),
        factor_s=int(module.factor_s),
        repeats=int(module.repeats),
        out_channels=int(module.out_channels),
    )


def read_conv(name: str, module: Any, resolve: Callable[[], nn.Module] | None = None) -> Conv:
    """A convolution, known to be of stride 1. `resolve`: see `Conv`."""
    if not isinstance(module, (nn.Conv2d, nn.Conv3d)) or set(module.stride) != {1}:
        raise _unknown(name, module, "a convolution of stride 1")
    return Conv(name=name, module=module, resolve=resolve)


def read_norm(name: str, module: Any) -> Norm:
    """An RMS norm. torch's `normalize` has eps 1e-12; vLLM-Omni's stand-in carries an epsilon of its own."""
    if not getattr(module, "channel_first", False):
        raise _unknown(name, module, "an RMS norm over the channel dimension")
    return Norm(module=module, scale=float(module.scale), eps=float(getattr(module, "epsilon", 1e-12)))


def expect_silu(module: Any, name: str) -> None:
    if not isinstance(module, nn.SiLU):
        raise _unknown(name, module, "SiLU")


def _unknown(name: str, found: object, expected: str) -> DecodeInvalid:
    return DecodeInvalid(
        f"{name} of the decoder is {found!r}",
        expected=expected,
        hint="This release builds its decoder in a way wanshim does not know; the decode is left as it was",
    )
