"""The assembly of a Triton kernel for an H100, compiled without a GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def ptx(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, object], aligned: Collection[str], **options: int
) -> str:
    """The PTX of `kernel`.

    Args:
        types: of its arguments, as Triton writes them, but for the constants.
        aligned: the arguments that are multiples of 16.
        options: of the compilation, such as `num_warps`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert isinstance(text, str)
    return text
