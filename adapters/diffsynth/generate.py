"""`diffsynth.generate`: the denoising of one process's Wan or MiniMax-H3 pipeline over several GPUs.

The script stays as it is for one GPU. Each other GPU has a worker, a process that starts while the script loads its
models and, from the first call of the pipeline on, holds a copy of the DiT, or of both of a Wan2.2 pair, and of the
models that work with it. With guidance a step has two forwards, with the prompt and without: they run at once, and the
frames are those of one GPU, bit for bit. On more than two GPUs, without guidance, or with `cfg_merge=True`, which makes
one forward of the two, the tokens of a forward go over GPUs, and the frames are equal up to rounding. On one GPU too, a
DiT that VRAM management keeps on the host is streamed from there in place of that. WANSHIM_GENERATE says over how many
GPUs; `wanshim generate --gpus 4` sets it. A pipeline that cannot be shared runs on one GPU, and the report says why.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from wanshim.adapters.diffsynth.training_road import FAMILIES
from wanshim.patching import Feature, Kind, Seam, SeamState
from wanshim.patching.pipeline_call import loading_seam, replace_call, say_not_served, start_ahead, watch_forward
from wanshim.patching.vae_method import is_a_rank

if TYPE_CHECKING:
    from wanshim.adapters.diffsynth.splitting.family import Denoising, Family
    from wanshim.core.generation import PipelineBinding

PIPELINE = "diffsynth.pipelines.wan_video:WanVideoPipeline"
H3_PIPELINE = "diffsynth.pipelines.minimax_h3_audio_video:MiniMaxH3Pipeline"
DIT, H3_DIT = "diffsynth.models.wan_video_dit", "diffsynth.models.minimax_h3_dit"
PROGRESS = "progress_bar_cmd"
_NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of a script's TeaCaches, of which a call has two
_next = itertools.count()
_KEPT: dict[int, Any] = {}  # of a worker: the TeaCache of its forward in this call


def bind(pipe: Any, *args: Any, **kwargs: Any) -> PipelineBinding:
    """One call of a pipeline.

    Raises:
        NotShared: it must run on one GPU.
    """
    from pkgutil import resolve_name  # needed by few: not at activation

    from wanshim.adapters.diffsynth import vram
    from wanshim.core import generation
    from wanshim.core.generation import Forward, NotShared, PipelineBinding, is_own, own_methods, why_other_function
    from wanshim.core.shared.plain import is_compiled

    family, denoising = _served(pipe)
    own = resolve_name(denoising.function)  # as it is now
    if _is_around(pipe.model_fn, own) and vars(pipe).get("model_fn") is not own:
        pipe.model_fn = own  # with what is around it now, as in workers: the pipeline is older
    # of the method that has been called so: a subclass of the program's may have another
    given = inspect.signature(resolve_name(denoising.pipeline).__call__).bind_partial(pipe, *args, **kwargs)
    given.apply_defaults()
    parts = _parts(pipe)
    _check(pipe, parts)
    own_steps = own_methods(pipe.scheduler, "diffsynth")
    runs_unseen = not own_steps and is_own(pipe.scheduler, "diffsynth")
    # a generator, whose lines run between steps
    runs_unseen = runs_unseen or bool(why_other_function(given.arguments[PROGRESS], "diffsynth"))
    # A block whose children another model computes with is not called itself: nothing would bring its weights.
    offload = None if family.in_place_of_blocks(pipe) else vram.replaceable(pipe, parts)
    device = vram.computing_device(pipe, parts)
    with contextlib.ExitStack() as plain:
        for part in parts.values():
            plain.enter_context(vram.without_management(part))
        no_sequence, heads = _tokens(pipe, family)
    compiled = any(map(is_compiled, parts.values()))
    if compiled:
        no_sequence = "its DiT is compiled as one device computes it"
    elif given.arguments.get("sliding_window_size") is not None:
        no_sequence = "sliding_window_size: windows of frames overlap in one forward"
    elif device is not None and offload is None:
        no_sequence = no_sequence or "its DiT is under VRAM management that keeps it on the GPU"
    merged = given.arguments.get("cfg_merge", False)
    cached = given.arguments.get("tea_cache_l1_thresh") is not None and not merged  # which drops the caches
    may_change = runs_unseen or bool(own_steps)
    if cached and may_change:
        raise NotShared("code between steps may change what TeaCache has kept")
    guided = given.arguments["cfg_scale"] != 1.0 and not merged
    vae = getattr(pipe, "vae", None)
    return PipelineBinding(
        name=type(pipe).__name__,
        package="diffsynth",
        forwards=(
            Forward(
                owner=pipe,
                attribute="model_fn",
                # by these names a worker finds it
                function=with_kept_cache if cached else own,
                modules=parts,
                empty=denoising.empty,
                same=denoising.same,
                blocks=denoising.blocks,
                reads=frozenset(inspect.signature(pipe.model_fn).parameters),
                few=None if cached else denoising.few or partial(generation.few_tokens, denoising.same),
                count=denoising.count or partial(generation.count_tokens, denoising.same),
                is_compiled=compiled,
                sent=numbered if cached else None,
            ),
        ),
        is_guided=lambda: guided,
        no_pair="cfg_merge makes one forward of a step's two" if merged else "",
        no_sequence="TeaCache skips forwards by what it has of all tokens" if cached else no_sequence,
        heads=heads,
        may_change=may_change,
        own=tuple((pipe.scheduler, name) for name in own_steps),
        runs_unseen=runs_unseen,
        check=partial(_check, pipe, parts),
        vae=None if vram.is_managed(vae) else vae,
        device=device,
        offload=offload,
        without_hooks=vram.without_management,
        decodes=vae is not None and not given.arguments.get("tiled", False),
    )


def numbered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `with_kept_cache`, from those of `model_fn_wan_video`."""
    return (_NUMBERS.setdefault(kwargs["tea_cache"], next(_next)), *args), kwargs


