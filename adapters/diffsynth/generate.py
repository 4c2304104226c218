"""`diffsynth.generate`: the denoising of one process's Wan pipeline over several GPUs.

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
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from wanshim.patching import Feature, Kind, Seam
from wanshim.patching.pipeline_call import replace_call, say_not_shared, start_ahead, watch_forward

if TYPE_CHECKING:
    import torch

    from wanshim.core.generation import PipelineBinding
    from wanshim.core.sequence import BlockList

PIPELINE = "diffsynth.pipelines.wan_video:WanVideoPipeline"
DIT = "diffsynth.models.wan_video_dit"
PROGRESS = "progress_bar_cmd"
OF_A_CALL = {"sliding_window_size": "sliding_window_size: windows of frames overlap in one forward"}
_NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of a script's TeaCaches, of which a call has two
_next = itertools.count()
_KEPT: dict[int, Any] = {}  # of a worker: the TeaCache of its forward in this call


def bind(pipe: Any, *args: Any, **kwargs: Any) -> PipelineBinding:
    """One call of a pipeline.

    Raises:
        NotShared: it must run on one GPU.
    """
    from diffsynth.pipelines import wan_video

    from wanshim.adapters.diffsynth import vram
    from wanshim.core.generation import Forward, NotShared, PipelineBinding, few_tokens
    from wanshim.core.shared.plain import is_compiled

    if _is_own_forward(pipe) and vars(pipe).get("model_fn") is not wan_video.model_fn_wan_video:
        pipe.model_fn = wan_video.model_fn_wan_video  # with what is around it now, as in workers: the pipeline is older
    signature = inspect.signature(type(pipe).__call__)
    given = signature.bind_partial(pipe, *args, **kwargs)
    given.apply_defaults()
    parts = _parts(pipe)
    _check(pipe, parts, given.arguments)
    offload, device = vram.replaceable(pipe, parts), vram.computing_device(pipe, parts)
    with contextlib.ExitStack() as plain:
        for part in parts.values():
            plain.enter_context(vram.without_management(part))
        no_sequence, heads = _tokens(pipe)
    compiled = any(map(is_compiled, parts.values()))
    if compiled:
        no_sequence = "its DiT is compiled as one device computes it"
    elif device is not None and offload is None:
        no_sequence = no_sequence or "its DiT is under VRAM management that keeps it on the GPU"
    merged = given.arguments["cfg_merge"]
    cached = given.arguments["tea_cache_l1_thresh"] is not None
    # a generator, whose lines run between steps
    may_change = given.arguments[PROGRESS] is not signature.parameters[PROGRESS].default
    if cached and may_change:
        raise NotShared("code between steps may change what TeaCache has kept")
    guided = given.arguments["cfg_scale"] != 1.0 and not merged
    return PipelineBinding(
        name=type(pipe).__name__,
        forwards=(
            Forward(
                owner=pipe,
                attribute="model_fn",
                # by these names a worker finds it
                function=with_kept_cache if cached else wan_video.model_fn_wan_video,
                modules=parts,
                empty=_empty,
                same="latents",
                blocks=blocks_of,
                reads=frozenset(inspect.signature(pipe.model_fn).parameters),
                few=None if cached else partial(few_tokens, "latents"),
                is_compiled=compiled,
                sent=numbered if cached else None,
            ),
        ),
        is_guided=lambda: guided,
        no_pair="cfg_merge makes one forward of a step's two" if merged else "",
        no_sequence="TeaCache skips forwards by what it has of all tokens" if cached else no_sequence,
        heads=heads,
        may_change=may_change,
        check=partial(_check, pipe, parts, given.arguments),
        vae=None if vram.is_managed(pipe.vae) else pipe.vae,
        device=device,
        offload=offload,
        without_hooks=vram.without_management,
        decodes=not given.arguments.get("tiled", False),
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


def blocks_of(_: Any, *, dit: Any, vace: Any = None, **__: Any) -> list[BlockList]:
    """The blocks through which the tokens of one `model_fn_wan_video` go."""
    from wanshim.adapters.diffsynth.splitting import sequence

    return sequence.block_lists(SimpleNamespace(dit=dit, vace=vace))


def _parts(pipe: Any) -> dict[str, Any]:
    """The models that a forward uses, by the pipeline's name for them."""
    names = dict.fromkeys((*pipe.in_iteration_models, *pipe.in_iteration_models_2))
    return {name: part for name in names if (part := getattr(pipe, name, None)) is not None}


