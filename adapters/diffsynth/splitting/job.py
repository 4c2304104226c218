"""A call of `launch_training_task` read as the training job that the core decides on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from wanshim.adapters.diffsynth import compiled_blocks, eight_bit_compute, kept_attention, kept_blocks, vram
from wanshim.adapters.diffsynth.checkpoint_offload import offload_asked
from wanshim.adapters.diffsynth.splitting import refusals, side_models
from wanshim.adapters.diffsynth.splitting.micro_batch import is_chunkable, known_family, micro_batch
from wanshim.adapters.diffsynth.splitting.steps import STEPS
from wanshim.adapters.diffsynth.training_road import TrainingCall
from wanshim.core.model_split import SplitHandle
from wanshim.core.shared.weight_bytes import num_bytes
from wanshim.core.strategy import CHUNK_TOKENS, MicroBatch, Request, Stored, Strategy, TrainingJob, Video, store_of
from wanshim.core.streaming import streamable_bytes
from wanshim.errors import PlacementInvalid
from wanshim.settings import Settings

EXCLUDING = {Strategy.STREAM: refusals.stream_refusal, Strategy.SEQUENCE: refusals.sequence_refusal}
# How a user of DiffSynth makes each change that the core proposes.
WORDS = {
    "chunks": "chunks of tokens: WANSHIM_CHUNK=auto",
    "split_points": "other split points: WANSHIM_SPLIT_AT={value}",
    "offload": "checkpoint offload: WANSHIM_OFFLOAD=on",
    "keep_off": "attention computed again: WANSHIM_KEEP=off",
    "without_side_models": "text encoder and VAE left out: --task sft:data_process first, then --task sft:train",
    "low_precision": "an fp8 base: WANSHIM_BASE=float8",
    "low_precision_and_offload": "an fp8 base and checkpoint offload: WANSHIM_BASE=float8 WANSHIM_OFFLOAD=on",
    "sequence": "each sample over all GPUs: wanshim run --gpus {value}",
    "fewer_frames": "fewer frames: --num_frames {value}",
    "launch": "wanshim run --gpus {value}",
    "processes": "accelerate launch --num_processes {value}",
    "choose": "WANSHIM_PLAN=auto chooses among the rest",
    "requested": "WANSHIM_PLAN={value}",
    "name_a_strategy": "; name one with WANSHIM_PLAN=stream",
    "stream": ", or WANSHIM_PLAN=stream",
    "expandable_segments": "; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves more memory for tensors",
}


def read_job(
    call: TrainingCall, handle: SplitHandle | None, read: Settings, *, planned: bool = True, keeps: bool = True,
    idle: frozenset[str] = frozenset(),
) -> TrainingJob:  # fmt: skip
    """The job of this call, over the stages of `handle` or, with None, on the accelerator's device.

    Args:
        planned: how it runs is wanshim's to choose; else it runs as DiffSynth trains, with what was asked for.
        keeps: attention and blocks may be kept.
        idle: side models that no step calls.

    Raises:
        FeatureUnavailable: it trains a side model that has left the first device.
    """
    pipe, accelerator, family, facts = call.pipe, call.accelerator, refusals.family_of(call.dit), call.facts
    request = replace(_request(call, read, planned=planned, keeps=keeps), idle=idle)
    if not planned:
        request = replace(request, strategy=Strategy.RESIDENT, offload=bool(request.offload), chunks=(None,))
    if family is None:
        return TrainingJob(
            devices=(str(call.device),), split_points=None, blocks=(), home=Stored(0), video=None, request=request,
            micro_batch=lambda tokens, chunk: MicroBatch(0, 0, 0, 0), unpredictable="this model is not known",
            chunkable=False, checkpointing=facts.checkpointing,
        )  # fmt: skip
    side_models.check_none_is_trained(pipe)
    graphs = compiled_blocks.graphs_of_a_block(request, accelerator.num_processes)
    compute = read.compute if eight_bit_compute.STEP.feature in request.block_changes else None

    @cache
    def of_tokens(tokens: int, chunk: int | None) -> MicroBatch:
        return micro_batch(pipe, tokens, chunk, graphs=graphs, compute=compute)

    unpredictable, chunkable = _unpredictable(pipe, facts.video, lambda tokens: of_tokens(tokens, request.chunks[0]))
    unpredictable = refusals.placed_by_another(call) or unpredictable
    blocks = tuple(store_of(block) for block in refusals.dit_blocks(pipe.dit))
    inside = sum(blocks[1:], blocks[0])
    everything = store_of(*(m for m in pipe.children() if not side_models.is_elsewhere(m)))
    waiting, excluded = _streamable(pipe.dit)
    for strategy, refusal in EXCLUDING.items():
        if (reason := refusal(call, read)) is not None:
            excluded[strategy] = reason
    if handle is not None and (reason := refusals.pipeline_refusal(handle, call, read)) is not None:
        excluded[Strategy.PIPELINE] = reason
    return TrainingJob(
        devices=handle.plan.devices if handle is not None else (str(call.device),),
        split_points=handle.plan.split_at if handle is not None else None,
        blocks=blocks,
        home=replace(everything, frozen=everything.frozen - inside.frozen, trained=everything.trained - inside.trained),
        streamable=waiting,
        model_bytes=num_bytes(pipe.dit),
        video=facts.video,
        sizes=facts.sizes,
        micro_batch=of_tokens,
        unpredictable=unpredictable,
        chunkable=chunkable,
        side_models=side_models.describe(pipe),
        moved=side_models.moved_bytes(pipe),
        accumulation=accelerator.gradient_accumulation_steps,
        processes=accelerator.num_processes,
        local_processes=refusals.ranks_here().size if handle is None else 1,
        checkpointing=facts.checkpointing,
        offloads_itself=facts.offloading,
        request=request,
        excluded=excluded,
        words={
            name: text
            for name, text in WORDS.items()
            if "WANSHIM_BASE" not in text or not _is_low_precision(pipe, read)
        },
    )


def _is_low_precision(pipe: Any, read: Settings) -> bool:
    """Whether the base is stored in fewer bits than it is computed in."""
    is_quantized = getattr(pipe.dit, "quantize_config", None) is not None
    return read.base is not None or is_quantized or vram.is_managed(pipe.dit)


def _request(call: TrainingCall, read: Settings, *, planned: bool, keeps: bool) -> Request:
    named, changes = named_plan(read), block_changes(call, read)
    if read.chunk == "auto":
        chunks: tuple[int | None, ...] = (None,) if compiled_blocks.STEP.feature in changes else (None, CHUNK_TOKENS)
    else:
        chunks = (read.chunk if isinstance(read.chunk, int) else None,)
    keep_blocks = kept_blocks.STEP.asked(read) or (None if planned and read.keep == "auto" else False)
    may_keep = keeps and read.keep != "off" and kept_attention.refusal(call) is None
    return Request(
        strategy=Strategy(named) if named is not None else None,
        streamed_blocks=read.plan_count if named == "stream" else None,
        ranks=read.plan_count if named == "sequence" else None,
        chunks=chunks,
        offload=True if offload_asked(call, read) else None if read.offload == "auto" else False,
        keep=(True if read.keep == "attention" else None) if may_keep else False,
        keep_blocks=keep_blocks if keeps and kept_blocks.refusal(call) is None else False,
        block_changes=changes,
    )


def block_changes(call: TrainingCall, read: Settings) -> dict[str, str]:
    """The statement of each thing that the settings ask the blocks to compute otherwise, by feature."""
    return {
        step.feature: step.changes_blocks.format(value=getattr(read, step.setting))
        for step in STEPS
        if step.changes_blocks and step.asked(read) and step.refusal(call, read) is None
    }


def named_plan(read: Settings) -> str | None:
    """The plan that the user named, if that is not left to wanshim."""
    return read.plan_name if read.plan_name != "auto" else None


def _unpredictable(pipe: Any, video: Video | None, trial: Callable[[int], object]) -> tuple[str, bool]:
    """Why no peak can be predicted, or nothing; and whether the blocks compute the same in chunks."""
    name, chunkable = type(pipe.dit).__name__, is_chunkable(pipe.dit)
    if known_family(pipe.dit) is None:
        return f"{name} is not a model whose blocks are known; no chunks", False
    if video is None:
        return "the training script's arguments do not say how large the videos are", chunkable
    try:
        trial(video.tokens)
    except Exception as error:  # a block that cannot be run on shapes is no reason not to train
        return f"{name} does not run on shapes alone: {error}", False
    return "", chunkable


def _streamable(dit: torch.nn.Module) -> tuple[tuple[int, ...], dict[Strategy, str]]:
    """Bytes of each block that could wait in host memory, or why streaming is excluded."""
    family = refusals.family_of(dit)
    try:
        return streamable_bytes(dit, family.blocks[0] if family is not None else None), {}
    except PlacementInvalid as error:
        return (), {Strategy.STREAM: error.found}