def with_kept_cache(number: int, *args: Any, tea_cache: Any, **kwargs: Any) -> Any:
    """`model_fn_wan_video` with the TeaCache that came first by this number: its state is that of the forwards here."""
    from diffsynth.pipelines import wan_video

    if number not in _KEPT:
        _KEPT.clear()
        _KEPT[number] = tea_cache
    return wan_video.model_fn_wan_video(*args, tea_cache=_KEPT[number], **kwargs)


def _parts(pipe: Any) -> dict[str, Any]:
    """The models that a forward uses, by the pipeline's name for them."""
    names = dict.fromkeys((*pipe.in_iteration_models, *getattr(pipe, "in_iteration_models_2", ())))
    return {name: part for name in names if (part := getattr(pipe, name, None)) is not None}


def _served(pipe: Any) -> tuple[Family, Denoising]:
    """The family of a pipeline and its loop.

    Raises:
        NotShared: it is none that is known.
    """
    from wanshim.core.generation import NotShared

    names = {f"{cls.__module__}:{cls.__qualname__}" for cls in type(pipe).__mro__}
    served = _loops()
    for name in names & served.keys():
        return served[name]
    raise NotShared(f"{type(pipe).__name__} is no pipeline that is known")


def _loops() -> dict[str, tuple[Family, Denoising]]:
    """The loops that are served, and the families they are of, by the pipeline's class."""
    from wanshim.adapters.diffsynth.splitting.refusals import FAMILIES

    return {family.denoising.pipeline: (family, family.denoising) for family in FAMILIES if family.denoising}


def _tokens(pipe: Any, family: Family) -> tuple[str, int]:
    """Why the tokens of a forward cannot go over GPUs, or empty; and its attention heads."""
    from wanshim.adapters.diffsynth.splitting import refusals
    from wanshim.core.sequence import check_shardable
    from wanshim.errors import ModelInvalid

    assert family.block_lists is not None  # or nothing were shared
    second = family.second_of(pipe)
    heads = []
    for expert in (pipe, second) if second else (pipe,):
        reason = refusals.why_not_sharded(expert, family) or refusals.why_not_sharded(pipe, family)
        if reason:
            return reason, 0
        try:
            heads.append(check_shardable(family.block_lists(expert)))
        except ModelInvalid as error:
            return str(error), 0
    return "", min(heads)


def _is_around(function: Any, own: Any) -> bool:
    """Whether it is that function of DiffSynth, with whatever is around it now or was when the pipeline was made."""
    return inspect.unwrap(function or print) is inspect.unwrap(own)


