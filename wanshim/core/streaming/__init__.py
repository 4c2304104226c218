"""Frozen weights streamed: part of a model waits in host memory and comes to the device ahead of its use."""

from wanshim.core.streaming.plan import plan_stream, streamed_blocks
from wanshim.core.streaming.shared_memory import LocalRanks, allocate
from wanshim.core.streaming.stream import (
    StreamHandle,
    bytes_when_streamed,
    stream_model,
    stream_of,
    stream_whole,
    streamable_bytes,
)

__all__ = [
    "LocalRanks",
    "StreamHandle",
    "allocate",
    "bytes_when_streamed",
    "plan_stream",
    "stream_model",
    "stream_of",
    "stream_whole",
    "streamable_bytes",
    "streamed_blocks",
]
