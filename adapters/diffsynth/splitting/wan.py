"""The placement of a Wan pipeline when its DiT is split: the table, as data. Its shape is in `family.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.splitting.family import Companions, Denoising, Family, Hints
from wanshim.core.sequence import BlockList

if TYPE_CHECKING:
    import torch

ATTENTION = "self_attn.attn"
VACE_TOKENS = {"c": {3: 1}, "x": {3: 1}, "t_mod": {4: 1}, "freqs": {3: 0}}
TEXT_TOKENS, IMAGE_TOKENS = 512, 257  # what WanModel's prompt and CLIP image take of the context


def block_inputs(pipe: Any, tokens: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Activation, context, modulation and frequencies of one call of a block."""
    import torch

    dit = pipe.dit
    shape = {"device": "meta", "dtype": pipe.torch_dtype}
    context = TEXT_TOKENS + (IMAGE_TOKENS if getattr(dit, "has_image_input", False) else 0)
    each = (tokens,) if getattr(dit, "seperated_timestep", False) else ()  # a time step for every token
    head = dit.dim // dit.blocks[0].num_heads
    return (
        torch.empty((1, tokens, dit.dim), **shape),
        torch.empty((1, context, dit.dim), **shape),
        torch.empty((1, *each, 6, dit.dim), **shape),
        torch.empty((tokens, 1, head // 2), dtype=torch.complex128, device="meta"),
    ), {}


def real_rotary(original: Any) -> Any:
    """`rope_apply` in real numbers where the frequencies are: inside the graphs."""
    from wanshim.core.compile import rotate_pairs

    def rope_apply(x: Any, freqs: Any, num_heads: int) -> Any:
        turn = original if freqs.is_complex() else rotate_pairs
        return turn(x, freqs, num_heads)

    return rope_apply


def block_lists(pipe: Any, compiled: bool = False) -> list[BlockList]:
    """The DiT's blocks; those of VACE run first, on the same tokens. Compiled blocks exchange tokens
    at attention itself, where they leave their graphs."""
    own = BlockList(blocks=list(pipe.dit.blocks), exit=pipe.dit.head)
    if compiled:
        own = replace(own, attention=ATTENTION, projections=(), num_heads=(f"{ATTENTION}.num_heads",), whole=())
    if getattr(pipe, "vace", None) is None:
        return [own]
    return [BlockList(blocks=list(pipe.vace.vace_blocks), gather=False, tokens="c", per_token=VACE_TOKENS), own]


def blocks_of(_: Any, *, dit: Any, vace: Any = None, **__: Any) -> list[BlockList]:
    """The blocks through which the tokens of one `model_fn_wan_video` go."""
    return block_lists(SimpleNamespace(dit=dit, vace=vace))


def empty_result(*, latents: torch.Tensor, context: torch.Tensor, **_: Any) -> torch.Tensor:
    """An empty result of `model_fn_wan_video`: (b, channels, frames, height, width), for each prompt."""
    return latents.new_empty((context.size(0), *latents.shape[1:]))


def music_refusal(pipe: Any) -> str | None:
    dances = hasattr(pipe.dit, "music_injector") or hasattr(pipe.dit, "music_encoder")
    return "WanToDance writes the music into its DiT in each forward" if dances else None


FAMILY = Family(
    name="Wan",
    modules="diffsynth.models.wan_",
    blocks=("blocks",),
    exits=("head", "head_global"),  # head_global: WanToDance at another frame rate
    split_classes=(
        "diffsynth.models.wan_video_dit.WanModel",
        "diffsynth.models.wan_video_dit_s2v.WanS2VModel",
    ),
    sharded_classes=("diffsynth.models.wan_video_dit.WanModel",),
    block_lists=block_lists,
    exchanged=ATTENTION,
    known_classes=("diffsynth.models.wan_video_dit.WanModel",),
    attention="diffsynth.models.wan_video_dit:flash_attention",
    block_inputs=block_inputs,
    in_graphs={"diffsynth.models.wan_video_dit:rope_apply": real_rotary},
    chunked=("self_attn.norm_q", "self_attn.norm_k", "cross_attn.norm_q", "cross_attn.norm_k", "ffn"),
    sees_all_tokens=("animate_adapter", "vap", "dit.music_injector"),
    denoising=Denoising(
        pipeline="diffsynth.pipelines.wan_video:WanVideoPipeline",
        function="diffsynth.pipelines.wan_video:model_fn_wan_video",
        same="latents",
        empty=empty_result,
        blocks=blocks_of,
        refusal=music_refusal,
    ),
    refused_classes={
        "LongCatVideoTransformer3DModel": "LongCat-Video keeps caches of its own on one device, outside Wan's blocks",
        "WanAnimate2Transformer": "WanAnimate2 writes key and value caches inside its blocks, all on one device",
    },
    second={"dit2": "dit", "vace2": "vace"},  # the low-noise expert of a Wan2.2 pair
    text_encoders={"text_encoder": "diffsynth.models.wan_video_text_encoder.WanTextEncoder"},
    side_models={
        "text_encoder": ("forward",),
        "image_encoder": ("encode_image",),
        "vae": ("encode", "decode", "encode_framewise", "decode_framewise"),
        "audio_encoder": ("get_audio_feats_per_inference",),
    },
    satellites=("vace", "animate_adapter", "vap", "motion_controller"),
    companions=(
        # WanToDance and S2V inject music or speech behind certain blocks
        Companions("dit", "music_injector.injector", lambda dit: dit.music_injector.injected_block_id, after=True),
        Companions("dit", "audio_injector.injector", lambda dit: dit.audio_injector.injected_block_id, after=True),
        Companions(
            "dit", "audio_injector.injector_adain_layers", lambda dit: dit.audio_injector.injected_block_id, after=True
        ),
        # Animate fuses the face's motion behind every fifth block
        Companions(
            "animate_adapter",
            "face_adapter.fuser_blocks",
            lambda adapter: {5 * i: i for i in range(len(adapter.face_adapter.fuser_blocks))},
            after=True,
        ),
        # VAP's mixture of transformers computes a block's work from its children
        Companions("vap", "blocks", lambda vap: vap.mot_layers_mapping, after=False),
    ),
    # VACE computes all its hints before the blocks; each is added behind the block it is for
    hints=(Hints("vace", lambda vace: list(vace.vace_layers)),),
)