def _tokens(pipe: Any) -> tuple[str, int]:
    """Why the tokens of a forward cannot go over GPUs, or empty; and its attention heads."""
    from wanshim.adapters.diffsynth.splitting import refusals, sequence, wan
    from wanshim.core.sequence import check_shardable
    from wanshim.errors import ModelInvalid

    second = wan.FAMILY.second_of(pipe)
    heads = []
    for expert in (pipe, second) if second else (pipe,):
        reason = refusals.why_not_sharded(expert, wan.FAMILY) or refusals.why_not_sharded(pipe, wan.FAMILY)
        if reason:
            return reason, 0
        try:
            heads.append(check_shardable(sequence.block_lists(expert)))
        except ModelInvalid as error:
            return str(error), 0
    return "", min(heads)


def _empty(*, latents: torch.Tensor, context: torch.Tensor, **_: Any) -> torch.Tensor:
    """An empty result of `model_fn_wan_video`: (b, channels, frames, height, width), for each prompt."""
    return latents.new_empty((context.size(0), *latents.shape[1:]))


def _is_own_forward(pipe: Any) -> bool:
    """Whether it calls DiffSynth's function, with whatever is around it now or was when the pipeline was made."""
    from diffsynth.pipelines import wan_video

    return inspect.unwrap(getattr(pipe, "model_fn", None) or print) is inspect.unwrap(wan_video.model_fn_wan_video)


def _check(pipe: Any, parts: dict[str, Any], given: dict[str, Any]) -> None:
    from diffsynth.pipelines import wan_video

    from wanshim.adapters.diffsynth import vram
    from wanshim.adapters.diffsynth.splitting import refusals, wan
    from wanshim.adapters.diffsynth.splitting.family import class_of
    from wanshim.core.generation import NotShared

    if not isinstance(pipe, wan_video.WanVideoPipeline):
        raise NotShared(f"{type(pipe).__name__} is no WanVideoPipeline")
    if not _is_own_forward(pipe):
        raise NotShared("its model_fn is not DiffSynth's model_fn_wan_video")
    reason = refusals.why_sharded_by_diffsynth(pipe)
    if reason:
        raise NotShared(reason)
    for name, reason in OF_A_CALL.items():
        if given[name] is not None:
            raise NotShared(reason)
    if "dit" not in parts:
        raise NotShared("it has no dit")
    for name, part in parts.items():
        part = getattr(part, "_orig_mod", part)  # of torch.compile
        cls = type(part).__name__
        if name in ("dit", "dit2") and class_of(part) not in wan.FAMILY.split_classes:
            raise NotShared(f"{name} is a {cls}: {wan.FAMILY.refused_classes.get(cls, 'not a Wan DiT that is known')}")
        if reason := vram.why_not_carried(part):
            raise NotShared(f"{name} {reason}")
    if hasattr(pipe.dit, "music_injector") or hasattr(pipe.dit, "music_encoder"):
        raise NotShared("WanToDance writes the music into its DiT in each forward")


FEATURE = Feature(
    name="diffsynth.generate",
    summary="a Wan pipeline's denoising over several GPUs, the script unchanged",
    switched_on_by="generate",
    relies_on=(
        "diffsynth.pipelines.wan_video:model_fn_wans2v",
        f"{DIT}:DiTBlock.forward",
        f"{DIT}:SelfAttention.forward",  # where processes exchange tokens for heads
        f"{DIT}:AttentionModule.forward",
        "diffsynth.models.wan_video_vace:VaceWanModel.forward",
    ),
    seams=(
        Seam(
            f"{PIPELINE}.__call__",
            replace_call(bind),
            kind=Kind.WRAPT,
            why="one process denoises on one GPU, and a step's two forwards run one after the other",
            upstream="https://github.com/modelscope/DiffSynth-Studio (use_usp needs torchrun and a changed script)",
            remove_when="DiffSynth runs an unchanged script's guidance on two GPUs",
        ),
        Seam(
            "diffsynth.pipelines.wan_video:model_fn_wan_video",
            watch_forward(lambda dit, *_, **__: dit),
            in_graph=True,
            stacks=True,
            why="a loop of the program's own, and a pipeline that is not served, denoise on one GPU without a word",
            upstream="https://github.com/modelscope/DiffSynth-Studio (use_usp needs torchrun and a changed script)",
            remove_when="every loop around a Wan DiT is served",
        ),
        Seam(
            "diffsynth.pipelines.minimax_h3_audio_video:MiniMaxH3Pipeline.from_pretrained",
            say_not_shared(
                "MiniMaxH3Pipeline",
                "MiniMax-H3's packed sequence of text, audio and video is attended to in pieces, and its tokens are "
                "not shared over GPUs",
            ),
            kind=Kind.WRAPT,
            stacks=True,
            required=False,
            why="denoises on one GPU, of however many the user asks for, without a word",
            upstream="https://github.com/modelscope/DiffSynth-Studio: no issue is open",
            remove_when="MiniMax-H3's tokens go over GPUs",
        ),
    ),
    prepare=start_ahead(("diffsynth.pipelines.wan_video",)),
)
