"""Reads single modules of a VAE: convolutions, norms, what resamples. All names of layers meet here.

Whatever is not built as the known frameworks build it is an error that names the module: a graph is read whole or not
at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from wanshim.errors import ModelInvalid

from .graph import Attention, Average, Conv, Downsample, Duplicate, Norm, Upsample


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
            raise unknown(name, inner, f"a convolution of stride {stride or 1}")
        return Conv(name=name, module=inner, resolve=resolve)

    def norm(self, name: str, module: Any) -> Norm:
        """An RMS norm. torch's `normalize` has eps 1e-12; vLLM-Omni's stand-in carries an epsilon of its own."""
        if not getattr(module, "channel_first", False):
            raise unknown(name, module, "an RMS norm over the channel dimension")
        return Norm(module=module, scale=float(module.scale), eps=float(getattr(module, "epsilon", 1e-12)))

    def expect_silu(self, name: str, module: Any) -> None:
        inner, _ = self.unwrap(module)
        if not isinstance(inner, nn.SiLU):
            raise unknown(name, inner, "SiLU")

    def attention(self, name: str, block: Any) -> Attention:
        return Attention(
            norm=self.norm(f"{name}.norm", block.norm),
            qkv=self.conv(f"{name}.to_qkv", block.to_qkv),
            proj=self.conv(f"{name}.proj", block.proj),
        )

    def upsample(self, name: str, block: Any) -> Upsample:
        if block.mode not in ("upsample2d", "upsample3d"):
            raise unknown(f"{name}.mode", block.mode, "upsample2d or upsample3d")
        resize, conv = block.resample
        inner, _ = self.unwrap(resize)
        if not isinstance(inner, nn.Upsample) or inner.mode != "nearest-exact" or inner.scale_factor != (2.0, 2.0):
            raise unknown(f"{name}.resample.0", inner, "nearest-exact upsampling by 2")
        time_conv = self.conv(f"{name}.time_conv", block.time_conv) if block.mode == "upsample3d" else None
        large = self.conv(f"{name}.resample.1", conv)
        if large.kernel != (3, 3):
            raise unknown(large.name, large.module, "a convolution of 3 x 3 pixels")
        return Upsample(resize=resize, conv=large, time_conv=time_conv)

    def downsample(self, name: str, block: Any) -> Downsample:
        if block.mode not in ("downsample2d", "downsample3d"):
            raise unknown(f"{name}.mode", block.mode, "downsample2d or downsample3d")
        pad, conv = block.resample
        inner, _ = self.unwrap(pad)
        if not isinstance(inner, nn.ZeroPad2d) or tuple(inner.padding) != (0, 1, 0, 1):
            raise unknown(f"{name}.resample.0", inner, "a row and a column of zeros at the end")
        timed = block.mode == "downsample3d"
        return Downsample(
            conv=self.conv(f"{name}.resample.1", conv, stride=(2, 2)),
            time_conv=self.conv(f"{name}.time_conv", block.time_conv, stride=(2, 1, 1)) if timed else None,
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


def name_of(module: Any) -> str:
    """The class of a VAE or of a module in it, as plans and messages name it."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def unknown(name: str, found: object, expected: str) -> ModelInvalid:
    nested = isinstance(found, nn.Module) and found._modules  # printed over many lines
    return ModelInvalid(
        f"{name} of the VAE is {f'a {name_of(found)}' if nested else repr(found)}",
        expected=expected,
        hint="This release builds its VAE in a way wanshim does not know; the VAE is left as it was",
    )
