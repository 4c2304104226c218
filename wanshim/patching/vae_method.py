"""The replacement of a VAE's decode or encode: all ranks share it, or the framework does it and the report says why.

Importing this module imports no torch: what the calls of a VAE need is made at the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.core.shared.fallback import cause_of, framework_computes, or_framework
from wanshim.patching import SeamState
from wanshim.patching.seam import at_compile_time

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Compute, Graph, KernelsMissing, VaeCache, VaeOptions

_SHARES, _PREPARES = "_wanshim_shares_ranks", "_wanshim_prepares"
COMPILED = "compiled by torch.compile, whose calls are counted once"


def replace_method(
    compute: Compute,
    read: Callable[[Any], Graph],
    *,
    ranks: Callable[[Any], dict[str, Any]] = lambda vae: {},
    applies: Callable[..., bool] = lambda *args, **kwargs: True,
    vae_of: Callable[[Any], Any] = lambda vae: vae,
    verb: str = "decode",
) -> Callable[[Callable[..., Any], SeamState], Callable[..., Any]]:
    """Makes the replacement of a VAE's method from the original and its seam.

    Args:
        compute: the method by the core's call.
        read: builds the graph of a VAE.
        ranks: called with the method's object; returns which ranks share it and which get the result, as
            `VaeCache.run` takes them, or raises VaeFallback.
        applies: called with the arguments of the method; False: the original runs, and nothing is reported.
        vae_of: returns the VAE of the method's object.
        verb: decode or encode.
    """

    def make(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        @cache
        def vaes() -> VaeCache:
            from wanshim.core.decoding import VaeCache

            return VaeCache(read, verb)

        @at_compile_time
        def left_to_graph() -> None:
            if COMPILED not in seam.fallbacks and not framework_computes() and seam.enter():
                seam.fall_back(COMPILED)

        def shared(self: Any, *args: Any, **kwargs: Any) -> Any:
            from wanshim.core.decoding import VaeFallback, input_first, vae_cache

            options = _options(verb, seam)

            def call(given: torch.Tensor, *, lean: bool = False, **of_call: Any) -> torch.Tensor:
                is_part = not _is_asked_for(verb, seam)
                if is_part and lean:
                    raise VaeFallback("tiles, whose frames are others than whole ones")
                if is_part and not vae_cache.gains_alone(given):
                    raise VaeFallback(f"one process gains nothing by it on {given.device}")
                return vaes().run(vae_of(self), given, options=options, lean=lean, **ranks(self), **of_call)

            given, named = input_first(MethodType(original, self), args, kwargs)
            result = compute(call, self, *given, **named)
            if (plan := str(vaes().plan)) not in seam.notes:
                seam.notes.append(plan)
            return result

        def ours_or_own(self: Any, *args: Any, **kwargs: Any) -> Any:
            missing: list[KernelsMissing] = []

            def ours() -> Any:
                from wanshim.core.decoding import KernelsMissing

                try:
                    return shared(self, *args, **kwargs)
                except KernelsMissing as left:
                    missing.append(left)
                    raise

            def own() -> Any:
                import traceback

                from wanshim.core.shared.gpu_memory import give_back, is_memory

                try:
                    result = original(self, *args, **kwargs)
                except Exception as error:
                    if not missing or not is_memory(error):
                        raise
                    traceback.clear_frames(error.__traceback__)  # lets go of the memory that the failed call holds
                else:
                    for left in missing:
                        seam.fall_back(str(left))
                    return result
                vae = vae_of(self)
                for module in vae.modules():
                    if hasattr(type(module), "clear_cache"):  # it keeps frames of the failed call
                        module.clear_cache()
                give_back(next(vae.parameters()).device)
                missing.pop().wait()
                return leaving(shared, original, seam.fall_back)(self, *args, **kwargs)

            return leaving(ours, own, lambda reason: None if missing else seam.fall_back(reason))()

        leaving = partial(or_framework, strict=lambda: seam.settings.strict, on_error=seam.fail)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            if torch.compiler.is_compiling():
                if applies(self, *args, **kwargs):
                    left_to_graph()
                return original(self, *args, **kwargs)
            if framework_computes() or not applies(self, *args, **kwargs) or not seam.enter():
                return original(self, *args, **kwargs)
            return ours_or_own(self, *args, **kwargs)

        def prepare(self: Any, latents: torch.Tensor) -> None:
            if not seam.off:
                vaes().prepare(vae_of(self), latents, _options(verb, seam), **ranks(self))

        setattr(method, _SHARES, lambda: _is_asked_for(verb, seam))
        setattr(method, _PREPARES, prepare)
        return method

    return make


def _options(verb: str, seam: SeamState) -> VaeOptions:
    from wanshim.core.decoding import VaeFallback, VaeOptions

    read = seam.settings
    mode = read.vae_encode if verb == "encode" else read.vae_mode
    if mode == "off":
        raise VaeFallback(f"the {verb} mode is off")
    if not _is_asked_for(verb, seam) and is_a_rank():
        raise VaeFallback(f"each process generates by itself: none asked to share its {verb}")
    options = VaeOptions(mode=mode or "auto", strict=not read.vae_fast, engines=read.vae_engines)
    return options if read.vae_timeout_s is None else replace(options, deadline=read.vae_timeout_s)


def _is_asked_for(verb: str, seam: SeamState) -> bool:
    """Whether a user has asked for the decode or encode itself, and not for generation, of which it is a part."""
    read = seam.settings
    by_variable = (read.vae_encode if verb == "encode" else read.vae_mode) is not None
    return seam.named or by_variable or read.generate is None


def is_a_rank() -> bool:
    """Whether this process is one of several: of a process group, or as its launcher says."""
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return joined or settings.is_one_of_several()


def shares_ranks(method: Any) -> bool:
    """Whether the ranks of a group share the calls of this method of a VAE's class."""
    return bool(getattr(method, _SHARES, lambda: False)())


def prepare_decode(vae: Any, latents: torch.Tensor) -> None:
    """Have the kernels of a decode compiled beside the program, if a method of the VAE's class is replaced.

    Args:
        latents: [B, any, t, h, w], of the size and on the device of those that it will get.
    """
    for name in ("_decode", "decode"):
        prepare = getattr(getattr(type(vae), name, None), _PREPARES, None)
        if prepare is None:
            continue
        try:
            prepare(vae, latents)
        except Exception as error:  # the decode itself says why it stays with the framework
            import logging

            logging.getLogger("wanshim").debug("its kernels are not compiled ahead: %s", cause_of(error))
