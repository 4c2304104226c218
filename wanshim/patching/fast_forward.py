"""The replacements of a transformer's forward, and of its blocks' forwards, that are faster and have other bits.

Importing this module imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wanshim.core.shared.fallback import Fallback, or_framework
from wanshim.patching import Seam, SeamState
from wanshim.patching.seam import at_compile_time
from wanshim.settings import FAST_FIELDS

if TYPE_CHECKING:
    from torch import nn

    from wanshim.core.fast_blocks import Options
    from wanshim.settings import Settings

WHY = "a block's products take twice the time of eight bits, and each step between them kernels of its own"
COMPILED = "the program has compiled it"
_MADE: list[SeamState] = []  # those of forwards


def is_on() -> bool:
    """Whether forwards of this process are fast."""
    return any(not seam.off for seam in _MADE)


def forward_seam(
    target: str,
    model_of: Callable[..., nn.Module],
    blocks_of: Callable[..., Sequence[nn.Module] | str],
    exact: Callable[..., Callable[[], Any] | str],
    *,
    upstream: str,
    remove_when: str,
    required: bool = True,
) -> Seam:
    """The seam of a forward.

    Args:
        model_of: from its arguments, the transformer.
        blocks_of: from its arguments, the blocks; or why they cannot be faster.
        exact: from the original and its arguments, what computes it beside the forward of the program, which goes on
            as if that had not been; or why nothing can.
    """

    def make(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        from torch.compiler import is_compiling

        from wanshim.core.fast_blocks import FastForward

        def close(text: str) -> None:
            seam.notes.closing = text

        fast = FastForward(lambda text: seam.notes.append(text), close)
        _MADE.append(seam)

        @at_compile_time
        def left_to_graph() -> None:
            if COMPILED not in seam.fallbacks and seam.enter():
                seam.fall_back(COMPILED)

        def run(*args: Any, **kwargs: Any) -> Any:
            blocks = blocks_of(*args, **kwargs)
            if isinstance(blocks, str):
                raise Fallback(blocks)
            compute = functools.partial(original, *args, **kwargs)
            beside = exact(original, *args, **kwargs)
            return fast.run(model_of(*args, **kwargs), blocks, _options(seam.settings), (args, kwargs), compute, beside)

        ours = or_framework(
            run, original, seam.fall_back, strict=lambda: bool(_options(seam.settings).strict), on_error=seam.fail
        )

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                left_to_graph()
                return original(*args, **kwargs)
            if seam.off or not fast.serves((args, kwargs)) or not seam.enter():
                return original(*args, **kwargs)
            return ours(*args, **kwargs)

        return forward

    return Seam(
        target, make, in_graph=True, stacks=True, required=required, why=WHY, upstream=upstream, remove_when=remove_when
    )


def block_seam(target: str, *, upstream: str, remove_when: str, required: bool = True) -> Seam:
    """The seam of a block's forward, which is compiled while a fast forward runs. It counts no calls but those that are
    left to the framework: a forward's are counted by its own seam."""

    def make(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        from torch.compiler import is_compiling

        from wanshim.core.fast_blocks import compiling

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = None if is_compiling() or seam.off else compiling()
            if run is None:
                return original(self, *args, **kwargs)
            try:
                return run.block(original, self, *args, **kwargs)
            except Fallback as reason:
                if seam.enter():
                    seam.fall_back(str(reason))
            return original(self, *args, **kwargs)

        return forward

    return Seam(
        target, make, in_graph=True, stacks=True, required=required, why=WHY, upstream=upstream, remove_when=remove_when
    )


def _options(read: Settings) -> Options:
    """Options that are asked for; of a feature that is selected by name alone, all of them."""
    from wanshim.core.fast_blocks import Options

    strict = frozenset(field for field in ("compile", "compute") if read.is_on(field) and read.insists_on(field))
    if not {"compile", "compute"} & read.sources.keys():
        return Options(compute=str(FAST_FIELDS["compute"]), compiles=True)
    compute = None if read.compute in (None, "off") else read.compute
    return Options(compute=compute, compiles=read.compile, strict=strict)
