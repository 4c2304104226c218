"""Room for a split Wan DiT in training: the peak predicted, offload and chunks where needed, or one clear refusal.

Known when `launch_training_task` begins: the weights as they are stored, what is trained, and the video's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.checkpoint_offload import OPTION, offload_asked, offload_checkpoints

from wanshim import settings
from wanshim.errors import PlacementInvalid
from wanshim.patching.joints import Joints

if TYPE_CHECKING:
    from wanshim.core.placement import SplitHandle
    from wanshim.core.placement.memory import Job, MicroBatch, Proposal

KNOWN_DITS = ("WanModel",)  # whose blocks are called with activation, context, modulation and frequencies
CHUNK_TOKENS = 2048  # products of this many rows keep a GPU busy; fewer gain no room, attention is what peaks then
TEXT_TOKENS, IMAGE_TOKENS = 512, 257  # what WanModel's prompt and CLIP image take of the context
NORMS = ("self_attn.norm_q", "self_attn.norm_k", "cross_attn.norm_q", "cross_attn.norm_k")
FLASH_FLAGS = ("FLASH_ATTN_3_AVAILABLE", "FLASH_ATTN_2_AVAILABLE", "SAGE_ATTN_AVAILABLE")


@dataclass(frozen=True)
class Video:
    """Latent frames, and tokens of one of them."""

    frames: int
    tokens_per_frame: int

    @property
    def tokens(self) -> int:
        return self.frames * self.tokens_per_frame


def video_of(pipe: Any, args: Any) -> Video | None:
    """The largest video that the training script's arguments allow, or None where they do not say."""
    frames = getattr(args, "num_frames", None)
    height, width = getattr(args, "height", None), getattr(args, "width", None)
    pixels = height * width if height and width else getattr(args, "max_pixels", None)
    if not frames or not pixels:
        return None
    per_token = pipe.height_division_factor * pipe.width_division_factor
    return Video((frames - 1) // pipe.time_division_factor + 1, -(-pixels // per_token))


@dataclass(frozen=True)
class Room:
    """How the steps are taken. `tokens`: of a chunk, None without; `in_flight`: micro-batches that overlap."""

    tokens: int | None
    offload: bool
    in_flight: int


def make_room(
    handle: SplitHandle, arguments: dict[str, Any], joints: Joints, tell: Callable[[str], None], *, in_flight: int
) -> Room:
    """Predict the peak, put offload and chunks in until `joints` ends if it needs them, and say so.

    Args:
        in_flight: micro-batches that could overlap; 1 is the plain split. The answer may have fewer.

    Raises:
        PlacementInvalid: the step would not fit, with what would.
    """
    read, asked = settings.read(), offload_asked(arguments)
    default = Room(read.chunk if isinstance(read.chunk, int) else None, asked, 1 if asked else in_flight)
    room = _plan(handle, arguments, tell, default)
    if room.tokens is not None:
        _put_chunks(arguments["model"].pipe.dit, room.tokens, joints, tell)
    if room.offload:
        why = read.sources.get("offload", f"--{OPTION}") if asked else "the step would not fit without"
        tell(f"checkpoints are offloaded to host memory, bit for bit the same: {why}")
        offload_checkpoints(joints, tell, every=True)
    return room


def _plan(handle: SplitHandle, arguments: dict[str, Any], tell: Callable[[str], None], default: Room) -> Room:
    """The first way that fits; `default`, with the reason told, where nothing can be predicted."""
    from wanshim.core.placement.memory import available_bytes, check_fit

    pipe = arguments["model"].pipe
    if type(pipe.dit).__name__ not in KNOWN_DITS:
        tell(f"peak not predicted, no chunks: not known for {type(pipe.dit).__name__}")
        return replace(default, tokens=None)
    video = video_of(pipe, arguments.get("args"))
    if video is None:
        tell("peak not predicted: the training script's arguments do not say how large the videos are")
        return default
    found = {device: available_bytes(device) for device in handle.plan.devices}
    available = {device: count for device, count in found.items() if count is not None}
    try:
        job, room = _choose(handle, arguments, video, available, default)
    except PlacementInvalid:
        raise
    except Exception as error:  # a block that cannot be run on shapes is no reason not to train
        tell(f"peak not predicted: {type(pipe.dit).__name__} does not run on shapes alone: {error}")
        return replace(default, tokens=None)
    peaks = check_fit(job, available, _proposals(job, pipe, video, room.tokens, available))
    tell(f"predicted peak for {video.tokens} tokens: " + "; ".join(map(str, peaks)))
    return room


def _choose(
    handle: SplitHandle, arguments: dict[str, Any], video: Video, available: dict[str, int], default: Room
) -> tuple[Job, Room]:
    """The step to take: the first of `_rooms` that fits, else the last."""
    from wanshim.core.placement.memory import Job, predict, store_of
    from wanshim.core.placement.memory.fit import fits

    pipe, args = arguments["model"].pipe, arguments.get("args")
    blocks = tuple(store_of(block) for block in pipe.dit.blocks)
    everything = store_of(*(m for m in pipe.children() if not getattr(m, "vram_management_enabled", False)))
    inside = sum(blocks[1:], blocks[0])
    job = Job(
        blocks=blocks,
        home=replace(everything, frozen=everything.frozen - inside.frozen, trained=everything.trained - inside.trained),
        devices=handle.plan.devices,
        points=handle.plan.split_at,
        micro_batch=micro_batch(pipe, video.tokens, default.tokens),
        checkpointing=_checkpointing(args),
    )
    works = {default.tokens: job.micro_batch}
    for room in _rooms(default, job.checkpointing):
        if room.tokens not in works:
            works[room.tokens] = micro_batch(pipe, video.tokens, room.tokens)
        # DiffSynth's own offload works in the plain split, and not in lanes either
        offloading = room.offload or (room.in_flight == 1 and bool(getattr(args, OPTION, False)))
        job = replace(job, micro_batch=works[room.tokens], in_flight=room.in_flight, offloading=offloading)
        if fits(predict(job), available):
            break
    return job, room


def _checkpointing(args: Any) -> bool:
    return bool(getattr(args, "use_gradient_checkpointing", True)) or bool(getattr(args, OPTION, False))


def _rooms(default: Room, checkpointing: bool) -> Iterator[Room]:
    """Ways to take the steps, in order of preference: what changes no bit comes before what does."""
    read = settings.read()
    more = read.offload == "auto" and checkpointing and not default.offload
    for tokens in (None, CHUNK_TOKENS) if read.chunk == "auto" else (default.tokens,):
        yield replace(default, tokens=tokens)
        if more:
            yield Room(tokens, offload=True, in_flight=1)


def micro_batch(pipe: Any, tokens: int, chunk: int | None) -> MicroBatch:
    """One micro-batch of this many tokens through a block of this pipeline's DiT, in chunks or whole."""
    import torch
    from diffsynth.models import wan_video_dit

    from wanshim.core.placement.memory import MicroBatch, trace_block

    dit = pipe.dit
    block = dit.blocks[0]
    shape = {"device": "meta", "dtype": pipe.torch_dtype}
    context = TEXT_TOKENS + (IMAGE_TOKENS if getattr(dit, "has_image_input", False) else 0)
    each = (tokens,) if getattr(dit, "seperated_timestep", False) else ()  # a time step for every token
    x = torch.empty((1, tokens, dit.dim), **shape)
    frequencies = torch.empty((tokens, 1, dit.dim // block.num_heads // 2), dtype=torch.complex128, device="meta")
    shared = (
        torch.empty((1, context, dit.dim), **shape),
        torch.empty((1, *each, 6, dit.dim), **shape),
        frequencies,
    )
    with Joints() as trial:
        for flag in FLASH_FLAGS:  # other kernels know no shapes alone, and hold what a flash kernel holds
            trial.replace(wan_video_dit, flag, lambda _: False)
        if chunk is not None:
            chunk_block(block, chunk, trial)
            chunk_rope(chunk, trial)
        working = trace_block(block, (x, *shared))
    bytes_of = [t.numel() * t.element_size() for t in (x, *shared)]
    return MicroBatch(bytes_of[0], sum(bytes_of[1:]), working.kept, working.peak)


def chunk_block(block: Any, tokens: int, joints: Joints, paths: tuple[str, ...] = (*NORMS, "ffn")) -> None:
    """The feed-forward network and the norms of queries and keys, in chunks of tokens."""
    from wanshim.core.placement.chunking import chunk_module

    def chunked(module: Any) -> Callable[[Any], Any]:
        return lambda original: chunk_module(module, original, tokens)

    for path in paths:
        module = block.get_submodule(path)
        joints.replace(module, "forward", chunked(module))


def chunk_rope(tokens: int, joints: Joints) -> None:
    from diffsynth.models import wan_video_dit

    from wanshim.core.placement.chunking import chunk_rotary

    joints.replace(wan_video_dit, "rope_apply", lambda original: chunk_rotary(original, tokens))


def _put_chunks(dit: Any, tokens: int, joints: Joints, tell: Callable[[str], None]) -> None:
    for block in dit.blocks:
        chunk_block(block, tokens, joints)
    chunk_rope(tokens, joints)
    tell(
        f"rotary embedding, norms and feed-forward network in chunks of {tokens} tokens: the first two bit for bit, "
        "the last equal up to the order of summation (WANSHIM_CHUNK)"
    )


def _proposals(job: Job, pipe: Any, video: Video, tokens: int | None, available: dict[str, int]) -> Iterator[Proposal]:
    """What the user could change, one thing at a time and then two."""
    from wanshim.core.placement.memory import Proposal, split_points_that_fit, store_of

    fp8, offloaded = job.with_frozen_halved(), replace(job, offloading=True)
    if tokens is None:
        chunked = replace(job, micro_batch=micro_batch(pipe, video.tokens, CHUNK_TOKENS))
        yield Proposal("chunks of tokens: WANSHIM_CHUNK=auto", chunked)
    points = split_points_that_fit(job, available)
    if points is not None:
        named = ",".join(map(str, points))
        yield Proposal(f"other split points: WANSHIM_SPLIT_AT={named}", replace(job, points=points))
    if job.checkpointing and not job.offloading:
        yield Proposal("checkpoint offload: WANSHIM_OFFLOAD=on", replace(offloaded, in_flight=1))
    guests = [m for name, m in pipe.named_children() if name in ("text_encoder", "image_encoder", "vae")]
    if guests:
        alone = replace(job, home=replace(job.home, frozen=job.home.frozen - store_of(*guests).frozen))
        yield Proposal("text encoder and VAE left out: cache the data with --task sft:data_process first", alone)
    if "base" in settings.VARIABLES:
        yield Proposal("an fp8 base: WANSHIM_BASE=float8", fp8)
        yield Proposal("an fp8 base and checkpoint offload", replace(fp8, offloading=True))
    fewer = _fewer_frames(job, pipe, video, tokens, available)
    if fewer is not None:
        yield fewer


def _fewer_frames(job: Job, pipe: Any, video: Video, tokens: int | None, available: dict[str, int]) -> Proposal | None:
    from wanshim.core.placement.memory import Proposal, predict
    from wanshim.core.placement.memory.fit import fits

    for frames in range(video.frames - 1, 0, -1):
        less = replace(job, micro_batch=micro_batch(pipe, frames * video.tokens_per_frame, tokens))
        if fits(predict(less), available):
            return Proposal(f"fewer frames: --num_frames {(frames - 1) * pipe.time_division_factor + 1}", less)
    return None
