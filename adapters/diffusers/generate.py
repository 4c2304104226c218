"""`diffusers.generate`: the denoising of one process's Wan or Qwen-Image pipeline over several GPUs.

The script stays as it is for one GPU. Each other GPU has a worker, a process that starts while the script loads its
models and, from the first call of the pipeline on, holds a copy of the transformers. With guidance a step has two
forwards, with the prompt and without: they run at once, and the frames are those of one GPU, bit for bit. On more than
two GPUs, or without guidance, the tokens of a video or an image go over GPUs as well, and the frames are equal up to
rounding. On one GPU too, transformers that the script offloads are streamed from host memory in place of that.
WANSHIM_GENERATE says over how many GPUs; `wanshim generate --gpus 4` sets it. A pipeline that cannot be shared runs on
one GPU, and the report says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffusers.placement import call_with_room, moving_seam
from wanshim.patching import Feature, Kind, Seam, SeamState
from wanshim.patching.pipeline_call import loading_seam, replace_call, say_not_served, start_ahead, watch_forward
from wanshim.patching.probe import SourceTree

if TYPE_CHECKING:
    import torch

    from wanshim.core.generation import PipelineBinding
    from wanshim.core.sequence import BlockList

NAME = "diffusers.generate"
WAN, QWEN = "diffusers.pipelines.wan", "diffusers.pipelines.qwenimage"
MODELS = "diffusers.models.transformers"
WAN_PIPELINES = (
    f"{WAN}.pipeline_wan:WanPipeline",  # in every release with Wan
    f"{WAN}.pipeline_wan_i2v:WanImageToVideoPipeline",
    f"{WAN}.pipeline_wan_video2video:WanVideoToVideoPipeline",
    f"{WAN}.pipeline_wan_vace:WanVACEPipeline",  # 0.34 and later
    f"{WAN}.pipeline_wan_animate:WanAnimatePipeline",  # 0.36 and later
)
QWEN_PIPELINES = (
    f"{QWEN}.pipeline_qwenimage:QwenImagePipeline",  # 0.35 and later
    f"{QWEN}.pipeline_qwenimage_img2img:QwenImageImg2ImgPipeline",
    f"{QWEN}.pipeline_qwenimage_inpaint:QwenImageInpaintPipeline",
    f"{QWEN}.pipeline_qwenimage_edit:QwenImageEditPipeline",
    f"{QWEN}.pipeline_qwenimage_edit_inpaint:QwenImageEditInpaintPipeline",  # 0.36 and later
    f"{QWEN}.pipeline_qwenimage_edit_plus:QwenImageEditPlusPipeline",  # 0.36 and later
    f"{QWEN}.pipeline_qwenimage_layered:QwenImageLayeredPipeline",  # 0.37 and later
)
PIPELINES = (*WAN_PIPELINES, *QWEN_PIPELINES)
_NAMES = ", ".join(name.split(":")[1] for name in PIPELINES)
OF_A_WORKER = (  # what the models of their pipelines are made of
    f"{MODELS}.transformer_wan",
    f"{MODELS}.transformer_qwenimage",
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "diffusers.models.autoencoders.autoencoder_kl_qwenimage",
)
TRANSFORMERS = ("transformer", "transformer_2")
PROJECT = ("diffusers", "https://github.com/huggingface/diffusers")
GUIDERS = ("guider", "guider_2")
MODULAR = "diffusers.modular_pipelines.modular_pipeline:ModularPipeline"
FAMILIES = {
    "Wan": ("pipeline_wan", "transformer_wan"),
    "Qwen-Image": ("pipeline_qwenimage", "transformer_qwenimage"),
    "modular pipelines": ("modular_pipeline",),
}
FORWARDS = (
    f"{MODELS}.transformer_wan:WanTransformer3DModel.forward",
    f"{MODELS}.transformer_wan_vace:WanVACETransformer3DModel.forward",
    f"{MODELS}.transformer_wan_animate:WanAnimateTransformer3DModel.forward",
    f"{MODELS}.transformer_qwenimage:QwenImageTransformer2DModel.forward",
)
SHARDED = (  # whose tokens can go over GPUs
    "WanTransformer3DModel",
    "WanVACETransformer3DModel",
    "QwenImageTransformer2DModel",
)
WHOLE = {"WanAnimateTransformer3DModel": "what works between its blocks sees all tokens of a frame"}
# The code of Qwen-Image's blocks with which its tokens go over GPUs, by fingerprint. Guidance needs none of it.
QWEN_BLOCKS = {
    f"{MODELS}.transformer_qwenimage:QwenDoubleStreamAttnProcessor2_0.__call__": (
        "b35736b0a44d7c1c",  # 0.35
        "883835e15838ef1e",  # 0.36
        "bbbdcabc4c4f6a0a",  # 0.37 and 0.38
        "c1df1b6ab0631da5",  # 0.39, which builds the joint mask here
        "1856a6342b65e152",  # 0.40 and 0.41
        "2ef8be394f325228",  # 0.42
    ),
    f"{MODELS}.transformer_qwenimage:QwenImageTransformerBlock.forward": (
        "acb6e734984f2d12",  # 0.35 and 0.36
        "43129b3d9d2f80f5",  # 0.37 and later
    ),
    f"{MODELS}.transformer_qwenimage:QwenImageTransformerBlock._modulate": (
        "931afbc8857a7dbb",  # 0.35 and 0.36
        "20c407efa5bfd05b",  # 0.37 and later
    ),
}


# The code of the blocks by which a modular pipeline of Wan computes a step, by fingerprint.
MODULAR_STEPS = {
    "diffusers.modular_pipelines.wan.denoise:WanLoopDenoiser.__call__": (
        "78a59847422553b5",  # 0.36 to 0.40
        "48da2e0f0a411ad6",  # 0.41 and 0.42
    ),
    "diffusers.modular_pipelines.wan.denoise:Wan22LoopDenoiser.__call__": (
        "e40a4ab3ad361d92",  # 0.36 to 0.40
        "fb6665b784b37c5e",  # 0.41 and 0.42
    ),
}


def bind(pipe: Any, *args: Any, **kwargs: Any) -> PipelineBinding:
    """One call of a pipeline.

    Raises:
        NotShared: it must run on one GPU.
    """
    from wanshim.core.generation import NotShared

    models = _models(pipe)
    _check(pipe, models)
    if _is_modular(type(pipe)):
        return _bind_modular(pipe, models, kwargs)
    served = _served_class(type(pipe))
    if served is None:
        raise NotShared(f"{type(pipe).__name__} is none of {_NAMES}")
    given = inspect.signature(served.__call__).bind_partial(pipe, *args, **kwargs)
    given.apply_defaults()
    by_arguments = "true_cfg_scale" in given.arguments  # Qwen-Image
    no_pair = _why_no_pair(given.arguments) if by_arguments else ""
    return _binding(
        pipe,
        models,
        is_guided=lambda: not no_pair if by_arguments else bool(pipe.do_classifier_free_guidance),
        no_pair=no_pair,
        has_callback=given.arguments.get("callback_on_step_end") is not None,
        output=given.arguments.get("output_type"),
    )


def _bind_modular(pipe: Any, models: dict[str, Any], given: dict[str, Any]) -> PipelineBinding:
    """One call of a modular pipeline, whose guider says how many forwards a step has."""
    from wanshim.core.generation import NotShared

    if reason := _why_other_blocks(pipe):
        raise NotShared(reason)
    guiders = [each for name in GUIDERS if (each := getattr(pipe, name, None)) is not None]
    other = [type(each).__name__ for each in guiders if type(each).__name__ != "ClassifierFreeGuidance"]
    if other or not guiders:
        raise NotShared(f"its guider is {', '.join(other) or 'missing'}, whose forwards of a step are not known")
    in_part = any(each.config.start > 0 or each.config.stop < 1 for each in guiders)
    counts = {each.num_conditions for each in guiders}
    no_pair = "its guiders guide some steps alone" if in_part or len(counts) > 1 else ""
    return _binding(
        pipe,
        models,
        is_guided=lambda: not no_pair and counts == {2},
        no_pair=no_pair,
        has_callback=False,
        output=given.get("output_type"),
    )


def _is_modular(cls: type) -> bool:
    return any(base.__name__ == "ModularPipeline" for base in cls.__mro__)


def _why_other_blocks(pipe: Any) -> str:
    """Why a modular pipeline is not served, whatever its components; empty if it is."""
    if not any(cls.__name__ == "WanModularPipeline" for cls in type(pipe).__mro__):
        return f"of modular pipelines those of Wan are served, and {type(pipe).__name__} is none"
    return _why_unknown(MODULAR_STEPS) or next(filter(None, map(_why_own_block, _loops(pipe._blocks))), "")


def _loops(block: Any) -> Iterator[Any]:
    """The loops among the blocks of a modular pipeline."""
    for part in getattr(block, "sub_blocks", {}).values():
        yield from _loops(part)
    if any(cls.__name__ == "LoopSequentialPipelineBlocks" for cls in type(block).__mro__):
        yield block


def _why_own_block(loop: Any) -> str:
    """That a loop has blocks that are not diffusers', which may read a result before it is there; empty if not."""
    parts = loop, *loop.sub_blocks.values()
    own = [type(part).__qualname__ for part in parts if not type(part).__module__.startswith("diffusers.")]
    return f"the loop of its denoising has blocks that are not diffusers': {', '.join(own)}" if own else ""


