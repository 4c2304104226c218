"""`diffsynth.fast_blocks`: a Wan DiT that generates, compiled by blocks and with products in eight bits.

Under `wanshim generate --fast`, or with WANSHIM_COMPILE=1 or WANSHIM_COMPUTE=float8 beside WANSHIM_GENERATE, a forward
without gradients runs its blocks as compiled graphs, whose Linears multiply in eight bits, with a scale for each token
and each output channel, and whose rotary embedding is real fp32 arithmetic. LoRA, norms, attention, embeddings and head
stay as they are. Frames change: the first forward of each size is computed by DiffSynth's own blocks too, and a line
says how far the two are apart. What cannot be faster stays with DiffSynth, and the report says why. Workers of
`diffsynth.generate` compute the same.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from wanshim.patching import Feature, Seam, SeamState
from wanshim.patching.fast_forward import block_seam, forward_seam

DIT = "diffsynth.models.wan_video_dit"
UPSTREAM: dict[str, Any] = {
    "upstream": "https://github.com/modelscope/DiffSynth-Studio (compile_pipeline, in the script, compiles its DiT)",
    "remove_when": "DiffSynth's blocks are as fast without a change of the script",
}


def model_of(dit: Any, *_: object, **__: object) -> Any:
    return dit


def blocks_of(dit: Any, *_: object, vace: Any = None, **__: object) -> list[Any] | str:
    """The blocks of a DiT and of its VACE, or why they cannot be faster."""
    from wanshim.adapters.diffsynth import vram
    from wanshim.adapters.diffsynth.splitting.micro_batch import known_family

    parts = [part for part in (dit, vace) if part is not None]
    if known_family(getattr(dit, "_orig_mod", dit)) is None:
        return f"{type(dit).__name__}: its blocks are not known"
    if any(map(vram.is_managed, parts)):
        return "VRAM management moves the weights inside its blocks"
    return [*dit.blocks, *(vace.vace_blocks if vace is not None else ())]


def exact(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any] | str:
    """A forward beside that of the program, whose TeaCache keeps nothing of it."""
    if kwargs.get("tea_cache") is not None:
        kwargs = {**kwargs, "tea_cache": copy.deepcopy(kwargs["tea_cache"])}
    return functools.partial(original, *args, **kwargs)


def real_rotary(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """`rope_apply` of the graphs, as in training."""
    from wanshim.adapters.diffsynth.splitting import wan

    return functools.wraps(original)(wan.real_rotary(original))


FEATURE = Feature(
    name="diffsynth.fast_blocks",
    summary="a Wan DiT that generates: compiled blocks, products in eight bits; bits change",
    switched_on_by=("compile", "compute"),
    along_with="generate",
    relies_on=(f"{DIT}:SelfAttention.forward",),
    seams=(
        forward_seam("diffsynth.pipelines.wan_video:model_fn_wan_video", model_of, blocks_of, exact, **UPSTREAM),
        block_seam(f"{DIT}:DiTBlock.forward", **UPSTREAM),
        Seam(
            f"{DIT}:rope_apply",
            real_rotary,
            in_graph=True,
            stacks=True,
            why="its complex numbers are in no kernel of a compiled graph",
            **UPSTREAM,
        ),
    ),
)
