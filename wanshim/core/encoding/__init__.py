"""Prompt encoding: one rank of a machine encodes, all ranks have the embeddings, no collective is called."""

from wanshim.core.encoding.layers import visiting_layers
from wanshim.core.encoding.once import TIMEOUT_S, encode_once
from wanshim.core.encoding.placement import (
    EncoderPlan,
    choose_device,
    peer_gpu_bytes,
    plan_encoder,
    read_checkpoint,
)
from wanshim.core.encoding.request import EncoderSource, EncodingRequest

__all__ = [
    "TIMEOUT_S",
    "EncoderPlan",
    "EncoderSource",
    "EncodingRequest",
    "choose_device",
    "encode_once",
    "peer_gpu_bytes",
    "plan_encoder",
    "read_checkpoint",
    "visiting_layers",
]
