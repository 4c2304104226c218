"""Matrix products of eight-bit numbers with a scale a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from wanshim.core.shared.text import first_line

SMALLEST_SCALE = 2.0**-100  # of a row of zeros, which stays zeros
MULTIPLE = 16  # of columns in a product: what the kernels take
FEWEST_ROWS = 32  # of an int8 product on a GPU


@dataclass(frozen=True)
class Format:
    """A format in which eight bits hold a number.

    Args:
        dtype: of torch.
        largest: the largest number, which the largest of a row becomes.
        multiply: product of (rows, inner) and (inner, columns), with scales (rows, 1) and (1, columns), in a dtype.
    """

    dtype: torch.dtype
    largest: float
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


def _multiply_float8(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return _in(torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16), dtype)


def _multiply_int8(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    rows = a.size(0)
    if rows < FEWEST_ROWS:
        a = torch.nn.functional.pad(a, (0, 0, 0, FEWEST_ROWS - rows))
    return _in(torch._int_mm(a, b)[:rows].float() * scale_a * scale_b, dtype)


def _in(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another dtype. No conversion to the same one: it returns what it was given, and torch 2.11 loses the gradient
    of a compiled autograd function whose result two operators returned."""
    return x if x.dtype == dtype else x.to(dtype)


FORMATS: Mapping[str, Format] = {
    "float8": Format(torch.float8_e4m3fn, 448.0, _multiply_float8),
    "int8": Format(torch.int8, 127.0, _multiply_int8),
}


def quantize_rows(
    x: torch.Tensor, format: Format, columns: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row in eight bits, with what its largest number was divided by.

    Args:
        x: (rows, inner), floating point.
        columns: (1, inner), by which `x` is multiplied first.

    Returns:
        (rows, inner) of the format's dtype and (rows, 1) fp32. A row with a number that is not finite has a scale that
        is not finite.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        return _compiled()(x.detach(), format, columns)  # a parameter and a tensor are one kind to the compiler
    return _quantize_rows(x, format, columns)


def _quantize_rows(x: torch.Tensor, format: Format, columns: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.float()
    if columns is not None:
        x = x * columns
    scale = (x.abs().amax(-1, keepdim=True) / format.largest).clamp_min(SMALLEST_SCALE)
    scaled = x / scale
    return (scaled if format.dtype.is_floating_point else scaled.round()).to(format.dtype), scale


@cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """One pass over memory in place of six."""
    return torch.compile(_quantize_rows, dynamic=True)


def refusal(name: str, device: torch.device) -> str | None:
    """Why products in this format cannot be computed on this device, or None: a small one is."""
    from wanshim.core.compile import compiler_refusal

    if device.type == "cuda" and (reason := compiler_refusal(device)) is not None:
        return reason
    format = FORMATS[name]
    try:
        a, scale = quantize_rows(torch.ones(FEWEST_ROWS, MULTIPLE, device=device), format)
        format.multiply(a, a[:MULTIPLE].t(), scale, scale[:MULTIPLE].t(), torch.bfloat16)
    except Exception as error:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        return f"{where} multiplies no {name} in this torch: {first_line(error)}"
    return None