def _check(pipe: Any, parts: dict[str, Any]) -> None:
    from pkgutil import resolve_name

    from wanshim.adapters.diffsynth import vram
    from wanshim.adapters.diffsynth.splitting import refusals
    from wanshim.adapters.diffsynth.splitting.family import class_of
    from wanshim.core.generation import NotShared

    family, denoising = _served(pipe)
    own = resolve_name(denoising.function)
    if not _is_around(pipe.model_fn, own):
        raise NotShared(f"its model_fn is not DiffSynth's {own.__name__}")
    reason = refusals.why_sharded_by_diffsynth(pipe)
    if reason:
        raise NotShared(reason)
    if "dit" not in parts:
        raise NotShared("it has no dit")
    for name, part in parts.items():
        part = getattr(part, "_orig_mod", part)  # of torch.compile
        cls = type(part).__name__
        if name in ("dit", "dit2") and class_of(part) not in family.split_classes:
            reason = family.refused_classes.get(cls, f"not a {family.name} DiT that is known")
            raise NotShared(f"{name} is a {cls}: {reason}")
        if reason := vram.why_not_carried(part):
            raise NotShared(f"{name} {reason}")
    if reason := refusals.refused_part(pipe) or denoising.refusal(pipe):
        raise NotShared(reason)


def _seam(pipeline: str, *, required: bool) -> Seam:
    return Seam(
        f"{pipeline}.__call__",
        replace_call(bind),
        kind=Kind.WRAPT,
        required=required,
        why="one process denoises on one GPU, and a step's two forwards run one after the other",
        upstream="https://github.com/modelscope/DiffSynth-Studio (use_usp needs torchrun and a changed script)",
        remove_when="DiffSynth runs an unchanged script's guidance on two GPUs",
    )


def _watch(function: str, *, required: bool) -> Seam:
    return Seam(
        function,
        watch_forward(lambda dit, *_, **__: dit),
        in_graph=True,
        required=required,
        stacks=True,
        why="a loop of the program's own, and a pipeline that is not served, denoise on one GPU without a word",
        upstream="https://github.com/modelscope/DiffSynth-Studio (use_usp needs torchrun and a changed script)",
        remove_when="every loop around such a DiT is served",
    )


def _served_or_said(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """The function by which every pipeline loads its models."""

    def download_and_load_models(self: Any, *args: Any, **kwargs: Any) -> Any:
        served = _loops()
        if served.keys().isdisjoint(f"{cls.__module__}:{cls.__qualname__}" for cls in type(self).__mro__):
            names = " and ".join(sorted(name.split(":")[1] for name in served))
            say_not_served(seam, type(self).__name__, f"of DiffSynth's pipelines {names} are served")
        elif not seam.off and seam.settings.generate is not None and not is_a_rank():
            from wanshim.adapters.diffsynth.placement import load_where_there_is_room

            loaded, note = load_where_there_is_room(original, self, *args, **kwargs)
            if note:
                seam.notes.append(note)
            return loaded
        return original(self, *args, **kwargs)

    return download_and_load_models


FEATURE = Feature(
    name="diffsynth.generate",
    summary="the denoising of a Wan or MiniMax-H3 pipeline over several GPUs, the script unchanged",
    switched_on_by="generate",
    families=FAMILIES,
    relies_on=(
        "diffsynth.pipelines.wan_video:model_fn_wans2v",
        f"{DIT}:DiTBlock.forward",
        f"{DIT}:SelfAttention.forward",  # where processes exchange tokens for heads
        f"{DIT}:AttentionModule.forward",
        "diffsynth.models.wan_video_vace:VaceWanModel.forward",
        f"{H3_DIT}:MiniMaxH3DiT.forward",
        f"{H3_DIT}:MiniMaxH3DiTBlock.forward",
        f"{H3_DIT}:MiniMaxH3Attention.forward",
        f"{H3_DIT}:_sdpa_varlen_attention",  # where they do so in MiniMax-H3's blocks
        f"{H3_DIT}_comfy:_comfy_attention_forward",
    ),
    seams=(
        _seam(PIPELINE, required=True),
        _seam(H3_PIPELINE, required=False),
        _watch("diffsynth.pipelines.wan_video:model_fn_wan_video", required=True),
        _watch("diffsynth.pipelines.minimax_h3_audio_video:model_fn_minimax_h3", required=False),
        loading_seam(
            "diffsynth.diffusion.base_pipeline:BasePipeline.download_and_load_models",
            _served_or_said,
            "DiffSynth",
            "https://github.com/modelscope/DiffSynth-Studio",
        ),
    ),
    prepare=start_ahead(("diffsynth.pipelines.wan_video",)),
)
