"""Reads the graphs from modules named as diffusers names them, or as Wan's own code does.

diffusers' names are those of its Wan and Qwen-Image VAEs, and of most forks of them. DiffSynth keeps Wan's names, and
so do FastVideo's VAEs of Cosmos 2.5 and LingBot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .framework import Framework, Own, Rebound
from .graph import (
    Attention,
    Average,
    DecoderGraph,
    Downsample,
    Duplicate,
    EncoderGraph,
    Graph,
    ResBlock,
    Stage,
    Upsample,
)
from .modules import ModuleReader, name_of, read_average, read_duplicate

_BARE = ModuleReader()
Sampler = Callable[[str, Any], Any]  # reads one by its name
Shortcut = Callable[[Any], Any]  # reads the one around a stage


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


def read_wan_graph(
    vae: Any,
    model: Any,
    verb: str = "decode",
    *,
    output_dtype: torch.dtype | None = None,
    clamped: bool = True,
    modules: ModuleReader = _BARE,
    own: Own | None = None,
) -> Graph:
    """The decoder or encoder of `model`, which `vae` holds or is; the 2.2 layout is recognised by its residual stages.

    Args:
        verb, output_dtype, clamped, modules, own: see `read_graph`.

    Raises:
        ModelInvalid: a module is not what these frameworks build.
    """
    coder = model.encoder if verb == "encode" else model.decoder
    modules.expect_silu("head.1", coder.head[1])
    row = "downsamples" if verb == "encode" else "upsamples"
    layers = getattr(coder, row)
    residual = hasattr(layers[0], row)
    parts = ("encoder", "conv1") if verb == "encode" else ("decoder", "conv2")
    common: dict[str, Any] = {
        "name": name_of(vae),
        "conv_in": modules.conv("conv1", coder.conv1),
        "middle": tuple(_wan_block(modules, f"middle.{i}", block) for i, block in enumerate(coder.middle)),
        "norm_out": modules.norm("head.0", coder.head[0]),
        "conv_out": modules.conv("head.2", coder.head[2]),
        "patch_size": 2 if residual else 1,
        "output_dtype": output_dtype,
        "framework": Framework(vae, parts if model is vae else tuple(f"model.{part}" for part in parts), own),
    }
    if verb == "encode":
        quant = modules.conv("model.conv1", model.conv1)
        stages = _wan_stages(modules, row, layers, residual, modules.downsample, read_average)
        return EncoderGraph(stages=stages, quant=quant, **common)
    post_quant = modules.conv("conv2", model.conv2)
    stages = _wan_stages(modules, row, layers, residual, modules.upsample, read_duplicate)
    return DecoderGraph(stages=stages, post_quant=post_quant, clamped=clamped, **common)


def _down_stages(modules: ModuleReader, layers: Any) -> tuple[Stage[Downsample, Average], ...]:
    """The 2.2 layout has a module for each stage; the 2.1 layout has one row of blocks, cut behind each downsampler."""
    if hasattr(layers[0], "avg_shortcut"):
        return tuple(_down_stage(modules, f"down_blocks.{i}", layer) for i, layer in enumerate(layers))

    def block(name: str, layer: Any) -> ResBlock | Attention:
        return modules.attention(name, layer) if hasattr(layer, "to_qkv") else _res_block(modules, name, layer)

    return _cut_behind_samplers("down_blocks", layers, modules.downsample, block)


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


def _wan_stages(
    modules: ModuleReader, row: str, layers: Any, residual: bool, sampler: Sampler, shortcut: Shortcut
) -> tuple[Stage[Any, Any], ...]:
    """The 2.1 layout is one row, cut behind each sampler; a stage of the 2.2 layout holds a row, in any order,
    and has a shortcut."""
    if not residual:
        return _cut_behind_samplers(row, layers, sampler, partial(_wan_block, modules))
    stages = []
    for i, stage in enumerate(layers):
        named = [(f"{row}.{i}.{j}", layer) for j, layer in enumerate(getattr(stage, row))]
        samplers = [sampler(place, layer) for place, layer in named if hasattr(layer, "resample")]
        blocks = tuple(_wan_block(modules, place, layer) for place, layer in named if not hasattr(layer, "resample"))
        around = None if stage.avg_shortcut is None else shortcut(stage.avg_shortcut)
        stages.append(Stage(blocks=blocks, sampler=samplers[0] if samplers else None, shortcut=around))
    return tuple(stages)


def _wan_block(modules: ModuleReader, name: str, block: Any) -> ResBlock | Attention:
    if hasattr(block, "to_qkv"):
        return modules.attention(name, block)
    norm1, silu1, conv1, norm2, silu2, _, conv2 = block.residual
    modules.expect_silu(f"{name}.residual.1", silu1)
    modules.expect_silu(f"{name}.residual.4", silu2)
    narrow = block.in_dim == block.out_dim
    return ResBlock(
        norm1=modules.norm(f"{name}.residual.0", norm1),
        conv1=modules.conv(f"{name}.residual.2", conv1),
        norm2=modules.norm(f"{name}.residual.3", norm2),
        conv2=modules.conv(f"{name}.residual.6", conv2),
        shortcut=None if narrow else modules.conv(f"{name}.shortcut", block.shortcut),
    )


def _cut_behind_samplers(
    name: str, layers: Any, sampler: Sampler, block: Callable[[str, Any], ResBlock | Attention]
) -> tuple[Stage[Any, Any], ...]:
    """The stages of one row of blocks, of which the last has no sampler. Args: block: reads one by its name."""
    stages: list[Stage[Any, Any]] = []
    blocks: list[ResBlock | Attention] = []
    for i, layer in enumerate(layers):
        place = f"{name}.{i}"
        if hasattr(layer, "resample"):
            stages.append(Stage(blocks=tuple(blocks), sampler=sampler(place, layer), shortcut=None))
            blocks = []
        else:
            blocks.append(block(place, layer))
    return (*stages, Stage(blocks=tuple(blocks), sampler=None, shortcut=None))
