"""`wanshim.parallelize_pipeline`: one pipeline's calls over several GPUs, without a patch.

Importing this module imports no torch: what the calls of a pipeline need is made at the first one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.errors import ModelInvalid
from wanshim.patching.pipeline_call import ABILITY, PREPARE, SHARED, readable, request_of, run, takes
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.generation import GenerationPlan, SharedPipeline


class PipelineHandle:
    """A pipeline whose calls go over GPUs."""

    def __init__(self, shared: SharedPipeline, undo: Undo) -> None:
        self._shared, self._undo = shared, undo

    @property
    def plan(self) -> GenerationPlan | None:
        """The plan of the last call; None before the first."""
        return self._shared.plan

    def remove(self) -> None:
        """Restore the pipeline and end its workers, unless another pipeline uses them. Safe to call twice."""
        self._undo.remove()


def parallelize_pipeline(
    pipe: Any, gpus: int | str | Sequence[str] | None = None, *, deadline: float | None = None
) -> PipelineHandle:
    """Let the calls of `pipe` use several GPUs; it is called as before, in one process.

    A worker is started for each further GPU, a process that holds copies of the pipeline's transformers and VAE from
    the first call on. Pipelines for which the same `gpus` and `deadline` are given share them. With guidance, the
    forward with the prompt and the one without run at once, each on half of the GPUs. GPUs that compute the same
    forward each have a part of its tokens (DeepSpeed-Ulysses, arXiv:2309.14509). Guidance alone gives the frames of one
    GPU bit for bit; with tokens over GPUs they are equal up to rounding. Transformers that the program offloads are
    streamed from host memory in place of that, with one GPU too.

    Args:
        pipe: a pipeline that `generate` serves in the installed release of its framework, on a GPU.
        gpus: how many, or which, the pipeline's own first, such as `["cuda:0", "cuda:1"]`; or, as WANSHIM_GENERATE
            takes it, what goes over them: `"cfg:2"` for guidance alone, `"cfg:2,sequence:2"`. Default: all in sight.
        deadline: seconds in which a worker must start, and complete a forward after this process has completed its own.
            Default: 300.

    Raises:
        SettingInvalid: `gpus` is another text.
        ModelInvalid: the pipeline cannot use several GPUs, here or, later, in a call; it is as it was.
        FeatureUnavailable: its release of its framework is not known.
        SettingInvalid: `deadline` cannot be waited.
    """
    from wanshim import activation
    from wanshim.core.generation import NotShared, SharedPipeline
    from wanshim.select import decision

    known = activation.CURRENT.known()
    # of a subclass, the program's own first
    packages = [cls.__module__.partition(".")[0] for cls in type(pipe).__mro__]
    framework = next((each for each in packages if f"{each}.{ABILITY}" in known.features), None)
    if framework is None:
        raise _invalid(pipe, f"no adapter serves pipelines of {packages[0]}")
    name = f"{framework}.{ABILITY}"
    feature = known.features[name]
    read = settings.read()
    decided = decision.decide(feature, known.frameworks[framework], activation.CURRENT.rows(), read)
    if not decided.applies:
        raise activation.unavailable(name, decided)
    bind = readable(importlib.import_module(f"wanshim.adapters.{framework}.{ABILITY}").bind)
    if pipe in SHARED:
        raise _invalid(pipe, "it uses several GPUs already; call remove() on its handle first")
    wanted = settings.generation("gpus", gpus) if isinstance(gpus, str) else None
    request = request_of(replace(read, generate=wanted))
    if isinstance(gpus, int):
        request = replace(request, gpus=gpus)
    elif gpus is not None and not isinstance(gpus, str):
        request = replace(request, devices=tuple(gpus))
    options = {} if deadline is None else {"deadline": deadline}
    shared = SharedPipeline(request, prepare=PREPARE, on_plan=_log, **options)
    try:
        shared.begin(bind(pipe))
    except NotShared as reason:
        raise _invalid(pipe, str(reason)) from reason
    original = type(pipe).__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not takes(original, self, *args, **kwargs):
            original(self, *args, **kwargs)
            raise _invalid(self, "a wrapper around its __call__ takes other arguments than its signature")
        try:
            return run(shared, bind, original, self, *args, **kwargs)
        except NotShared as reason:
            raise _invalid(self, str(reason)) from reason

    undo = Undo()
    undo.add(shared.close)
    undo.add(functools.partial(SHARED.pop, pipe, None))
    SHARED[pipe] = shared
    own = type(pipe)  # Python looks `__call__` up on the class alone: the object gets a class of its own
    names = {key: getattr(own, key) for key in ("__module__", "__qualname__", "__doc__")}
    undo.add(functools.partial(setattr, pipe, "__class__", own))
    pipe.__class__ = type(own.__name__, (own,), {**names, "__call__": call})
    return PipelineHandle(shared, undo)


def _log(plan: GenerationPlan) -> None:
    import logging

    logging.getLogger("wanshim").info("wanshim: %s", plan)


def _invalid(pipe: Any, reason: str) -> ModelInvalid:
    return ModelInvalid(
        f"{type(pipe).__name__} cannot use several GPUs: {reason}",
        hint="docs/how-to/generate.md lists what can",
    )
