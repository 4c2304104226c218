"""DiffSynth's `WanVideoVAE` and `WanVideoVAE38`, bound to the core.

Under DiffSynth's VRAM management every module sits in a wrapper that moves or casts it per call; the graph then asks
the wrapper for the module at each use, as the wrapper's own forward does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Attention, Binding, Conv, DecoderGraph, Norm, ResBlock, Stage, Upsample


def build(vae: Any) -> Binding:
    """Bind the core to `vae.model.decode(z, scale)`, which takes normalised latents and does not clamp.

    Raises:
        VaeInvalid: the decoder is not built as the releases this adapter knows build it.
    """
    from wanshim.core.decoding import Binding

    graph = read_graph(vae)
    replace = partial(_replace, vae)
    return Binding(graph=graph, target=vae, attribute="single_decode", replace=replace, entry="decode")


def _replace(vae: Any, decode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def single_decode(hidden_state: torch.Tensor, device: torch.device | str) -> Any:
        frames = decode(denormalise(vae, hidden_state.to(device)))
        return hidden_state.new_empty(0) if frames is None else frames

    return single_decode


def denormalise(vae: Any, z: torch.Tensor) -> Any:
    """Latents as the decoder reads them, with the arithmetic of `VideoVAE_.decode`."""
    mean, inverse = (value.to(dtype=z.dtype, device=z.device).view(1, -1, 1, 1, 1) for value in vae.scale)
    return z / inverse + mean


def read_graph(vae: Any) -> DecoderGraph:
    """The decoder of `vae`; the 2.2 layout is recognised by its residual stages."""
    from wanshim.core.decoding import DecoderGraph

    decoder = vae.model.decoder
    expect_silu(decoder.head[1], "head.1")
    residual = hasattr(decoder.upsamples[0], "upsamples")
    return DecoderGraph(
        name=f"{type(vae).__module__}.{type(vae).__qualname__}",
        post_quant=read_conv("conv2", vae.model.conv2),
        conv_in=read_conv("conv1", decoder.conv1),
        middle=tuple(read_block(f"middle.{i}", block) for i, block in enumerate(decoder.middle)),
        stages=_residual_stages(decoder) if residual else _plain_stages(decoder),
        norm_out=read_norm("head.0", decoder.head[0]),
        conv_out=read_conv("head.2", decoder.head[2]),
        patch_size=2 if residual else 1,
    )


def _plain_stages(decoder: Any) -> tuple[Stage, ...]:
    """The 2.1 layout: one row of blocks, cut behind each upsampler."""
    from wanshim.core.decoding import Stage

    stages: list[Stage] = []
    blocks: list[ResBlock | Attention] = []
    for i, layer in enumerate(decoder.upsamples):
        if hasattr(layer, "resample"):
            stages.append(Stage(blocks=tuple(blocks), upsample=_upsample(f"upsamples.{i}", layer), duplicate=None))
            blocks = []
        else:
            blocks.append(read_block(f"upsamples.{i}", layer))
    return (*stages, Stage(blocks=tuple(blocks), upsample=None, duplicate=None))


def _residual_stages(decoder: Any) -> tuple[Stage, ...]:
    """The 2.2 layout: each stage holds its blocks, its upsampler and its shortcut."""
    from wanshim.core.decoding import Stage, read_duplicate

    stages = []
    for i, stage in enumerate(decoder.upsamples):
        name = f"upsamples.{i}"
        layers = [(f"{name}.{j}", layer) for j, layer in enumerate(stage.upsamples)]
        samplers = [_upsample(path, layer) for path, layer in layers if hasattr(layer, "resample")]
        stages.append(
            Stage(
                blocks=tuple(read_block(path, layer) for path, layer in layers if not hasattr(layer, "resample")),
                upsample=samplers[0] if samplers else None,
                duplicate=None if stage.avg_shortcut is None else read_duplicate(stage.avg_shortcut),
            )
        )
    return tuple(stages)


def read_block(name: str, block: torch.nn.Module) -> ResBlock | Attention:
    from wanshim.core.decoding import Attention, ResBlock

    if hasattr(block, "to_qkv"):
        return Attention(
            norm=read_norm(f"{name}.norm", block.norm),
            qkv=read_conv(f"{name}.to_qkv", block.to_qkv),
            proj=read_conv(f"{name}.proj", block.proj),
        )
    norm1, silu1, conv1, norm2, silu2, _, conv2 = block.residual
    expect_silu(silu1, f"{name}.residual.1")
    expect_silu(silu2, f"{name}.residual.4")
    narrow = block.in_dim == block.out_dim
    return ResBlock(
        norm1=read_norm(f"{name}.residual.0", norm1),
        conv1=read_conv(f"{name}.residual.2", conv1),
        norm2=read_norm(f"{name}.residual.3", norm2),
        conv2=read_conv(f"{name}.residual.6", conv2),
        shortcut=None if narrow else read_conv(f"{name}.shortcut", block.shortcut),
    )


def _upsample(name: str, layer: torch.nn.Module) -> Upsample:
    from wanshim.core.decoding import Upsample

    resize, conv = layer.resample
    return Upsample(
        resize=resize,
        conv=read_conv(f"{name}.resample.1", conv),
        time_conv=read_conv(f"{name}.time_conv", layer.time_conv) if layer.mode == "upsample3d" else None,
    )


def read_conv(name: str, module: torch.nn.Module, *, stride: tuple[int, ...] | None = None) -> Conv:
    from wanshim.core import decoding

    inner = unwrap(module)
    return decoding.read_conv(name, inner, None if inner is module else module.computation, stride=stride)


def read_norm(name: str, module: torch.nn.Module) -> Norm:
    from wanshim.core import decoding

    return decoding.read_norm(name, module)


def expect_silu(module: torch.nn.Module, name: str) -> None:
    from wanshim.core import decoding

    decoding.expect_silu(unwrap(module), name)


def unwrap(module: torch.nn.Module) -> Any:
    """What is inside a wrapper of DiffSynth's VRAM management, if it is one."""
    return module.module if hasattr(module, "computation") else module


BUILDERS = {"diffsynth.models.wan_video_vae.WanVideoVAE": build}
