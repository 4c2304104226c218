"""The replacement of a pipeline's call, which runs it over all GPUs.

Importing this module imports no torch: what the calls of a pipeline need is made at the first one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from wanshim import hand_over, settings
from wanshim.errors import FeatureUnavailable, WanshimError
from wanshim.patching import Kind, Seam, SeamState, fast_forward, vae_method

if TYPE_CHECKING:
    from wanshim.core.generation import GenerationPlan, PipelineBinding, Request, SharedPipeline
    from wanshim.settings import Settings

Bind = Callable[..., "PipelineBinding"]
ABILITY = "generate"
_CALLBACK = "callback_on_step_end"
PREPARE = "wanshim.launch.boot.plugin:activate_in_worker"  # a copy computes with the same patches
SHARED: WeakKeyDictionary[Any, SharedPipeline] = WeakKeyDictionary()
# `calls`: how many replaced calls of pipelines this thread is in; `prepare`: called with the latents of the innermost
# one's first forward, behind it, or None
_INSIDE = threading.local()


def replace_call(
    bind: Bind, around: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any], SeamState], Callable[..., Any]]:
    """Makes the replacement of a pipeline's `__call__` from the original and its seam.

    Args:
        bind: called with the pipeline and the arguments of the call; raises NotShared if it must run on one GPU.
        around: called with a function that makes the call, the seam, the original and what that is called with.
    """

    def make(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        mark_done = functools.cache(functools.partial(hand_over.mark_done, ABILITY))

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not takes(original, self, *args, **kwargs) or not seam.enter():
                return original(self, *args, **kwargs)
            mark_done()  # now: who has started this process may end it at once
            outer, _INSIDE.prepare = getattr(_INSIDE, "prepare", None), None
            try:
                with _inside():
                    share = functools.partial(_share, original, seam, bind, self, *args, **kwargs)
                    return share() if around is None else around(share, seam, original, self, *args, **kwargs)
            finally:
                _INSIDE.prepare = outer

        return call

    return make


def _share(original: Callable[..., Any], seam: SeamState, bind: Bind, pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
    from wanshim.core.generation import NotShared, SharedPipeline
    from wanshim.core.workers import AHEAD

    bind = readable(bind)
    read, name = seam.settings, type(pipe).__name__
    asks_for_one = _asks_for_one(read)
    if asks_for_one and not _replaces_offload(bind, pipe, *args, **kwargs):  # no block is streamed
        seam.pass_by() if seam.unneeded else seam.not_needed("one GPU was asked for, over which nothing is shared")
        return original(pipe, *args, **kwargs)
    before, streamed_before = (0, 0), 0
    shared, left = None, ""
    try:
        if vae_method.is_a_rank():
            raise NotShared("several processes run this program; start it once")
        if pipe in SHARED and not SHARED[pipe].is_of_this_process:
            raise NotShared("a forked process cannot use what its parent has for the pipeline")
        if pipe not in SHARED:
            on_plan = functools.partial(_note, seam)
            SHARED[pipe] = SharedPipeline(request_of(read), prepare=PREPARE, on_plan=on_plan)
        shared = SHARED[pipe]
        before, streamed_before = (shared.shared_forwards, shared.shared_vae_calls), shared.streamed_forwards
        result = run(shared, bind, original, pipe, *args, **kwargs)
    except NotShared as reason:
        AHEAD.end()
        if read.strict and not asks_for_one:
            seam.fail()
            raise _unavailable(name, str(reason)) from reason
        left = f"{name} keeps the script's offload: {reason}" if asks_for_one else f"{name} on one GPU: {reason}"
    except BaseException as error:
        done = 0 if shared is None else shared.shared_forwards - before[0]
        streamed = 0 if shared is None else shared.streamed_forwards - streamed_before
        if isinstance(error, WanshimError) or not (done or streamed):
            seam.fail()
        else:  # the program's own, as of a callback, behind forwards that were shared, or streamed on one GPU
            text = f"{done} forwards were shared" if done else f"{streamed} forwards were streamed"
            seam.notes.append(f"{name}: {type(error).__name__} ended a call, of which {text}")
        raise
    if shared is None or left:  # behind the handler: an error of the program's own has no context of ours
        seam.fall_back(left)
        return original(pipe, *args, **kwargs)
    if asks_for_one and shared.plan is not None and shared.plan.replaces_offload:
        return result
    if shared.plan is not None and shared.plan.gpus == 1:
        seam.fall_back(f"{name} on one GPU: {'; '.join(dict.fromkeys(shared.plan.rejected.values()))}")
    elif before == (shared.shared_forwards, shared.shared_vae_calls):
        # it ran none of its models, or was called by another pipeline's call; a plan is an earlier call's
        seam.fall_back(f"{name}: the call shared nothing of what it ran")
    return result


def readable(bind: Bind) -> Bind:
    """`bind`, for which a pipeline that it cannot read, as with an engine in place of a model, is one not shared."""
    from wanshim.core.generation import NotShared
    from wanshim.core.shared.fallback import cause_of

    def read(*args: Any, **kwargs: Any) -> PipelineBinding:
        try:
            return bind(*args, **kwargs)
        except (NotShared, WanshimError):
            raise
        except Exception as error:
            raise NotShared(f"it cannot be read: {cause_of(error)}") from error

    return read


def _replaces_offload(bind: Bind, pipe: Any, /, *args: Any, **kwargs: Any) -> bool:
    """Whether one GPU gains by the call itself: this process streams what the script offloads. Prepares its decode."""
    from wanshim.core.generation import NotShared

    try:
        bound = bind(pipe, *args, **kwargs)
    except NotShared:
        return False
    vae = getattr(pipe, "vae", None)  # a binding has none that is offloaded
    if bound.decodes and vae is not None:
        _INSIDE.prepare = functools.partial(vae_method.prepare_decode, vae)
    return bound.offload is not None


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _INSIDE.calls = getattr(_INSIDE, "calls", 0) + 1
    try:
        yield
    finally:
        _INSIDE.calls -= 1


def watch_forward(
    model_of: Callable[..., Any] = lambda model, *_, **__: model,
) -> Callable[[Callable[..., Any], SeamState], Callable[..., Any]]:
    """Makes the replacement of a model's forward, which says that it runs outside of every pipeline call that wanshim
    shares: in a loop of the program's own, or in a pipeline that no adapter knows. Under strict it raises.

    It counts no calls but those: a shared pipeline's are counted by its own seam.

    Args:
        model_of: returns the model, from the arguments.
    """

    def make(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        from torch import Tensor
        from torch.compiler import is_compiling

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or seam.off:
                return original(*args, **kwargs)
            if not getattr(_INSIDE, "calls", 0):
                _say_alone(seam, model_of(*args, **kwargs))
                return original(*args, **kwargs)
            result, prepare = original(*args, **kwargs), getattr(_INSIDE, "prepare", None)
            if prepare is None:
                return result
            given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim() == 5)
            latents = next(given, None)
            if latents is not None and not latents.is_meta:  # a trace of shapes comes before the first
                _INSIDE.prepare = None
                prepare(latents)
            return result

        return forward

    return make


def loading_seam(
    target: str, replacement: Callable[[Callable[..., Any], SeamState], Callable[..., Any]], name: str, upstream: str
) -> Seam:
    """The seam of a function by which pipelines are loaded, served or not: `replacement` says which are not.

    Args:
        name: of the framework.
    """
    return Seam(
        target,
        replacement,
        kind=Kind.WRAPT,
        passes_through=True,
        required=False,
        why="a pipeline that is not served denoises on one GPU, of however many the user asks for, without a word",
        upstream=f"{upstream}: no issue is open",
        remove_when=f"every pipeline of {name} is served",
    )


def say_not_served(seam: SeamState, name: str, reason: str) -> None:
    """Say, once for each pipeline, that one whose models are about to be loaded is not shared over GPUs, and that its
    offload stays the script's. A pipeline that is served counts no call.

    Args:
        name: of the pipeline's class.
        reason: why it is not served.

    Raises:
        FeatureUnavailable: under strict.
    """
    read, text = seam.settings, f"{name} on one GPU, with the script's own offload: {reason}"
    if read.generate is None or text in seam.fallbacks or not seam.enter():
        return
    if not _asks_for_one(read):
        from wanshim.core.workers import AHEAD

        AHEAD.end()
        if read.strict:
            seam.fail()
            raise _unavailable(name, reason)
    seam.fall_back(text)


def _say_alone(seam: SeamState, model: Any) -> None:
    from wanshim.core.workers.process import is_worker

    read = seam.settings
    if read.generate is None or _asks_for_one(read):
        return
    if model.training or is_worker() or not seam.enter():
        return
    name, caller = type(model).__name__, _caller(type(model).__module__.partition(".")[0])
    reason = f"{caller} calls it, which wanshim does not share"
    if read.strict:
        seam.fail()
        raise _unavailable(name, reason)
    seam.fall_back(f"{name} on one GPU: {reason}")


def _caller(framework: str) -> str:
    """The outermost function of the framework on the stack, as its pipeline's call, else the nearest of the program."""
    frame: FrameType | None = sys._getframe()
    found, nearest = "", ""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == framework:
            owner = frame.f_locals.get("self")
            own = "" if owner is None else f"{type(owner).__name__}."
            found = f"{own}{frame.f_code.co_name}"
        elif package not in ("torch", "wanshim") and not nearest:
            nearest = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return found or nearest


