"""The replacement of a function of a transformer's block, with fewer kernels and the same bits.

Importing this module imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanshim.patching import Seam, SeamState

if TYPE_CHECKING:
    import torch

    from wanshim.core.strict_blocks import StrictOperators

    Method = Callable[..., torch.Tensor]


def steps_seam(
    target: str,
    method: Callable[[StrictOperators, Method], Method],
    tokens: int,
    name: str,
    *,
    upstream: str,
    remove_when: str,
    required: bool = True,
) -> Seam:
    """The seam of a function whose steps kernels compute, wherever the operators serve its tokens.

    Args:
        method: from the operators and the original, a function with the original's arguments.
        tokens: the place of the tokens among these arguments.
        name: their name there.
    """

    def make(original: Method, seam: SeamState) -> Method:
        from torch.compiler import is_compiling

        from wanshim.core.fast_blocks import compiling
        from wanshim.core.shared.fallback import or_framework
        from wanshim.core.strict_blocks import StrictOperators

        operators = StrictOperators(seam.notes.append)
        ours = or_framework(method(operators, original), original, seam.fall_back)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            if is_compiling() or seam.off:
                return original(*args, **kwargs)
            x = args[tokens] if len(args) > tokens else kwargs.get(name)
            # A compiled block takes the place of these.
            if not operators.serve(x) or compiling() is not None or not seam.enter():
                return original(*args, **kwargs)
            return ours(*args, **kwargs)

        return call

    return Seam(
        target,
        make,
        in_graph=True,
        stacks=True,
        required=required,
        why="each step between a block's products takes several kernels: a tenth of the time of a denoising step",
        upstream=upstream,
        remove_when=remove_when,
    )
