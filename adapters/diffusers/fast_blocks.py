"""`diffusers.fast_blocks`: a Wan transformer that generates, compiled by blocks and with products in eight bits.

Under `wanshim generate --fast`, or with WANSHIM_COMPILE=1 or WANSHIM_COMPUTE=float8 beside WANSHIM_GENERATE, a forward
without gradients runs its blocks as compiled graphs, whose Linears multiply in eight bits, with a scale for each token
and each output channel. LoRA, norms, attention, embeddings and head stay as they are. Frames change: the first forward
of each size is computed by diffusers' own blocks too, and a line says how far the two are apart. What cannot be faster
stays with diffusers, and the report says why. Workers of `diffusers.generate` compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wanshim.patching import Feature, Seam
from wanshim.patching.fast_forward import block_seam, forward_seam

MODELS = "diffusers.models.transformers"
UPSTREAM: dict[str, Any] = {
    "upstream": "https://github.com/huggingface/diffusers (compile_repeated_blocks and torchao change the script)",
    "remove_when": "diffusers' blocks are as fast without a change of the script",
}


def blocks_of(model: Any, *_: object, **__: object) -> list[Any] | str:
    """The blocks of a transformer, or why they cannot be faster."""
    if not hasattr(model, "blocks"):
        return f"{type(model).__name__}: its blocks are not known"
    if getattr(model, "_parallel_config", None) is not None:
        return "diffusers exchanges tokens inside its blocks (enable_parallelism)"
    return [*model.blocks, *getattr(model, "vace_blocks", ())]


def exact(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Callable[[], Any] | str:
    """A forward beside that of the program, whose hooks keep nothing of it; or why there is none."""
    from wanshim.adapters.diffusers import offload

    if offload.is_offloaded(model):
        return "its offload counts forwards"
    if not getattr(model, "is_cache_enabled", False):
        return partial(original, model, *args, **kwargs)

    def without_cache() -> Any:
        with offload.without_hooks(model):
            return original(model, *args, **kwargs)

    return without_cache


def _model(model: Any, *_: object, **__: object) -> Any:
    return model


def _forward(target: str) -> Seam:
    required = target.startswith("transformer_wan:")
    return forward_seam(f"{MODELS}.{target}.forward", _model, blocks_of, exact, required=required, **UPSTREAM)


def _block(target: str) -> Seam:
    required = target.startswith("transformer_wan:")
    return block_seam(f"{MODELS}.{target}.forward", required=required, **UPSTREAM)


FEATURE = Feature(
    name="diffusers.fast_blocks",
    summary="a Wan transformer that generates: compiled blocks, products in eight bits; bits change",
    switched_on_by=("compile", "compute"),
    along_with="generate",
    seams=(
        _forward("transformer_wan:WanTransformer3DModel"),
        _forward("transformer_wan_vace:WanVACETransformer3DModel"),
        _forward("transformer_wan_animate:WanAnimateTransformer3DModel"),
        _forward("transformer_qwenimage:QwenImageTransformer2DModel"),  # to say that it is not
        _block("transformer_wan:WanTransformerBlock"),
        _block("transformer_wan_vace:WanVACETransformerBlock"),
        _block("transformer_wan_animate:WanTransformerBlock"),
    ),
)
