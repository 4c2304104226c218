"""Decode room: one Wan VAE for four frameworks, decoder and encoder, split in time, in space or in tiles over GPUs."""

from wanshim.core.decoding.model.binding import Binding, find_binding
from wanshim.core.decoding.model.encoder_graph import Average, Downsample, DownStage, EncoderGraph, Graph
from wanshim.core.decoding.model.graph import Attention, Conv, DecoderGraph, Duplicate, Norm, ResBlock, Stage, Upsample
from wanshim.core.decoding.model.reader import (
    expect_silu,
    read_average,
    read_conv,
    read_downsample,
    read_duplicate,
    read_encoder,
    read_graph,
    read_norm,
)
from wanshim.core.decoding.plan import TileSettings
from wanshim.core.decoding.ranks.output import OutputSpec

from .decoder import DecodeOptions, ParallelDecoder
from .handle import DecodeHandle, parallelize_decode, parallelize_encode
from .plan import DecodeJob, DecodePlan
from .planner import make_plans
from .vae_decoders import DecodeFallback, DecoderCache, chosen_options, held_alone, held_by, sequence_group

__all__ = [
    "Attention",
    "Average",
    "Binding",
    "Conv",
    "DecodeHandle",
    "DecodeJob",
    "DecodeOptions",
    "DecodePlan",
    "DecoderGraph",
    "DownStage",
    "Downsample",
    "Duplicate",
    "EncoderGraph",
    "Graph",
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
    "held_alone",
    "held_by",
    "make_plans",
    "parallelize_decode",
    "parallelize_encode",
    "read_average",
    "read_conv",
    "read_downsample",
    "read_duplicate",
    "read_encoder",
    "read_graph",
    "read_norm",
    "sequence_group",
]
