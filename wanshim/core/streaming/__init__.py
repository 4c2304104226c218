"""Frozen weights streamed: part of a model waits in host memory and comes to the device ahead of its use."""

from wanshim.core.streaming.plan import StreamPlan, plan_stream, streamed_blocks
from wanshim.core.streaming.shared_memory import Host, share
from wanshim.core.streaming.stream import StreamHandle, plan_of, stream_model, stream_of

__all__ = [
    "Host",
    "StreamHandle",
    "StreamPlan",
    "plan_of",
    "plan_stream",
    "share",
    "stream_model",
    "stream_of",
    "streamed_blocks",
]
