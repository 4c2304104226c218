"""One forward of a model with its tokens over the processes of this machine that compute it at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from wanshim.undo import Undo

from .blocks import BlockList, check_no_dropout, check_tokens_apart, heads_of
from .group import SequenceGroup
from .hooks import attach
from .plan import plan_sequence
from .run import ShardedModel


def check_shardable(lists: Sequence[BlockList]) -> int:
    """The number of heads, over as many processes of which the blocks' tokens can go.

    Raises:
        ModelInvalid: a block in which tokens are not apart beside attention, or one that is built otherwise.
    """
    check_tokens_apart(lists)
    return heads_of(lists)


@contextlib.contextmanager
def sharded(lists: Sequence[BlockList], group: SequenceGroup, *, late: float | None = None) -> Iterator[None]:
    """While it is open, a call of the blocks' model computes this rank's part, and returns the whole on every rank.

    Each process of the group enters it with a copy of the same blocks, and calls the model with the same inputs.

    Args:
        late: what tokens are that a block reads before they have arrived, as of `Passage`.

    Raises:
        ModelInvalid: more ranks than heads, dropout in a block, or blocks that are built otherwise.
    """
    check_no_dropout(lists)
    count = sum(len(listed.blocks) for listed in lists)
    plan = plan_sequence(group.ranks, heads=heads_of(lists), blocks=count)
    with Undo() as undo:
        run = ShardedModel(group, plan, sum_gradients=False, check_finite=False, late=late)
        for index, listed in enumerate(lists):
            attach(run, listed, undo, first=not index)
        yield
