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
    from wanshim.core.model_split import SplitHandle
    from wanshim.core.strategy import Job, MicroBatch, Proposal
    from wanshim.core.streaming import StreamPlan

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


def find_room(handle: SplitHandle, arguments: dict[str, Any], tell: Callable[[str], None], *, in_flight: int) -> Room:
    """Predict the peak, with offload and chunks if it needs them, and say so. Nothing is changed.

    Args:
        in_flight: micro-batches that could overlap; 1 is the plain split. The answer may have fewer.

    Raises:
        PlacementInvalid: the step would not fit, with what would.
    """
    from wanshim.core.model_split.side_models import lodged_bytes
    from wanshim.core.strategy import available_on, check_fit

    plan, pipe = handle.plan, arguments["model"].pipe
    available = {d: n - lodged_bytes([*pipe.children()], d) for d, n in available_on(plan.devices).items()}
    room, job = first_that_fits(steps_of(arguments, tell, plan.devices, plan.split_at, in_flight), available)
    if job is not None and (video := video_of(pipe, arguments.get("args"))) is not None:
        peaks = check_fit(job, available, _proposals(job, pipe, video, room.tokens, available))
        tell(f"predicted peak for {video.tokens} tokens: " + "; ".join(map(str, peaks)))
    return room


def first_that_fits(ways: Iterator[tuple[Room, Job | None]], available: dict[str, int]) -> tuple[Room, Job | None]:
    """Or the last, if none does."""
    from wanshim.core.strategy import predict
    from wanshim.core.strategy.limits import fits, usable

    expandable = settings.read().expandable_segments
    way = next(ways)  # there is one at least
    while way[1] is not None and not fits(predict(way[1]), usable(way[1], available, expandable_segments=expandable)):
        following = next(ways, None)
        if following is None:
            break
        way = following
    return way


def room_to_stream(
    arguments: dict[str, Any], device: str, tell: Callable[[str], None], count: int | None
) -> tuple[Room, StreamPlan]:
    """How the steps are taken on one device with frozen weights streamed, and how many blocks wait on the host.

    Args:
        count: that many blocks; default: as few as fit, and half of them where nothing can be predicted.

    Raises:
        PlacementInvalid: nothing fits, or nothing can be streamed.
    """
    from wanshim.core.model_split.plan import format_bytes
    from wanshim.core.shared.weight_bytes import num_bytes
    from wanshim.core.strategy import available_on, predict
    from wanshim.core.streaming import plan_of

    dit = arguments["model"].pipe.dit
    limit, whole = available_on((device,)).get(device), num_bytes(dit)
    for room, job in steps_of(arguments, tell, (device,), (), 1):
        if job is None or limit is None:
            return room, plan_of(dit, device, count=count)
        (peak,) = predict(job)
        rest = peak.total - whole
        try:
            plan = plan_of(dit, device, count=count, budget=None if count else limit - rest)
        except PlacementInvalid:
            if count is not None:
                raise
            continue
        if rest + plan.device_bytes <= limit:
            tell(f"predicted peak with {len(plan.streamed)} blocks streamed: {format_bytes(rest + plan.device_bytes)}")
            return room, plan
    assert limit is not None  # or the first way had been taken
    raise PlacementInvalid(
        f"this training step does not fit {device} with its frozen weights streamed: besides them it needs "
        f"{format_bytes(rest)}",
        expected=f"at most {format_bytes(limit)}",
        hint="Use fewer frames, or a split over several GPUs",
    )


def put(room: Room, arguments: dict[str, Any], joints: Joints, tell: Callable[[str], None]) -> None:
    """Offload and chunks as decided, until `joints` ends."""
    if room.tokens is not None:
        _put_chunks(arguments["model"].pipe.dit, room.tokens, joints, tell)
    if room.offload:
        read = settings.read()
        asked = offload_asked(arguments)
        why = read.sources.get("offload", f"--{OPTION}") if asked else "the step would not fit without"
        tell(f"checkpoints are offloaded to host memory, bit for bit the same: {why}")
        offload_checkpoints(joints, tell, every=True)


def steps_of(
    arguments: dict[str, Any], tell: Callable[[str], None], devices: tuple[str, ...], points: tuple[int, ...],
    in_flight: int,
) -> Iterator[tuple[Room, Job | None]]:  # fmt: skip
    """Ways to take the steps in order of preference, each with what is predicted for it; one way and None where
    nothing can be, with the reason told."""
    read, asked, args = settings.read(), offload_asked(arguments), arguments.get("args")
    default = Room(read.chunk if isinstance(read.chunk, int) else None, asked, in_flight)
    pipe = arguments["model"].pipe
    name = type(pipe.dit).__name__
    if name not in KNOWN_DITS:
        tell(f"peak not predicted, no chunks: not known for {name}")
        yield replace(default, tokens=None), None
        return
    video = video_of(pipe, args)
    if video is None:
        tell("peak not predicted: the training script's arguments do not say how large the videos are")
        yield default, None
        return
    works: dict[int | None, MicroBatch] = {}
    try:
        works[default.tokens] = micro_batch(pipe, video.tokens, default.tokens)
    except Exception as error:  # a block that cannot be run on shapes is no reason not to train
        tell(f"peak not predicted: {name} does not run on shapes alone: {error}")
        yield replace(default, tokens=None), None
        return
    for room in _rooms(default, checkpointing_asked(args)):
        if room.tokens not in works:
            works[room.tokens] = micro_batch(pipe, video.tokens, room.tokens)
        yield room, _job(arguments, devices, points, works[room.tokens], room)


