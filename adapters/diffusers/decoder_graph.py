"""diffusers' `AutoencoderKLWan` as a decoder graph, for both layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from wanshim.core.decoding import (
    Attention,
    Binding,
    Conv,
    DecoderGraph,
    Duplicate,
    Norm,
    ResBlock,
    Stage,
    TileSettings,
    Upsample,
)
from wanshim.errors import DecodeInvalid


def build(vae: Any) -> Binding:
    """Bind the core to `vae._decode`, which `decode` calls once per sample when slicing is on.

    Raises:
        DecodeInvalid: the decoder is not built as the releases this adapter knows build it.
    """
    graph = read_graph(vae)

    def replace(decode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        from diffusers.models.autoencoders.vae import DecoderOutput

        def _decode(z: Any, return_dict: bool = True) -> Any:
            sample = decode(z, tiles=tile_settings(vae), lean=bool(vae.use_tiling))
            if sample is None:
                sample = z.new_empty(0)
            return DecoderOutput(sample=sample) if return_dict else (sample,)

        return _decode

    return Binding(graph=graph, target=vae, attribute="_decode", replace=replace)


def tile_settings(vae: Any) -> TileSettings:
    """The VAE's own tile sizes, in pixels."""
    return TileSettings(
        min_height=int(vae.tile_sample_min_height),
        min_width=int(vae.tile_sample_min_width),
        stride_height=int(vae.tile_sample_stride_height),
        stride_width=int(vae.tile_sample_stride_width),
    )


def read_graph(vae: Any, name: str = "AutoencoderKLWan") -> DecoderGraph:
    """The decoder of a VAE whose modules are named as diffusers names them."""
    decoder = vae.decoder
    _expect_silu(decoder.nonlinearity, "decoder.nonlinearity")
    return DecoderGraph(
        name=f"{type(vae).__module__}.{name}",
        post_quant=_conv("post_quant_conv", vae.post_quant_conv),
        conv_in=_conv("conv_in", decoder.conv_in),
        middle=_middle(decoder.mid_block),
        stages=tuple(_stage(f"up_blocks.{i}", block) for i, block in enumerate(decoder.up_blocks)),
        norm_out=_norm("norm_out", decoder.norm_out),
        conv_out=_conv("conv_out", decoder.conv_out),
        patch_size=int(vae.config.patch_size or 1),
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
        duplicate=None if shortcut is None else _duplicate(shortcut),
    )


def _res_block(name: str, block: Any) -> ResBlock:
    _expect_silu(block.nonlinearity, f"{name}.nonlinearity")
    shortcut = block.conv_shortcut
    return ResBlock(
        norm1=_norm(f"{name}.norm1", block.norm1),
        conv1=_conv(f"{name}.conv1", block.conv1),
        norm2=_norm(f"{name}.norm2", block.norm2),
        conv2=_conv(f"{name}.conv2", block.conv2),
        shortcut=None if isinstance(shortcut, nn.Identity) else _conv(f"{name}.conv_shortcut", shortcut),
    )


def _attention(name: str, block: Any) -> Attention:
    return Attention(
        norm=_norm(f"{name}.norm", block.norm),
        qkv=_conv(f"{name}.to_qkv", block.to_qkv),
        proj=_conv(f"{name}.proj", block.proj),
    )


def _upsample(name: str, block: Any) -> Upsample:
    if block.mode not in ("upsample2d", "upsample3d"):
        raise _unknown(f"{name}.mode", block.mode, "upsample2d or upsample3d")
    resize, conv = block.resample
    if not isinstance(resize, nn.Upsample) or resize.mode != "nearest-exact" or resize.scale_factor != (2.0, 2.0):
        raise _unknown(f"{name}.resample.0", resize, "nearest-exact upsampling by 2")
    time_conv = _conv(f"{name}.time_conv", block.time_conv) if block.mode == "upsample3d" else None
    return Upsample(resize=resize, conv=_conv(f"{name}.resample.1", conv), time_conv=time_conv)


def _duplicate(module: Any) -> Duplicate:
    return Duplicate(
        module=module,
        factor_t=int(module.factor_t),
        factor_s=int(module.factor_s),
        repeats=int(module.repeats),
        out_channels=int(module.out_channels),
    )


def _conv(name: str, module: Any) -> Conv:
    if not isinstance(module, (nn.Conv2d, nn.Conv3d)) or set(module.stride) != {1}:
        raise _unknown(name, module, "a convolution of stride 1")
    return Conv(name=name, module=module)


def _norm(name: str, module: Any) -> Norm:
    """`WanRMS_norm` normalises with torch's default eps; vLLM-Omni's stand-in carries its own."""
    if not getattr(module, "channel_first", False):
        raise _unknown(name, module, "an RMS norm over the channel dimension")
    return Norm(module=module, scale=float(module.scale), eps=float(getattr(module, "epsilon", 1e-12)))


def _expect_silu(module: Any, name: str) -> None:
    if not isinstance(module, nn.SiLU):
        raise _unknown(name, module, "SiLU")


def _unknown(name: str, found: object, expected: str) -> DecodeInvalid:
    return DecodeInvalid(
        f"AutoencoderKLWan: {name} is {found!r}",
        expected=expected,
        hint="This release builds its decoder in a way wanshim does not know; the decode is left as it was",
    )
