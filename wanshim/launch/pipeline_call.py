"""A pipeline's call over all GPUs: the replacement of its method, and `wanshim.parallelize_pipeline`.

Importing this module imports no torch: what the calls of a pipeline need is made at the first one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from wanshim import settings
from wanshim.errors import FeatureUnavailable, GenerationInvalid
from wanshim.patching import SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.generation import GenerationPlan, PipelineBinding, Request, SharedPipeline
    from wanshim.settings import Settings

Bind = Callable[..., "PipelineBinding"]
ABILITY = "generate"
_CALLBACK = "callback_on_step_end"
_PREPARE = "wanshim.launch.boot.plugin:activate_in_worker"  # a copy computes with the same patches
_SHARED: WeakKeyDictionary[Any, SharedPipeline] = WeakKeyDictionary()


def replace_call(bind: Bind) -> Callable[[Callable[..., Any], SeamState], Callable[..., Any]]:
    """Makes the replacement of a pipeline's `__call__` from the original and its seam.

    Args:
        bind: called with the pipeline and the arguments of the call; raises NotShared if it must run on one GPU.
    """

    def make(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _takes(original, self, *args, **kwargs) or not seam.enter():
                return original(self, *args, **kwargs)
            from wanshim.core.generation import NotShared, SharedPipeline
            from wanshim.core.workers import AHEAD

            read = seam.settings
            own = functools.partial(original, self, *args, **kwargs)
            try:
                if read.local_world_size > 1:
                    raise NotShared(f"{read.local_world_size} processes run this program; start it once")
                if self not in _SHARED:
                    on_plan = functools.partial(_note, seam)
                    _SHARED[self] = SharedPipeline(_request(read.generate), prepare=_PREPARE, on_plan=on_plan)
                shared = _SHARED[self]
                before = shared.shared_forwards, shared.shared_vae_calls
                result = _run(shared, bind, original, self, *args, **kwargs)
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


class PipelineHandle:
    """A pipeline whose calls go over GPUs."""

    def __init__(self, shared: SharedPipeline, undo: Undo) -> None:
        self._shared, self._undo = shared, undo

    @property
    def plan(self) -> GenerationPlan | None:
        """How the last call ran; None before the first."""
        return self._shared.plan

    def remove(self) -> None:
        """End the workers and restore the pipeline. Safe to call twice."""
        self._undo.remove()


def parallelize_pipeline(
    pipe: Any, gpus: int | str | Sequence[str] | None = None, *, deadline: float | None = None
) -> PipelineHandle:
    """Let the calls of `pipe` use several GPUs; it is called as before, in one process.

    A worker is started for each further GPU, a process that holds copies of the pipeline's transformers and VAE from
    the first call on. With guidance, the forward with the prompt and the one without run at once, each on half of the
    GPUs. GPUs that compute the same forward each have a part of its tokens (DeepSpeed-Ulysses, arXiv:2309.14509).
    Guidance alone gives the frames of one GPU bit for bit; with tokens over GPUs they are equal up to rounding.

    Args:
        pipe: a pipeline that `generate` serves in the installed release of its framework, on a GPU.
        gpus: how many, or which, the pipeline's own first, such as `["cuda:0", "cuda:1"]`; or, as WANSHIM_GENERATE
            takes it, what goes over them: `"cfg:2"` for guidance alone, `"cfg:2,sequence:2"`. Default: all in sight.
        deadline: seconds in which a worker must start, and complete a forward after this process has completed its own.
            Default: 300.

    Raises:
        SettingInvalid: `gpus` is another text.
        GenerationInvalid: the pipeline cannot use several GPUs, here or, later, in a call; it is as it was.
        FeatureUnavailable: its release of its framework is not known.
        DeadlineInvalid: `deadline` cannot be waited.
    """
    from wanshim import activation
    from wanshim.core.generation import NotShared, Request, SharedPipeline
    from wanshim.select import decision

    framework = type(pipe).__module__.partition(".")[0]
    name = f"{framework}.{ABILITY}"
    known = activation.CURRENT.known()
    if name not in known.features:
        raise _invalid(pipe, f"no adapter serves pipelines of {framework}")
    feature = known.features[name]
    read = settings.read()
    decided = decision.decide(feature, known.frameworks[framework], activation.CURRENT.rows(), read)
    if not decided.applies:
        raise activation.unavailable(name, decided)
    bind: Bind = importlib.import_module(f"wanshim.adapters.{framework}.{ABILITY}").bind
    if pipe in _SHARED:
        raise _invalid(pipe, "it uses several GPUs already; call remove() on its handle first")
    if isinstance(gpus, str):
        request = _request(settings.generation("gpus", gpus))
    else:
        request = Request(gpus=gpus) if isinstance(gpus, int) or gpus is None else Request(devices=tuple(gpus))
    options = {} if deadline is None else {"deadline": deadline}
    shared = SharedPipeline(request, prepare=_PREPARE, on_plan=_log, **options)
    try:
        shared.begin(bind(pipe))
    except NotShared as reason:
        raise _invalid(pipe, str(reason)) from reason
    original = type(pipe).__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _takes(original, self, *args, **kwargs):
            original(self, *args, **kwargs)
            raise _invalid(self, "a wrapper around its __call__ takes other arguments than its signature")
        try:
            return _run(shared, bind, original, self, *args, **kwargs)
        except NotShared as reason:
            raise _invalid(self, str(reason)) from reason

    undo = Undo()
    undo.add(shared.close)
    undo.add(functools.partial(_SHARED.pop, pipe, None))
    _SHARED[pipe] = shared
    own = type(pipe)  # Python looks `__call__` up on the class alone: the object gets a class of its own
    names = {key: getattr(own, key) for key in ("__module__", "__qualname__", "__doc__")}
    undo.add(functools.partial(setattr, pipe, "__class__", own))
    pipe.__class__ = type(own.__name__, (own,), {**names, "__call__": call})
    return PipelineHandle(shared, undo)


def _takes(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
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


def _run(
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


def _request(wanted: settings.WantedGeneration | None) -> Request:
    from wanshim.core.generation import Request

    return Request(gpus=wanted.gpus, at_most=wanted.at_most) if wanted else Request()


def _note(seam: SeamState, plan: GenerationPlan) -> None:
    if plan.gpus > 1 and str(plan) not in seam.notes:
        seam.notes.append(str(plan))


def _log(plan: GenerationPlan) -> None:
    import logging

    logging.getLogger("wanshim").info("wanshim: %s", plan)


def _invalid(pipe: Any, reason: str) -> GenerationInvalid:
    return GenerationInvalid(
        f"{type(pipe).__name__} cannot use several GPUs: {reason}",
        hint="docs/how-to/generate.md lists what can",
    )


def _unavailable(pipe: Any, reason: str) -> FeatureUnavailable:
    return FeatureUnavailable(
        f"{type(pipe).__name__} would run on one GPU: {reason}", hint="Change that, or run without WANSHIM_STRICT"
    )
