"""The tokens of one forward over processes of this machine: what this process and each worker do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from wanshim.core.ranks.group import Group
from wanshim.core.ranks.watch import WatchedByAnother
from wanshim.core.sequence import BlockList, SequenceGroup, sharded

_PATIENCE_SECONDS = 10.0  # in which a worker whose exchange failed is ended, because another one failed before
_JOINED: dict[Half, SequenceGroup] = {}  # of a worker


@dataclass(frozen=True, slots=True)
class Half:
    """Processes that compute one forward together: 0 is the user's, the others are workers.

    Args:
        ranks: their numbers.
        deadline: seconds that an exchange may take.
        over_nccl: each has a GPU of its own.
    """

    ranks: tuple[int, ...]
    deadline: float
    over_nccl: bool


def join(half: Half, file: int, rank: int) -> SequenceGroup:
    """The group of a half, as process `rank` sees it. Process 0 sees how the others fail, and ends them.

    Args:
        file: descriptor of a file that these processes alone have.
    """
    group = Group.of_file(file, "-".join(map(str, half.ranks)), half.ranks, rank)
    watch = WatchedByAnother(_PATIENCE_SECONDS if rank else 0.0)
    return SequenceGroup(group, half.deadline, watched=watch, over_nccl=half.over_nccl)


def over(
    group: SequenceGroup,
    function: Any,
    blocks: Callable[..., Sequence[BlockList]] | None,
    args: Any,
    kwargs: Any,
    *,
    late: float | None,
) -> AbstractContextManager[None]:
    """While it is open, `function(*args, **kwargs)` has this process's part of the tokens in it; `late` as of
    `sharded`."""
    assert blocks is not None, "or its plan had no tokens over processes"
    return sharded(blocks(function, *args, **kwargs), group, late=late)


def compute(
    half: Half, file: int, rank: int, function: Any, blocks: Any, args: Any, kwargs: Any, late: float | None
) -> Any:
    """A worker's part of `function(*args, **kwargs)`; the first process of a half returns the result."""
    if half not in _JOINED:
        _JOINED[half] = join(half, file, rank)
    with over(_JOINED[half], function, blocks, args, kwargs, late=late):
        result = function(*args, **kwargs)
    return result if rank == half.ranks[0] else None


def close_all(groups: dict[Any, SequenceGroup]) -> None:
    """Leave them."""
    while groups:
        groups.popitem()[1].close()
