"""The replacement of a pipeline's call, which runs it over all GPUs.

Importing this module imports no torch: what the calls of a pipeline need is made at the first one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from wanshim import settings
from wanshim.errors import FeatureUnavailable
from wanshim.patching import SeamState

if TYPE_CHECKING:
    from wanshim.core.generation import GenerationPlan, PipelineBinding, Request, SharedPipeline
    from wanshim.settings import Settings

Bind = Callable[..., "PipelineBinding"]
_CALLBACK = "callback_on_step_end"
PREPARE = "wanshim.launch.boot.plugin:activate_in_worker"  # a copy computes with the same patches
SHARED: WeakKeyDictionary[Any, SharedPipeline] = WeakKeyDictionary()


def replace_call(bind: Bind) -> Callable[[Callable[..., Any], SeamState], Callable[..., Any]]:
    """Makes the replacement of a pipeline's `__call__` from the original and its seam.

    Args:
        bind: called with the pipeline and the arguments of the call; raises NotShared if it must run on one GPU.
    """

    def make(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not takes(original, self, *args, **kwargs) or not seam.enter():
                return original(self, *args, **kwargs)
            from wanshim.core.generation import NotShared, SharedPipeline
            from wanshim.core.workers import AHEAD

            read = seam.settings
            own = functools.partial(original, self, *args, **kwargs)
            try:
                if read.local_world_size > 1:
                    raise NotShared(f"{read.local_world_size} processes run this program; start it once")
                if self not in SHARED:
                    on_plan = functools.partial(_note, seam)
                    SHARED[self] = SharedPipeline(request_of(read.generate), prepare=PREPARE, on_plan=on_plan)
                shared = SHARED[self]
                before = shared.shared_forwards, shared.shared_vae_calls
                result = run(shared, bind, original, self, *args, **kwargs)
            except NotShared as reason:
                AHEAD.end()
                if read.strict:
                    seam.fail()
                    raise _unavailable(self, str(reason)) from reason
                seam.fall_back(f"{type(self).__name__} on one GPU: {reason}")
                return own()
            except BaseException:
                seam.fail()
                raise
            if shared.plan is None:
                seam.fall_back(f"{type(self).__name__}: the call ran none of its models")
            elif shared.plan.gpus == 1:
                seam.fall_back(
                    f"{type(self).__name__} on one GPU: {'; '.join(dict.fromkeys(shared.plan.rejected.values()))}"
                )
            elif before == (shared.shared_forwards, shared.shared_vae_calls):  # the plan is an earlier call's
                seam.fall_back(f"{type(self).__name__}: the call shared nothing of what it ran")
            return result

        return call

    return make


def start_ahead(imports: tuple[str, ...]) -> Callable[[Settings], None]:
    """Makes what starts the workers' processes when the program imports the framework: they import while it imports
    its pipeline and loads models.

    Args:
        imports: modules that every worker needs.
    """

    def start(read: Settings) -> None:
        if settings.is_program() and read.generate is not None and read.local_world_size == 1:
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
    return shared.run(bound, functools.partial(original, pipe, *args, **kwargs))


def request_of(wanted: settings.WantedGeneration | None) -> Request:
    from wanshim.core.generation import Request

    return Request(gpus=wanted.gpus, at_most=wanted.at_most) if wanted else Request()


def _note(seam: SeamState, plan: GenerationPlan) -> None:
    if plan.gpus > 1 and str(plan) not in seam.notes:
        seam.notes.append(str(plan))


def _unavailable(pipe: Any, reason: str) -> FeatureUnavailable:
    return FeatureUnavailable(
        f"{type(pipe).__name__} would run on one GPU: {reason}", hint="Change that, or run without WANSHIM_STRICT"
    )
