"""Reads the graphs from modules named as diffusers names them: its Wan and Qwen-Image VAEs, and most forks of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .encoder_graph import Average, Downsample, EncoderGraph, Graph
from .framework import Framework, Own, Rebound
from .graph import Attention, DecoderGraph, Duplicate, ResBlock, Stage, Upsample
from .modules import ModuleReader, name_of, read_average, read_duplicate

_BARE = ModuleReader()


def read_graph(
    vae: Any,
    verb: str = "decode",
    *,
    output_dtype: torch.dtype | None = None,
    clamped: bool = True,
    modules: ModuleReader = _BARE,
    own: Own | None = None,
    rebound: Rebound | None = None,
) -> Graph:
    """The decoder or encoder of `vae`.

    Args:
        verb: decode or encode.
        output_dtype: what the framework converts its result to.
        clamped: the framework limits its frames to -1..1.
        modules: reads what the framework wraps.
        own, rebound: see `Framework`.

    Raises:
        ModelInvalid: a module is not what these frameworks build.
    """
    coder = vae.encoder if verb == "encode" else vae.decoder
    modules.expect_silu(f"{verb}r.nonlinearity", coder.nonlinearity)
    common: dict[str, Any] = {
        "name": name_of(vae),
        "conv_in": modules.conv("conv_in", coder.conv_in),
        "middle": _middle(modules, coder.mid_block),
        "norm_out": modules.norm("norm_out", coder.norm_out),
        "conv_out": modules.conv("conv_out", coder.conv_out),
        # none before the 2.2 layout, and in the Qwen-Image VAE
        "patch_size": int(getattr(getattr(vae, "config", None), "patch_size", None) or 1),
        "output_dtype": output_dtype,
    }
    if verb == "encode":
        return EncoderGraph(
            stages=_down_stages(modules, coder.down_blocks),
            quant=modules.conv("quant_conv", vae.quant_conv),
            framework=Framework(vae, ("encoder", "quant_conv"), own, rebound),
            **common,
        )
    return DecoderGraph(
        post_quant=modules.conv("post_quant_conv", vae.post_quant_conv),
        stages=tuple(_stage(modules, f"up_blocks.{i}", block) for i, block in enumerate(coder.up_blocks)),
        clamped=clamped,
        framework=Framework(vae, ("decoder", "post_quant_conv"), own, rebound),
        **common,
    )


def _down_stages(modules: ModuleReader, layers: Any) -> tuple[Stage[Downsample, Average], ...]:
    """The 2.2 layout has a module for each stage; the 2.1 layout has one row of blocks, cut behind each downsampler."""
    stages: list[Stage[Downsample, Average]] = []
    blocks: list[ResBlock | Attention] = []
    for i, layer in enumerate(layers):
        name = f"down_blocks.{i}"
        if hasattr(layer, "avg_shortcut"):
            stages.append(_down_stage(modules, name, layer))
        elif hasattr(layer, "resample"):
            stages.append(Stage(blocks=tuple(blocks), sampler=modules.downsample(name, layer), shortcut=None))
            blocks = []
        else:
            blocks.append(
                modules.attention(name, layer) if hasattr(layer, "to_qkv") else _res_block(modules, name, layer)
            )
    return (*stages, Stage(blocks=tuple(blocks), sampler=None, shortcut=None)) if blocks else tuple(stages)


def _down_stage(modules: ModuleReader, name: str, block: Any) -> Stage[Downsample, Average]:
    sampler = block.downsampler
    return Stage(
        blocks=tuple(_res_block(modules, f"{name}.resnets.{i}", resnet) for i, resnet in enumerate(block.resnets)),
        sampler=None if sampler is None else modules.downsample(f"{name}.downsampler", sampler),
        shortcut=read_average(block.avg_shortcut),
    )


def _middle(modules: ModuleReader, block: Any) -> tuple[ResBlock | Attention, ...]:
    parts: list[ResBlock | Attention] = [_res_block(modules, "mid_block.resnets.0", block.resnets[0])]
    for i, (attention, resnet) in enumerate(zip(block.attentions, block.resnets[1:])):
        if attention is not None:
            parts.append(modules.attention(f"mid_block.attentions.{i}", attention))
        parts.append(_res_block(modules, f"mid_block.resnets.{i + 1}", resnet))
    return tuple(parts)


def _stage(modules: ModuleReader, name: str, block: Any) -> Stage[Upsample, Duplicate]:
    sampler = block.upsampler if hasattr(block, "upsampler") else (block.upsamplers or [None])[0]
    shortcut = getattr(block, "avg_shortcut", None)
    return Stage(
        blocks=tuple(_res_block(modules, f"{name}.resnets.{i}", resnet) for i, resnet in enumerate(block.resnets)),
        sampler=None if sampler is None else modules.upsample(f"{name}.upsampler", sampler),
        shortcut=None if shortcut is None else read_duplicate(shortcut),
    )


def _res_block(modules: ModuleReader, name: str, block: Any) -> ResBlock:
    modules.expect_silu(f"{name}.nonlinearity", block.nonlinearity)
    shortcut = block.conv_shortcut
    return ResBlock(
        norm1=modules.norm(f"{name}.norm1", block.norm1),
        conv1=modules.conv(f"{name}.conv1", block.conv1),
        norm2=modules.norm(f"{name}.norm2", block.norm2),
        conv2=modules.conv(f"{name}.conv2", block.conv2),
        shortcut=None if isinstance(shortcut, nn.Identity) else modules.conv(f"{name}.conv_shortcut", shortcut),
    )
