"""Frozen weights streamed: part of a model waits in host memory and comes to the device ahead of its use."""

from wanshim.core.streaming.host_copy import HostCopy, bytes_when_streamed, compute_from
from wanshim.core.streaming.stream import StreamHandle, stream_model, stream_of, streamable_bytes

__all__ = [
    "HostCopy",
    "StreamHandle",
    "bytes_when_streamed",
    "compute_from",
    "stream_model",
    "stream_of",
    "streamable_bytes",
]