def _models(pipe: Any) -> dict[str, Any]:
    models: dict[str, Any] = {}
    for name in TRANSFORMERS:
        model = getattr(pipe, name, None)
        if model is not None and all(model is not each for each in models.values()):
            models[name] = model
    return models


def _binding(
    pipe: Any,
    models: dict[str, Any],
    *,
    is_guided: Callable[[], bool],
    no_pair: str,
    has_callback: bool,
    output: str | None,
) -> PipelineBinding:
    from wanshim.adapters.diffusers import offload, step_cache
    from wanshim.core.generation import Forward, NotShared, PipelineBinding, is_own, own_methods
    from wanshim.core.shared.plain import is_compiled

    scheduler = getattr(pipe, "scheduler", None)
    own = own_methods(scheduler, "diffusers")
    bars = [pipe, *(_loops(pipe._blocks) if _is_modular(type(pipe)) else ())]
    runs_unseen = any("progress_bar" in own_methods(each, "diffusers") for each in bars)
    runs_unseen = runs_unseen or (not own and is_own(scheduler, "diffusers"))
    may_change = has_callback or bool(own) or runs_unseen
    cached = [model for model in models.values() if getattr(model, "is_cache_enabled", False)]
    if cached and may_change:
        raise NotShared("code of the program's own between steps may change what a step cache has kept")
    vae = getattr(pipe, "vae", None)
    return PipelineBinding(
        name=type(pipe).__name__,
        package="diffusers",
        forwards=tuple(
            Forward(
                owner=model,
                attribute="forward" if model._compiled_call_impl is None else "_compiled_call_impl",
                function=step_cache.forward if model in cached else model,
                modules={name: model},
                empty=partial(_empty, model),
                same="hidden_states",
                blocks=blocks_of,
                few=None if model in cached else partial(_few, model),
                count=partial(_count, model),
                is_compiled=is_compiled(model),
                sent=partial(step_cache.sent, model) if model in cached else None,
            )
            for name, model in models.items()
        ),
        no_sequence="a step cache skips forwards by what it has of all tokens"
        if cached
        else next(filter(None, map(_why_no_sequence, models.values())), ""),
        heads=min((model.config.num_attention_heads for model in models.values()), default=0),
        is_guided=is_guided,
        no_pair=no_pair,
        may_change=may_change,
        own=tuple((scheduler, name) for name in own),
        runs_unseen=runs_unseen,
        check=partial(_check, pipe, models),
        set_up=set_up_copy,
        vae=vae if vae is not None and not offload.is_offloaded(vae) else None,
        device=offload.execution_device(pipe, models),
        offload=offload.replaceable(pipe, models),
        without_hooks=offload.without_hooks,
        decodes=output != "latent" and not getattr(vae, "use_tiling", False),
    )


