"""Sequence parallel training: the tokens of one sample over the ranks of a group."""

from .blocks import BlockList
from .leader import Leader
from .plan import SequencePlan, plan_sequence
from .random_state import random_states, set_random_states
from .shard import SequenceHandle, sequence_of, shard_sequence

__all__ = [
    "BlockList",
    "Leader",
    "SequenceHandle",
    "SequencePlan",
    "plan_sequence",
    "random_states",
    "sequence_of",
    "set_random_states",
    "shard_sequence",
]
