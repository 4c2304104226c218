"""Decode room: one Wan decoder for four frameworks, split in time, in space or in tiles over many GPUs."""

from .binding import Binding, find_binding
from .decode import DecodeOptions, ParallelDecoder
from .graph import Attention, Conv, DecoderGraph, Duplicate, Norm, ResBlock, Stage, Upsample
from .handle import DecodeHandle, parallelize_decode
from .plan import DecodeJob, DecodePlan, make_plans
from .reader import expect_silu, read_conv, read_duplicate, read_graph, read_norm
from .shared import NotShared, SharedDecodes, chosen_options, sequence_group
from .sink import OutputSpec
from .tile import TileSettings

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
    "NotShared",
    "OutputSpec",
    "ParallelDecoder",
    "ResBlock",
    "SharedDecodes",
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
