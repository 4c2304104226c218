"""Decode room: one Wan VAE for four frameworks, decoder and encoder, split in time, in space or in tiles over GPUs."""

from wanshim.core.decoding.model.binding import Binding, Call, Compute, find_binding, graph_of
from wanshim.core.decoding.model.framework import VaeFallback, compute_untiled
from wanshim.core.decoding.model.graph import Graph
from wanshim.core.decoding.model.reader import ModuleReader, read_graph, read_wan_graph
from wanshim.core.decoding.plan import TileSettings
from wanshim.core.decoding.ranks.output import OutputSpec

from .call import KernelsMissing, ParallelVae, VaeOptions, input_first
from .handle import VaeHandle, parallelize_decode, parallelize_encode
from .plan import VaePlan
from .vae_cache import VaeCache, held_alone, held_by, sequence_group

__all__ = [
    "Binding",
    "Call",
    "Compute",
    "VaeHandle",
    "VaeOptions",
    "VaePlan",
    "Graph",
    "KernelsMissing",
    "ModuleReader",
    "VaeFallback",
    "compute_untiled",
    "OutputSpec",
    "ParallelVae",
    "VaeCache",
    "TileSettings",
    "find_binding",
    "graph_of",
    "input_first",
    "held_alone",
    "held_by",
    "parallelize_decode",
    "parallelize_encode",
    "read_graph",
    "read_wan_graph",
    "sequence_group",
]
