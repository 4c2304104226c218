"""The first forward of a new copy in each worker, compared with this process's on a few tokens, or on all if
it is compiled; and the first one whose tokens go over processes.

A copy has a model's weights and attributes. What its code reads beside them may be set in this process alone: a table
of kernels, a registry, a variable that was read at an import. Then a worker fails, or computes other values. Tokens are
exchanged within a block, whose code may read them in another order than the framework's, before they are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from wanshim.core.workers import Workers
from wanshim.errors import WorkersFailed

from .binding import Forward, NotShared

_FRAMES, _SIZE, _PATCH = 1, 4, 2  # of latents: four tokens
_OTHER_GPU = 0.05  # of the largest value: kernels of other GPUs round in another order
_LATE = 0.0, 1.0  # the size of what is there before tokens arrive: a result that it changes has read them early
_OTHER_PARTS = 0.1  # of the norm: so do parts of the tokens, and in eight bits a different one goes a long way


def count_tokens(same: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The tokens of a video's forward. Args: same: as of `few_tokens`."""
    frames, height, width = kwargs[same].shape[-3:]
    return int(frames * (height // _PATCH) * (width // _PATCH))


def few_tokens(same: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments of a video's forward with four tokens in place of all.

    Args:
        same: the name of its latents (batch, channels, frames, height, width).
    """
    sizes = kwargs[same].shape[-3:]
    tokens = sizes[0] * (sizes[1] // _PATCH) * (sizes[2] // _PATCH)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-3:] == sizes:
            return tensor[..., :_FRAMES, :_SIZE, :_SIZE].contiguous()
        for dim, size in enumerate(tensor.shape):
            if size == tokens:  # a number for each token, as timesteps of an image in a video
                return tensor.narrow(dim, 0, min(tokens, _FRAMES * (_SIZE // _PATCH) ** 2)).contiguous()
        return tensor

    return tree_map_only(torch.Tensor, cut, (args, kwargs))  # type: ignore[no-any-return]


def compare(
    workers: Workers,
    count: int,
    forward: Forward,
    args: Any,
    kwargs: Any,
    *,
    whole: bool,
    together: Mapping[tuple[int, ...], Callable[[Any, Any, float], Any]],
) -> bool:
    """Have the first workers, which hold the forward's modules, compute it on a few tokens, at the same time as this
    process: weights may still be on their way to host memory, and kernels be compiled. If the program has compiled it,
    they compute behind this process: the compiler takes the fastest of several kernels, and then they find its choice.

    Args:
        whole: on all tokens, of each size: it is compiled for sizes.
        together: by the ranks of processes over which tokens go, what these compute together: from arguments, and
            what tokens are that have not arrived.

    Returns:
        Whether forwards were computed: these had not been compared before.

    Raises:
        NotShared: one of them cannot, or a result is another than this process's, of tokens by more than rounding.
    """
    proven = [workers.proven[workers.key(module)] for module in forward.modules.values()]
    sizes = tuple(t.shape for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and whole)
    found = (*sizes, *together)
    if forward.few is None or all(found in each for each in proven):
        return False
    _check(workers, count, forward, args, kwargs, whole, together)
    for each in proven:
        each.add(found)
    return True


def _check(
    workers: Workers,
    count: int,
    forward: Forward,
    args: Any,
    kwargs: Any,
    whole: bool,
    together: Mapping[tuple[int, ...], Callable[[Any, Any, float], Any]],
) -> None:
    """`compare`, whatever was compared before."""
    assert forward.few is not None
    try:
        if not whole:
            args, kwargs = forward.few(args, kwargs)
    except Exception:  # no forward of so few tokens
        return

    def computed_here() -> list[torch.Tensor] | None:
        with contextlib.suppress(Exception):  # of so few tokens, or of this size
            return tree_leaves(forward.function(*args, **kwargs))
        return None

    mine = computed_here() if forward.is_compiled else None
    calls = [workers.call(place, forward.function, *args, **kwargs) for place in range(count)]
    if not forward.is_compiled:
        mine = computed_here()
    failed, differs = None, False
    for call in calls:  # all replies are received, whatever one says
        try:
            theirs = tree_leaves(call.result(spare=True))
        except WorkersFailed as error:
            if not workers.pids:
                raise
            failed = failed or error
            continue
        if mine is not None and not all(map(_equal, mine, theirs)):
            differs |= all(map(torch.equal, mine, tree_leaves(forward.function(*args, **kwargs))))
    if mine is None:
        return
    if differs:
        raise NotShared("a worker computes other values with its copy of the model than this process")
    if failed is not None:
        raise NotShared(f"a worker cannot compute with its copy of the model: {failed.found}")
    for ranks, compute in together.items():
        if forward.count is None or forward.count(args, kwargs) < len(ranks):  # a process would have no token
            continue
        first, second = once = [tree_leaves(compute(args, kwargs, late)) for late in _LATE]
        if not _are_equal(first, second):
            again = [tree_leaves(compute(args, kwargs, late)) for late in _LATE]
            if not all(map(_are_equal, once, again)):  # its bits differ from call to call, whatever it reads
                continue
            raise NotShared("a block reads tokens before they have arrived from other processes")
        if not all(map(_close, mine, first)):
            raise NotShared("tokens over processes have other values than in this one, by more than rounding")


def _are_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(ones, others, strict=True))


def _equal(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine.is_cuda and len({torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())}) > 1:
        return bool((mine - theirs).abs().max() <= _OTHER_GPU * mine.abs().max())
    return mine.shape == theirs.shape and torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def _close(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether they differ by rounding alone, and the same elements are no numbers."""
    numbers = mine.isfinite()
    if mine.shape != theirs.shape or not torch.equal(numbers, theirs.isfinite()):
        return False
    mine, theirs = (each[numbers].float() for each in (mine, theirs))
    return bool((mine - theirs).norm() <= _OTHER_PARTS * mine.norm())