def start_ahead(imports: tuple[str, ...]) -> Callable[[Settings], None]:
    """Makes what starts the workers' processes when the program imports the framework: they import while it imports
    its pipeline and loads models.

    Args:
        imports: modules that every worker needs.
    """

    def start(read: Settings) -> None:
        if hand_over.claim_program() and read.generate is not None and not settings.is_one_of_several():
            import wanshim.core.generation  # noqa: F401 - now, and not in the first call
            from wanshim.core.workers import AHEAD

            AHEAD.start(read.generate.gpus - 1, ("wanshim.core.generation", *imports))

    return start


def takes(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called so by its signature; if not, its own TypeError says it best."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # it has none
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def run(
    shared: SharedPipeline, bind: Bind, original: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """One call of `pipe`. Its callback may call the models that the denoising loop calls; the pipeline may ask it for
    its class, as for diffusers' own callbacks."""
    import wrapt

    def call_aside(callback: Callable[..., Any], _: object, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        with shared.aside():
            return callback(*given, **named)

    bound = functools.partial(bind, pipe, *args, **kwargs)
    if kwargs.get(_CALLBACK) is not None:
        kwargs[_CALLBACK] = wrapt.FunctionWrapper(kwargs[_CALLBACK], call_aside)
    with _inside():
        return shared.run(bound, functools.partial(original, pipe, *args, **kwargs))


def _asks_for_one(read: Settings) -> bool:
    """As of the request, which need not be made for that."""
    return read.generate is not None and read.generate.gpus == 1


def request_of(read: Settings) -> Request:
    from wanshim.core.generation import Request

    request = Request(fast_forwards=fast_forward.is_on(), fast_vae=read.vae_fast)
    wanted = read.generate
    return request if wanted is None else replace(request, gpus=wanted.gpus, at_most=wanted.at_most)


def _note(seam: SeamState, plan: GenerationPlan) -> None:
    if (plan.gpus > 1 or plan.replaces_offload) and str(plan) not in seam.notes:
        seam.notes.append(str(plan))


def _unavailable(name: str, reason: str) -> FeatureUnavailable:
    return FeatureUnavailable(
        f"{name} would run on one GPU: {reason}", hint="Change that, or run without WANSHIM_STRICT"
    )
