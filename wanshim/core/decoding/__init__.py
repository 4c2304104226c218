"""Decode room: one Wan decoder for four frameworks, split in time, in space or in tiles over many GPUs."""

from wanshim.core.decoding.model.binding import Binding, find_binding
from wanshim.core.decoding.model.graph import Attention, Conv, DecoderGraph, Duplicate, Norm, ResBlock, Stage, Upsample
from wanshim.core.decoding.model.reader import expect_silu, read_conv, read_duplicate, read_graph, read_norm
from wanshim.core.decoding.plan import TileSettings
from wanshim.core.decoding.ranks.output import OutputSpec

from .decoder import DecodeOptions, ParallelDecoder
from .handle import DecodeHandle, parallelize_decode
from .plan import DecodeJob, DecodePlan
from .planner import make_plans
from .vae_decoders import DecodeFallback, DecoderCache, chosen_options, sequence_group

__all__ = [
    "Attention",
    "Binding",
    "Conv",
    "DecodeHandle",
    "DecodeJob",
    "DecodeOptions",
    "DecodePlan",
    "DecoderGraph",
    "Duplicate",
    "Norm",
    "DecodeFallback",
    "OutputSpec",
    "ParallelDecoder",
    "ResBlock",
    "DecoderCache",
    "Stage",
    "TileSettings",
    "Upsample",
    "chosen_options",
    "expect_silu",
    "find_binding",
    "make_plans",
    "parallelize_decode",
    "read_conv",
    "read_duplicate",
    "read_graph",
    "read_norm",
    "sequence_group",
]
