"""Reads the graphs from modules named as diffusers names them, or as Wan's own code does.

All names of layers meet here. diffusers' names are those of its Wan and Qwen-Image VAEs, and of most forks of them.
DiffSynth keeps Wan's names, and so do FastVideo's VAEs of Cosmos 2.5 and LingBot. Whatever is not built as the known
frameworks build it is an error that names the module: a graph is read whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from wanshim.errors import ModelInvalid

from .framework import Framework, Own, Rebound
from .graph import (
    Attention,
    Conv,
    DecoderGraph,
    EncoderGraph,
    Graph,
    Norm,
    ResBlock,
    Sampler,
    Shortcut,
    Stage,
)

ReadSampler = Callable[[str, Any], Sampler]  # by its name


def _bare(module: Any) -> tuple[Any, Callable[[], nn.Module] | None]:
    return module, None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReader:
    """Reads modules that a framework may keep in wrappers.

    Args:
        unwrap: returns the module inside a wrapper, and what gives the module to use at each call (see `Conv`); None
            where the module is the one to use.
    """

    unwrap: Callable[[Any], tuple[Any, Callable[[], nn.Module] | None]] = _bare

    def conv(self, name: str, module: Any, *, stride: tuple[int, ...] | None = None) -> Conv:
        """A convolution, known to be of this stride; None: 1 everywhere."""
        inner, resolve = self.unwrap(module)
        if not isinstance(inner, (nn.Conv2d, nn.Conv3d)) or inner.stride != (stride or (1,) * len(inner.stride)):
            raise _unknown(name, inner, f"a convolution of stride {stride or 1}")
        return Conv(name=name, module=inner, resolve=resolve)

    def norm(self, name: str, module: Any) -> Norm:
        """An RMS norm. torch's `normalize` has eps 1e-12; vLLM-Omni's stand-in carries an epsilon of its own."""
        if not getattr(module, "channel_first", False):
            raise _unknown(name, module, "an RMS norm over the channel dimension")
        return Norm(module=module, scale=float(module.scale), eps=float(getattr(module, "epsilon", 1e-12)))

    def expect_silu(self, name: str, module: Any) -> None:
        inner, _ = self.unwrap(module)
        if not isinstance(inner, nn.SiLU):
            raise _unknown(name, inner, "SiLU")

    def attention(self, name: str, block: Any) -> Attention:
        return Attention(
            norm=self.norm(f"{name}.norm", block.norm),
            qkv=self.conv(f"{name}.to_qkv", block.to_qkv),
            proj=self.conv(f"{name}.proj", block.proj),
        )

    def upsample(self, name: str, block: Any) -> Sampler:
        if block.mode not in ("upsample2d", "upsample3d"):
            raise _unknown(f"{name}.mode", block.mode, "upsample2d or upsample3d")
        resize, conv = block.resample
        inner, _ = self.unwrap(resize)
        if not isinstance(inner, nn.Upsample) or inner.mode != "nearest-exact" or inner.scale_factor != (2.0, 2.0):
            raise _unknown(f"{name}.resample.0", inner, "nearest-exact upsampling by 2")
        time_conv = self.conv(f"{name}.time_conv", block.time_conv) if block.mode == "upsample3d" else None
        large = self.conv(f"{name}.resample.1", conv)
        if large.kernel != (3, 3):
            raise _unknown(large.name, large.module, "a convolution of 3 x 3 pixels")
        return Sampler(resize=resize, conv=large, time_conv=time_conv)

    def downsample(self, name: str, block: Any) -> Sampler:
        if block.mode not in ("downsample2d", "downsample3d"):
            raise _unknown(f"{name}.mode", block.mode, "downsample2d or downsample3d")
        pad, conv = block.resample
        inner, _ = self.unwrap(pad)
        if not isinstance(inner, nn.ZeroPad2d) or tuple(inner.padding) != (0, 1, 0, 1):
            raise _unknown(f"{name}.resample.0", inner, "a row and a column of zeros at the end")
        timed = block.mode == "downsample3d"
        return Sampler(
            conv=self.conv(f"{name}.resample.1", conv, stride=(2, 2)),
            time_conv=self.conv(f"{name}.time_conv", block.time_conv, stride=(2, 1, 1)) if timed else None,
        )


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
        "name": _name_of(vae),
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
        stages=_stages(modules, "up_blocks", coder.up_blocks, "upsampler", modules.upsample),
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
        "name": _name_of(vae),
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
        stages = _wan_stages(modules, row, layers, residual, modules.downsample)
        return EncoderGraph(stages=stages, quant=quant, **common)
    post_quant = modules.conv("conv2", model.conv2)
    stages = _wan_stages(modules, row, layers, residual, modules.upsample)
    return DecoderGraph(stages=stages, post_quant=post_quant, clamped=clamped, **common)


def _down_stages(modules: ModuleReader, layers: Any) -> tuple[Stage, ...]:
    """The 2.2 layout has a module for each stage; the 2.1 layout has one row of blocks, cut behind each downsampler."""
    if hasattr(layers[0], "avg_shortcut"):
        return _stages(modules, "down_blocks", layers, "downsampler", modules.downsample)

    def block(name: str, layer: Any) -> ResBlock | Attention:
        return modules.attention(name, layer) if hasattr(layer, "to_qkv") else _res_block(modules, name, layer)

    return _cut_behind_samplers("down_blocks", layers, modules.downsample, block)


def _middle(modules: ModuleReader, block: Any) -> tuple[ResBlock | Attention, ...]:
    parts: list[ResBlock | Attention] = [_res_block(modules, "mid_block.resnets.0", block.resnets[0])]
    for i, (attention, resnet) in enumerate(zip(block.attentions, block.resnets[1:])):
        if attention is not None:
            parts.append(modules.attention(f"mid_block.attentions.{i}", attention))
        parts.append(_res_block(modules, f"mid_block.resnets.{i + 1}", resnet))
    return tuple(parts)


def _stages(modules: ModuleReader, name: str, layers: Any, kind: str, read: ReadSampler) -> tuple[Stage, ...]:
    return tuple(_stage(modules, f"{name}.{i}", layer, kind, read) for i, layer in enumerate(layers))


def _stage(modules: ModuleReader, name: str, block: Any, kind: str, read: ReadSampler) -> Stage:
    sampler = getattr(block, kind) if hasattr(block, kind) else (block.upsamplers or [None])[0]
    shortcut = getattr(block, "avg_shortcut", None)
    return Stage(
        blocks=tuple(_res_block(modules, f"{name}.resnets.{i}", resnet) for i, resnet in enumerate(block.resnets)),
        sampler=None if sampler is None else read(f"{name}.{kind}", sampler),
        shortcut=None if shortcut is None else _read_shortcut(shortcut),
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
    modules: ModuleReader, row: str, layers: Any, residual: bool, sampler: ReadSampler
) -> tuple[Stage, ...]:
    """The 2.1 layout is one row, cut behind each sampler; a stage of the 2.2 layout holds a row, in any order,
    and has a shortcut."""
    if not residual:
        return _cut_behind_samplers(row, layers, sampler, partial(_wan_block, modules))
    stages = []
    for i, stage in enumerate(layers):
        named = [(f"{row}.{i}.{j}", layer) for j, layer in enumerate(getattr(stage, row))]
        samplers = [sampler(place, layer) for place, layer in named if hasattr(layer, "resample")]
        blocks = tuple(_wan_block(modules, place, layer) for place, layer in named if not hasattr(layer, "resample"))
        around = None if stage.avg_shortcut is None else _read_shortcut(stage.avg_shortcut)
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
    name: str, layers: Any, sampler: ReadSampler, block: Callable[[str, Any], ResBlock | Attention]
) -> tuple[Stage, ...]:
    """The stages of one row of blocks, of which the last has no sampler. Args: block: reads one by its name."""
    stages: list[Stage] = []
    blocks: list[ResBlock | Attention] = []
    for i, layer in enumerate(layers):
        place = f"{name}.{i}"
        if hasattr(layer, "resample"):
            stages.append(Stage(blocks=tuple(blocks), sampler=sampler(place, layer), shortcut=None))
            blocks = []
        else:
            blocks.append(block(place, layer))
    return (*stages, Stage(blocks=tuple(blocks), sampler=None, shortcut=None))


def _read_shortcut(module: Any) -> Shortcut:
    return Shortcut(
        module=module,
        factor_t=int(module.factor_t),
        factor_s=int(module.factor_s),
        group=int(module.repeats if hasattr(module, "repeats") else module.group_size),
        out_channels=int(module.out_channels),
    )


def _name_of(module: Any) -> str:
    """The class of a VAE or of a module in it, as plans and messages name it."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _unknown(name: str, found: object, expected: str) -> ModelInvalid:
    nested = isinstance(found, nn.Module) and found._modules  # printed over many lines
    return ModelInvalid(
        f"{name} of the VAE is {f'a {_name_of(found)}' if nested else repr(found)}",
        expected=expected,
        hint="This release builds its VAE in a way wanshim does not know; the VAE is left as it was",
    )
