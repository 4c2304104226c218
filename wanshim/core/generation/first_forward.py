"""The first forward of a new copy in each worker, compared with this process's on a few tokens, or on all if
it is compiled.

A copy has a model's weights and attributes. What its code reads beside them may be set in this process alone: a table
of kernels, a registry, a variable that was read at an import. Then a worker fails, or computes other values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from wanshim.core.workers import Workers
from wanshim.errors import WorkersFailed

from .binding import Forward, NotShared

_FRAMES, _SIZE, _PATCH = 1, 4, 2  # of latents
_OTHER_GPU = 0.05  # of the largest value: kernels of other GPUs round in another order


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


def compare(workers: Workers, count: int, forward: Forward, args: Any, kwargs: Any, *, whole: bool) -> None:
    """Have the first workers, which hold the forward's modules, compute it on a few tokens.

    Args:
        whole: on all tokens, of each size: it is compiled for sizes.

    Raises:
        NotShared: one of them cannot, or its result is another than this process's.
    """
    proven = [workers.proven[workers.key(module)] for module in forward.modules.values()]
    sizes = tuple(t.shape for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and whole)
    if forward.few is None or all(sizes in each for each in proven):
        return
    try:
        if not whole:
            args, kwargs = forward.few(args, kwargs)
        mine = tree_leaves(forward.function(*args, **kwargs))
    except Exception:  # no forward of so few tokens, or of this size
        for each in proven:
            each.add(sizes)
        return
    calls = [workers.call(place, forward.function, *args, **kwargs) for place in range(count)]
    failed = None
    for call in calls:
        try:
            theirs = tree_leaves(call.result(spare=True))
        except WorkersFailed as error:
            if not workers.pids:
                raise
            failed = failed or error
            continue
        equal = all(map(_equal, mine, theirs))
        if not equal and all(map(torch.equal, mine, tree_leaves(forward.function(*args, **kwargs)))):
            raise NotShared("a worker computes other values with its copy of the model than this process")
    if failed is not None:
        raise NotShared(f"a worker cannot compute with its copy of the model: {failed.found}")
    for each in proven:
        each.add(sizes)


def _equal(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine.is_cuda and len({torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())}) > 1:
        return bool((mine - theirs).abs().max() <= _OTHER_GPU * mine.abs().max())
    return mine.shape == theirs.shape and torch.equal(mine.nan_to_num(), theirs.nan_to_num())