def _job(
    arguments: dict[str, Any], devices: tuple[str, ...], points: tuple[int, ...], work: MicroBatch, room: Room
) -> Job:
    from wanshim.core.model_split.side_models import lodging_of
    from wanshim.core.strategy import Job, store_of

    pipe, args = arguments["model"].pipe, arguments.get("args")
    blocks = tuple(store_of(block) for block in pipe.dit.blocks)
    elsewhere = [m for m in pipe.children() if getattr(m, "vram_management_enabled", False) or lodging_of(m)]
    everything = store_of(*(m for m in pipe.children() if m not in elsewhere))
    inside = sum(blocks[1:], blocks[0])
    return Job(
        blocks=blocks,
        home=replace(everything, frozen=everything.frozen - inside.frozen, trained=everything.trained - inside.trained),
        devices=devices,
        points=points,
        micro_batch=work,
        in_flight=room.in_flight,
        checkpointing=checkpointing_asked(args),
        offloading=room.offload or bool(getattr(args, OPTION, False)),  # DiffSynth's own
        processes=arguments["accelerator"].num_processes,
    )


def checkpointing_asked(args: Any) -> bool:
    return bool(getattr(args, "use_gradient_checkpointing", True)) or bool(getattr(args, OPTION, False))


def _rooms(default: Room, checkpointing: bool) -> Iterator[Room]:
    """Ways to take the steps, in order of preference: what changes no bit comes before what does."""
    read = settings.read()
    named = read.plan is not None and read.plan.name == "lanes"
    can = checkpointing and (default.offload or read.offload == "auto")
    for tokens in (None, CHUNK_TOKENS) if read.chunk == "auto" else (default.tokens,):
        yield replace(default, tokens=tokens)
        if can and not default.offload:
            yield replace(default, tokens=tokens, offload=True)
        if default.in_flight > 1 and not named:
            yield Room(tokens, offload=can, in_flight=1)


def micro_batch(pipe: Any, tokens: int, chunk: int | None) -> MicroBatch:
    """One micro-batch of this many tokens through a block of this pipeline's DiT, in chunks or whole."""
    import torch
    from diffsynth.models import wan_video_dit

    from wanshim.core.strategy import MicroBatch, trace_block

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
    from wanshim.core.strategy.chunking import chunk_module

    def chunked(module: Any) -> Callable[[Any], Any]:
        return lambda original: chunk_module(module, original, tokens)

    for path in paths:
        module = block.get_submodule(path)
        joints.replace(module, "forward", chunked(module))


def chunk_rope(tokens: int, joints: Joints) -> None:
    from diffsynth.models import wan_video_dit

    from wanshim.core.strategy.chunking import chunk_rotary

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
    from wanshim.core.model_split.side_models import lodging_of
    from wanshim.core.strategy import Proposal, split_points_that_fit, store_of

    fp8, offloaded = job.with_frozen_halved(), replace(job, offloading=True)
    if tokens is None:
        chunked = replace(job, micro_batch=micro_batch(pipe, video.tokens, CHUNK_TOKENS))
        yield Proposal("chunks of tokens: WANSHIM_CHUNK=auto", chunked)
    points = split_points_that_fit(job, available)
    if points is not None:
        numbers = ",".join(map(str, points))
        yield Proposal(f"other split points: WANSHIM_SPLIT_AT={numbers}", replace(job, points=points))
    if job.checkpointing and not job.offloading:
        yield Proposal("checkpoint offload: WANSHIM_OFFLOAD=on", replace(offloaded, in_flight=1))
    named = [m for name, m in pipe.named_children() if name in ("text_encoder", "image_encoder", "vae")]
    guests = [m for m in named if lodging_of(m) is None]
    if guests:
        alone = replace(job, home=replace(job.home, frozen=job.home.frozen - store_of(*guests).frozen))
        yield Proposal(
            "text encoder and VAE left out: --task sft:data_process first, then --task sft:train",
            alone,
        )
    if "base" in settings.VARIABLES:
        yield Proposal("an fp8 base: WANSHIM_BASE=float8", fp8)
        yield Proposal("an fp8 base and checkpoint offload", replace(fp8, offloading=True))
    fewer = _fewer_frames(job, pipe, video, tokens, available)
    if fewer is not None:
        yield fewer


def _fewer_frames(job: Job, pipe: Any, video: Video, tokens: int | None, available: dict[str, int]) -> Proposal | None:
    from wanshim.core.strategy import Proposal, predict
    from wanshim.core.strategy.limits import fits

    for frames in range(video.frames - 1, 0, -1):
        less = replace(job, micro_batch=micro_batch(pipe, frames * video.tokens_per_frame, tokens))
        if fits(predict(less), available):
            return Proposal(f"fewer frames: --num_frames {(frames - 1) * pipe.time_division_factor + 1}", less)
    return None
