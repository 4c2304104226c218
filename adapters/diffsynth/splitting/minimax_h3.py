"""The placement of a MiniMax-H3 pipeline when its DiT is split: the table, as data. Its shape is in `family.py`.

A sample is one sequence: text, audio and video, filled up to a multiple of 64. `cu_seqlens` says where attention ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.splitting.family import Denoising, Family, Hints
from wanshim.core.sequence import BlockList
from wanshim.core.strategy import Video

if TYPE_CHECKING:
    import torch

MODULE = "diffsynth.models.minimax_h3_dit"
ATTENTION = "_sdpa_varlen_attention"
GROUP, FIRST = 5, 2  # latent frames of each group of `time_division_factor` frames of video, and those before
LATENT_PIXELS = 16  # of a side, for one latent
PATCH = 2
AUDIO_RATE, FRAME_RATE, CHANNELS = 40.0, 24.0, 2
TEXT_TOKENS, ALIGNMENT = 512, 64
MODALITIES = 3
TIMESTEPS = 2  # of video and audio; conditions have one more


def video_of(pipe: Any, inputs: Mapping[str, Any]) -> Video | None:
    """The size of a sample: that of the packed sequence, if there is one, else by latents, else by frames and pixels,
    with a prompt of 512 tokens."""
    latents = inputs.get("video_latents", inputs.get("input_latents"))
    if getattr(latents, "ndim", 0) == 5:
        groups = (latents.shape[2] - FIRST) // GROUP
        per_frame = latents.shape[3] // PATCH * (latents.shape[4] // PATCH)
    elif "pixels" in inputs:
        groups = (inputs["num_frames"] - pipe.time_division_remainder) // pipe.time_division_factor
        per_frame = -(-inputs["pixels"] // (LATENT_PIXELS * PATCH) ** 2)
    else:
        return None
    stride, first = pipe.time_division_factor, pipe.time_division_remainder
    audio = round((groups * stride + first) / FRAME_RATE * AUDIO_RATE) * CHANNELS
    used = TEXT_TOKENS + audio + (groups * GROUP + FIRST) * per_frame
    packed = inputs.get("packed")
    tokens = packed["seq_len"] if packed else -(-used // ALIGNMENT) * ALIGNMENT
    per_group = GROUP * per_frame + round(stride / FRAME_RATE * AUDIO_RATE * CHANNELS)
    beside = tokens - (groups + 1) * per_group
    return Video(frames=groups + 1, tokens_per_frame=per_group, stride=stride, first=first, beside=beside)


def block_inputs(pipe: Any, tokens: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The tokens, and what all blocks share. The bounds are read by value, and so they have elements."""
    import numpy as np
    import torch

    dit = pipe.dit
    width = dit.blocks[0].adaln_proj.linear.in_features
    shape = {"device": "meta", "dtype": pipe.torch_dtype}
    return (torch.empty((tokens, dit.hidden_size), **shape),), {
        "t_emb": torch.empty((TIMESTEPS, width), **shape),
        "combined_indices": torch.empty((tokens,), dtype=torch.long, device="meta"),
        "rope_freqs": torch.empty((tokens, 6 * dit.rope.inv_freq_len), device="meta"),
        "cu_seqlens": np.array([0, tokens]),
        "max_seqlen": tokens,
    }