def blocks_of(model: Any, *_: object, **__: object) -> list[BlockList]:
    """The blocks of a transformer; those of VACE run before Wan's, on the same tokens."""
    from wanshim.core.sequence import BlockList

    if hasattr(model, "transformer_blocks"):
        return [_qwen_blocks(model)]
    tokens, control = {"hidden_states": {3: 1}, "temb": {4: 1}}, "control_hidden_states"
    own = BlockList(
        blocks=list(model.blocks),
        output="attn1.to_out.0",
        projections=("attn1.to_v", "attn1.norm_q", "attn1.norm_k"),
        num_heads=("attn1.heads",),
        tokens="hidden_states",
        per_token=tokens,
        whole=(),
    )
    if not hasattr(model, "vace_blocks"):
        return [own]
    per_token = {**tokens, control: {3: 1}}
    return [replace(own, blocks=list(model.vace_blocks), gather=False, tokens=control, per_token=per_token), own]


def _qwen_blocks(model: Any) -> BlockList:
    from wanshim.core.sequence import BlockList, TextStream

    return BlockList(
        blocks=list(model.transformer_blocks),
        exit=model.proj_out,
        output="attn.to_out.0",
        projections=("attn.to_q", "attn.to_k", "attn.to_v"),
        num_heads=("attn.heads",),
        widths=("attn.inner_dim",),
        text=TextStream(
            projections=("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            output="attn.to_add_out",
            mask="encoder_hidden_states_mask",
        ),
        tokens="hidden_states",
        per_token={"hidden_states": {3: 1}, "modulate_index": {2: 1}},
        whole=(),
    )


@cache
def _why_no_qwen_blocks() -> str:
    return _why_unknown(QWEN_BLOCKS)


def _why_unknown(codes: Mapping[str, tuple[str, ...]]) -> str:
    """The targets that have other code than is known; empty if none has."""
    source = SourceTree.of_installed("diffusers")
    unknown = [target for target, known in codes.items() if source.fingerprint(target) not in known]
    return f"{', '.join(unknown)}: not the code of a release that is known" if unknown else ""


def _why_no_pair(given: Mapping[str, Any]) -> str:
    """Why a call of a Qwen-Image pipeline with these arguments has no guidance; empty if it has."""
    import diffusers
    from packaging.version import Version

    if given["true_cfg_scale"] <= 1:
        return "true_cfg_scale switches guidance off: a step has one forward"
    embeds = given["negative_prompt_embeds"] is not None
    if Version(diffusers.__version__) < Version("0.38"):  # which ignores embeddings without a mask
        embeds = embeds and given["negative_prompt_embeds_mask"] is not None
    if given["negative_prompt"] is None and not embeds:
        return "no negative prompt is given: a step has one forward"
    return ""


def _why_no_sequence(model: Any) -> str:
    """Why the tokens of a transformer's forward cannot go over GPUs; empty if they can."""
    from wanshim.core.sequence import check_shardable
    from wanshim.core.shared.plain import is_compiled
    from wanshim.errors import ModelInvalid

    name = type(model).__name__
    if is_compiled(model):
        return "it is compiled as one device computes it"
    if name not in SHARDED:
        return f"{name}: {WHOLE.get(name, 'its blocks are not known')}"
    lists = blocks_of(model)
    for block in (block for listed in lists for block in listed.blocks):
        attention = block.attn if hasattr(block, "attn") else block.attn1
        if getattr(attention, "fused_projections", False):
            return f"the projections of {name} are fused"
        if not type(attention.processor).__module__.startswith(f"{MODELS}."):
            return f"the attention of {name} is {type(attention.processor).__qualname__}, which is not known"
    try:
        check_shardable(lists)
    except ModelInvalid as error:
        return str(error)
    return _why_no_qwen_blocks() if hasattr(model, "transformer_blocks") else ""


def _empty(model: Any, hidden_states: torch.Tensor, *, return_dict: bool = True, **_: Any) -> tuple[torch.Tensor]:
    """An empty result of a transformer.

    Wan: (b, channels, frames, height, width), in whole patches. Qwen-Image: (b, tokens, elements of a patch).
    """
    if return_dict:
        raise ValueError("it is an object, as return_dict=True asks for, and not a tuple")
    batch, patch, channels = hidden_states.size(0), model.config.patch_size, model.config.out_channels
    if hidden_states.ndim == 3:
        channels = channels or model.config.in_channels
        return (hidden_states.new_empty(batch, hidden_states.size(1), patch**2 * channels),)
    sizes = (size // each * each for size, each in zip(hidden_states.shape[2:], patch, strict=True))
    return (hidden_states.new_empty(batch, channels, *sizes),)


def _few(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments of a forward with few tokens; those of Qwen-Image's tell the size of the image, and stay."""
    from wanshim.core.generation import few_tokens

    return (args, kwargs) if hasattr(model, "transformer_blocks") else few_tokens("hidden_states", args, kwargs)


def _count(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The tokens of a forward that has them by name."""
    from wanshim.core.generation import count_tokens

    if "hidden_states" not in kwargs:
        return 0
    is_packed = hasattr(model, "transformer_blocks")
    return int(kwargs["hidden_states"].shape[1]) if is_packed else count_tokens("hidden_states", args, kwargs)


def set_up_copy(model: Any) -> None:
    """Set up what diffusers keeps beside a model: in this process, and in hooks that a copy has not."""
    from wanshim.adapters.diffusers import offload, step_cache

    set_up_attention(model)
    offload.set_up(model)
    if getattr(model, "is_cache_enabled", False):
        step_cache.set_up(model)


def set_up_attention(model: Any) -> None:
    """Have diffusers load what the attention of a copy calls, as its `set_attention_backend` did for the original:
    kernels of the hub are in a table of the process."""
    import logging

    processors = [part.processor for part in model.modules() if getattr(part, "processor", None) is not None]
    chosen = [(each, backend) for each in processors if (backend := getattr(each, "_attention_backend", None))]
    if not chosen:
        return
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    logger = logging.getLogger("diffusers.models.modeling_utils")
    logger.disabled, before = True, (logger.disabled, Registry._active_backend)  # it warns in the process of the user
    try:
        for backend in {getattr(backend, "value", backend) for _, backend in chosen}:
            model.set_attention_backend(backend)
    finally:  # it sets the backend of all models of this worker, too, which other pipelines have in it
        logger.disabled, Registry._active_backend = before
    for processor, backend in chosen:  # each may have its own
        processor._attention_backend = backend


def _served_class(cls: type) -> Any:
    """The class of diffusers whose `__call__` is served, or None; a subclass may take other arguments."""
    bases = (base for base in cls.__mro__ if "__call__" in vars(base))
    return next((base for base in bases if f"{base.__module__}:{base.__qualname__}" in PIPELINES), None)


def _say_by_class(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """The search for the class of a pipeline, before its files are downloaded and loaded."""

    def get_pipeline_class(*args: Any, **kwargs: Any) -> Any:
        cls = original(*args, **kwargs)
        if not _is_modular(cls) and _served_class(cls) is None:  # a modular one is known with its blocks
            say_not_served(seam, cls.__name__, f"it is none of {_NAMES}")
        return cls

    return get_pipeline_class


def _say_by_blocks(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """The loading of a modular pipeline's components."""

    def load_components(self: Any, *args: Any, **kwargs: Any) -> Any:
        if reason := _why_other_blocks(self):
            say_not_served(seam, type(self).__name__, reason)
        return original(self, *args, **kwargs)

    return load_components


def _why_other_attention(model: Any) -> str:
    """That the program has set the attention of diffusers, which a worker would not know; empty if it has not."""
    from wanshim.core.generation import why_other_function

    try:
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry
        from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND
    except ImportError:  # earlier releases
        return ""
    active = _AttentionBackendRegistry._active_backend
    processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
    for name in {active, *(getattr(each, "_attention_backend", None) for each in processors)} - {None}:
        function = _AttentionBackendRegistry._backends.get(name)
        if function is not None and (reason := why_other_function(function, "diffusers")):
            return f"computes attention by {getattr(name, 'value', name)}, which {reason}"
    active = getattr(active, "value", active)
    if active == DIFFUSERS_ATTN_BACKEND or all(getattr(each, "_attention_backend", None) for each in processors):
        return ""  # those of the processors are copied
    return (
        f"computes attention by {active}, which is set in this process alone and stays set behind a "
        "reset_attention_backend: set DIFFUSERS_ATTN_BACKEND before the program starts, or call its "
        "set_attention_backend"
    )


def _check(pipe: Any, models: dict[str, Any]) -> None:
    from wanshim.core.generation import NotShared

    if getattr(pipe, "hf_device_map", None) is not None:
        raise NotShared("its models are placed by device_map")
    for name, model in models.items():
        reason = _why_not(model) or _why_other_attention(model)
        if reason:
            raise NotShared(f"{name} {reason}")


def _why_not(model: Any) -> str:
    """Names of what diffusers or accelerate put into a transformer and a copy would lack; empty if there is nothing."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not type(model).__module__.startswith("diffusers."):
        return f"is a {type(model).__module__}.{type(model).__qualname__}, which is not a class of diffusers"
    if getattr(model, "_parallel_config", None) is not None:
        return "is in a parallel group of diffusers (enable_parallelism)"
    from wanshim.adapters.diffusers import offload

    return offload.why_not_carried(model)


def _seam(target: str) -> Seam:
    return Seam(
        f"{target}.__call__",
        replace_call(bind, call_with_room),
        kind=Kind.WRAPT,
        required=target == PIPELINES[0],
        why="one process denoises on one GPU, and a step's two forwards run one after the other",
        upstream="https://github.com/huggingface/diffusers (context parallelism needs torchrun and a changed script)",
        remove_when="diffusers runs an unchanged script's guidance on two GPUs",
    )


def _watch(target: str) -> Seam:
    return Seam(
        target,
        watch_forward(),
        in_graph=True,
        required=target == FORWARDS[0],
        stacks=True,
        why="a loop of the program's own, and a pipeline that is not served, denoise on one GPU without a word",
        upstream="https://github.com/huggingface/diffusers (a loop of a program's own denoises in one process)",
        remove_when="every pipeline of diffusers is served",
    )


FEATURE = Feature(
    name=NAME,
    summary="the denoising of a Wan or Qwen-Image pipeline over several GPUs, the script unchanged",
    switched_on_by="generate",
    relies_on=(*(f"{target}.do_classifier_free_guidance" for target in WAN_PIPELINES),),
    families=FAMILIES,
    seams=(
        *map(_seam, (*PIPELINES, MODULAR)),
        *map(_watch, FORWARDS),
        loading_seam("diffusers.pipelines.pipeline_loading_utils:_get_pipeline_class", _say_by_class, *PROJECT),
        loading_seam(f"{MODULAR}.load_components", _say_by_blocks, *PROJECT),
        moving_seam(lambda cls: _served_class(cls) is not None),
    ),
    prepare=start_ahead(OF_A_WORKER),
)
