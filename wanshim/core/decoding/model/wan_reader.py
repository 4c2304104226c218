"""Reads the graphs from modules named as Wan's own code names them.

DiffSynth keeps these names, and so do FastVideo's VAEs of Cosmos 2.5 and LingBot.
"""

from __future__ import annotations

from typing import Any

import torch

from .encoder_graph import DownStage, EncoderGraph
from .graph import Attention, DecoderGraph, ResBlock, Stage
from .modules import ModuleReader, name_of, read_average, read_duplicate

_BARE = ModuleReader()


def read_wan_graph(
    vae: Any,
    model: Any,
    output_dtype: torch.dtype | None = None,
    *,
    clamped: bool = True,
    modules: ModuleReader = _BARE,
) -> DecoderGraph:
    """The decoder of `model`, which `vae` holds; the 2.2 layout is recognised by its residual stages.

    Args:
        output_dtype: what the framework converts its frames to.
        clamped: the framework limits its frames to -1..1.
        modules: reads what the framework wraps.

    Raises:
        VaeInvalid: a module is not what these frameworks build.
    """
    decoder = model.decoder
    modules.expect_silu("head.1", decoder.head[1])
    residual = hasattr(decoder.upsamples[0], "upsamples")
    return DecoderGraph(
        name=name_of(vae),
        post_quant=modules.conv("conv2", model.conv2),
        conv_in=modules.conv("conv1", decoder.conv1),
        middle=tuple(_block(modules, f"middle.{i}", block) for i, block in enumerate(decoder.middle)),
        stages=_residual_stages(modules, decoder) if residual else _plain_stages(modules, decoder),
        norm_out=modules.norm("head.0", decoder.head[0]),
        conv_out=modules.conv("head.2", decoder.head[2]),
        patch_size=2 if residual else 1,
        output_dtype=output_dtype,
        clamped=clamped,
    )


def read_wan_encoder(
    vae: Any, model: Any, output_dtype: torch.dtype | None = None, *, modules: ModuleReader = _BARE
) -> EncoderGraph:
    """The encoder of `model`, which `vae` holds.

    Args:
        output_dtype: what the framework converts its latents to.
        modules: reads what the framework wraps.

    Raises:
        VaeInvalid: a module is not what these frameworks build.
    """
    encoder = model.encoder
    modules.expect_silu("head.1", encoder.head[1])
    residual = hasattr(encoder.downsamples[0], "downsamples")
    return EncoderGraph(
        name=name_of(vae),
        conv_in=modules.conv("conv1", encoder.conv1),
        stages=_residual_down_stages(modules, encoder) if residual else _plain_down_stages(modules, encoder),
        middle=tuple(_block(modules, f"middle.{i}", block) for i, block in enumerate(encoder.middle)),
        norm_out=modules.norm("head.0", encoder.head[0]),
        conv_out=modules.conv("head.2", encoder.head[2]),
        quant=modules.conv("model.conv1", model.conv1),
        patch_size=2 if residual else 1,
        output_dtype=output_dtype,
    )


def _plain_stages(modules: ModuleReader, decoder: Any) -> tuple[Stage, ...]:
    """The 2.1 layout: one row of blocks, cut behind each upsampler."""
    stages: list[Stage] = []
    blocks: list[ResBlock | Attention] = []
    for i, layer in enumerate(decoder.upsamples):
        name = f"upsamples.{i}"
        if hasattr(layer, "resample"):
            stages.append(Stage(blocks=tuple(blocks), upsample=modules.upsample(name, layer), duplicate=None))
            blocks = []
        else:
            blocks.append(_block(modules, name, layer))
    return (*stages, Stage(blocks=tuple(blocks), upsample=None, duplicate=None))


def _residual_stages(modules: ModuleReader, decoder: Any) -> tuple[Stage, ...]:
    """The 2.2 layout: each stage holds its blocks, its upsampler and its shortcut."""
    stages = []
    for i, stage in enumerate(decoder.upsamples):
        layers = [(f"upsamples.{i}.{j}", layer) for j, layer in enumerate(stage.upsamples)]
        samplers = [modules.upsample(name, layer) for name, layer in layers if hasattr(layer, "resample")]
        stages.append(
            Stage(
                blocks=tuple(_block(modules, name, layer) for name, layer in layers if not hasattr(layer, "resample")),
                upsample=samplers[0] if samplers else None,
                duplicate=None if stage.avg_shortcut is None else read_duplicate(stage.avg_shortcut),
            )
        )
    return tuple(stages)


def _plain_down_stages(modules: ModuleReader, encoder: Any) -> tuple[DownStage, ...]:
    """The 2.1 layout: one row of blocks, cut behind each downsampler."""
    stages: list[DownStage] = []
    blocks: list[ResBlock | Attention] = []
    for i, layer in enumerate(encoder.downsamples):
        name = f"downsamples.{i}"
        if hasattr(layer, "resample"):
            stages.append(DownStage(blocks=tuple(blocks), downsample=modules.downsample(name, layer), average=None))
            blocks = []
        else:
            blocks.append(_block(modules, name, layer))
    return (*stages, DownStage(blocks=tuple(blocks), downsample=None, average=None))


def _residual_down_stages(modules: ModuleReader, encoder: Any) -> tuple[DownStage, ...]:
    """The 2.2 layout: each stage holds its blocks, its downsampler and its shortcut."""
    stages = []
    for i, stage in enumerate(encoder.downsamples):
        layers = [(f"downsamples.{i}.{j}", layer) for j, layer in enumerate(stage.downsamples)]
        samplers = [modules.downsample(name, layer) for name, layer in layers if hasattr(layer, "resample")]
        stages.append(
            DownStage(
                blocks=tuple(_block(modules, name, layer) for name, layer in layers if not hasattr(layer, "resample")),
                downsample=samplers[0] if samplers else None,
                average=read_average(stage.avg_shortcut),
            )
        )
    return tuple(stages)


def _block(modules: ModuleReader, name: str, block: Any) -> ResBlock | Attention:
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