class Bounds:
    """Numbers that a tensor was made of, as `tolist` gives them."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers

    def tolist(self) -> tuple[int, ...]:
        return self.numbers


def attention_between_numbers(original: Any) -> Any:
    """`_sdpa_varlen_attention` whose bounds are numbers inside the graphs: a graph cannot read those of a tensor."""

    def attention(q: Any, k: Any, v: Any, cu_seqlens: Any, softmax_scale: float) -> Any:
        bounds = Bounds(cu_seqlens) if isinstance(cu_seqlens, tuple) else cu_seqlens
        return original(q, k, v, cu_seqlens=bounds, softmax_scale=softmax_scale)

    return attention


def block_lists(pipe: Any, compiled: bool = False) -> list[BlockList]:
    """The DiT's blocks, whose module has the function by which they attend: queries and keys are turned before it,
    token by token. What the refiner of the text and the control net attend to stays whole."""
    return [
        BlockList(
            blocks=list(pipe.dit.blocks),
            exit=pipe.dit.final_layer,
            function=f"{type(pipe.dit).__module__}:{ATTENTION}",
            num_heads=("attn.num_heads",),
            per_token={"x": {2: 0}, "combined_indices": {1: 0}, "rope_freqs": {2: 0}},
            whole=(),
        )
    ]


def blocks_of(_: Any, *, dit: Any, **__: Any) -> list[BlockList]:
    """The blocks through which the tokens of one `model_fn_minimax_h3` go."""
    return block_lists(SimpleNamespace(dit=dit))


def empty_result(*, video_latents: torch.Tensor, audio_latents: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
    """An empty result of `model_fn_minimax_h3`."""
    return video_latents.new_empty(video_latents.shape), audio_latents.new_empty(audio_latents.shape)


def few_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments of `model_fn_minimax_h3` with one token of text, one of each channel of audio and one of video, without
    conditions."""
    import torch

    packed, video, audio = kwargs["packed"], kwargs["video_latents"], kwargs["audio_latents"]
    rows = [*packed["text_pos"][:1], *packed["audio_pos"][: audio.shape[0]], packed["img_pos"][-1]]
    places = torch.stack(rows).to(packed["img_pos"].device)
    used = len(rows)
    few = {
        "text_pos": torch.arange(1),
        "audio_pos": torch.arange(1, used - 1),
        "img_pos": torch.arange(used - 1, used),
        "img_position_ids": packed["img_position_ids"][:, places],
        "token_tags": packed["token_tags"][places],
        "cu_seqlens": torch.tensor([0, used, used], dtype=packed["cu_seqlens"].dtype),
    }
    few = {name: value.to(packed[name].device) for name, value in few.items()}
    of_conditions = ("ref_", "keyframe_", "denoise_mask_", "input_latents_", "control_rows")
    conditions = [name for name in kwargs if name.startswith(of_conditions)]
    return args, {
        **kwargs,
        **dict.fromkeys(conditions),
        "packed": {**few, "seq_len": used},
        "prompt_embeds": kwargs["prompt_embeds"][:1],
        "video_latents": video[:, :, :1, :PATCH, :PATCH].contiguous(),
        "audio_latents": audio[..., :1].contiguous(),
    }


def count_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int(kwargs["packed"]["token_tags"].shape[0])


CLASSES = (
    f"{MODULE}.MiniMaxH3DiT",
    f"{MODULE}_comfy.MiniMaxH3DiTComfy",
    f"{MODULE}_comfy.MiniMaxH3DiTComfyPruned",
)
FAMILY = Family(
    name="MiniMax-H3",
    modules=MODULE,
    blocks=("blocks",),
    exits=("final_layer",),
    split_classes=CLASSES,
    sharded_classes=CLASSES,
    block_lists=block_lists,
    exchanged=f"{MODULE}:{ATTENTION}",
    num_heads="attn.num_heads",
    num_heads_argument="num_attention_heads",
    sees_all_tokens=("controlnet",),
    denoising=Denoising(
        pipeline="diffsynth.pipelines.minimax_h3_audio_video:MiniMaxH3Pipeline",
        function="diffsynth.pipelines.minimax_h3_audio_video:model_fn_minimax_h3",
        same="video_latents",
        empty=empty_result,
        few=few_tokens,
        count=count_tokens,
        blocks=blocks_of,
    ),
    refused_parts={"dit.vdn_enabled": "VDN: its blocks attend by kernels of their own, over a layout that they keep"},
    known_classes=CLASSES[:1],
    block_inputs=block_inputs,
    in_graphs={f"{MODULE}:{ATTENTION}": attention_between_numbers},
    by_value=("cu_seqlens", "max_seqlen"),
    video=video_of,
    text_encoders={"text_encoder": "diffsynth.models.minimax_h3_text_encoder.MiniMaxH3TextEncoder"},
    side_models={
        "text_encoder": ("forward",),
        "video_vae": ("encode_video", "decode_video"),
        "audio_vae": ("encode_audio", "decode_audio"),
    },
    satellites=("controlnet",),
    # the control net computes all its hints before the blocks; each is added behind the block it is for
    hints=(Hints("controlnet", lambda controlnet: list(controlnet.control_layers)),),
)
