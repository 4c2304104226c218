"""Sequence parallel training: the tokens of one sample over the ranks of a group."""

from .blocks import BlockList
from .plan import SequencePlan, plan_sequence
from .shard import SequenceHandle, sequence_of, shard_sequence

__all__ = ["BlockList", "SequenceHandle", "SequencePlan", "plan_sequence", "sequence_of", "shard_sequence"]
