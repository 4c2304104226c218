"""Sequence parallel: the tokens of one sample over the ranks of a group."""

from .blocks import BlockList, TextStream, check_tokens_apart
from .gradients import refuse_hooks
from .group import SequenceGroup
from .inference import check_shardable, sharded
from .random_state import random_states, set_random_states
from .shard import SequenceHandle, sequence_of, shard_sequence

__all__ = [
    "BlockList",
    "SequenceGroup",
    "SequenceHandle",
    "TextStream",
    "check_shardable",
    "check_tokens_apart",
    "random_states",
    "refuse_hooks",
    "sequence_of",
    "set_random_states",
    "shard_sequence",
    "sharded",
]
