"""Reads the graphs from modules named as Wan's own code names them.

DiffSynth keeps these names, and so do FastVideo's VAEs of Cosmos 2.5 and LingBot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .encoder_graph import EncoderGraph, Graph
from .framework import Framework, Own
from .graph import Attention, DecoderGraph, ResBlock, Stage
from .modules import ModuleReader, name_of, read_average, read_duplicate

_BARE = ModuleReader()
_Row = tuple[tuple[ResBlock | Attention, ...], Any]  # blocks and the sampler behind them, if any
Sampler = Callable[[str, Any], Any]  # reads one by its name
Shortcut = Callable[[Any], Any]  # reads the one around a stage


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
        "middle": tuple(_block(modules, f"middle.{i}", block) for i, block in enumerate(coder.middle)),
        "norm_out": modules.norm("head.0", coder.head[0]),
        "conv_out": modules.conv("head.2", coder.head[2]),
        "patch_size": 2 if residual else 1,
        "output_dtype": output_dtype,
        "framework": Framework(vae, parts if model is vae else tuple(f"model.{part}" for part in parts), own),
    }
    if verb == "encode":
        quant = modules.conv("model.conv1", model.conv1)
        stages = _stages(modules, row, layers, residual, modules.downsample, read_average)
        return EncoderGraph(stages=stages, quant=quant, **common)
    post_quant = modules.conv("conv2", model.conv2)
    stages = _stages(modules, row, layers, residual, modules.upsample, read_duplicate)
    return DecoderGraph(stages=stages, post_quant=post_quant, clamped=clamped, **common)


def _rows(modules: ModuleReader, name: str, layers: Any, sampler: Sampler) -> Iterator[_Row]:
    """A row of blocks, cut behind each sampler; what follows the last one has none."""
    blocks: list[ResBlock | Attention] = []
    for i, layer in enumerate(layers):
        place = f"{name}.{i}"
        if hasattr(layer, "resample"):
            yield tuple(blocks), sampler(place, layer)
            blocks = []
        else:
            blocks.append(_block(modules, place, layer))
    yield tuple(blocks), None


def _row_of_stage(modules: ModuleReader, name: str, layers: Any, sampler: Sampler) -> _Row:
    """The blocks and the sampler that a stage of the 2.2 layout holds, in any order."""
    named = [(f"{name}.{j}", layer) for j, layer in enumerate(layers)]
    samplers = [sampler(place, layer) for place, layer in named if hasattr(layer, "resample")]
    blocks = tuple(_block(modules, place, layer) for place, layer in named if not hasattr(layer, "resample"))
    return blocks, samplers[0] if samplers else None


def _stages(
    modules: ModuleReader, row: str, layers: Any, residual: bool, sampler: Sampler, shortcut: Shortcut
) -> tuple[Stage[Any, Any], ...]:
    """The 2.1 layout is one row, cut behind each sampler; a stage of the 2.2 layout holds a row, and has a shortcut."""
    if not residual:
        rows = _rows(modules, row, layers, sampler)
        return tuple(Stage(blocks=blocks, sampler=found, shortcut=None) for blocks, found in rows)
    stages = []
    for i, stage in enumerate(layers):
        blocks, found = _row_of_stage(modules, f"{row}.{i}", getattr(stage, row), sampler)
        around = None if stage.avg_shortcut is None else shortcut(stage.avg_shortcut)
        stages.append(Stage(blocks=blocks, sampler=found, shortcut=around))
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
