"""One decode or encode of a VAE over processes of this machine: what this process and each worker do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from wanshim.core.decoding import OutputSpec, ParallelVae, VaeFallback, VaeOptions, find_binding
from wanshim.core.ranks.group import Group
from wanshim.core.workers import RemoteCall, Replies, Workers
from wanshim.errors import ModelInvalid, RanksFailed

T = TypeVar("T")
VERBS = ("decode", "encode")
_KNOWN: WeakKeyDictionary[Any, dict[tuple[Any, ...], ParallelVae]] = WeakKeyDictionary()  # by VAE, of this process


def of(vae: Any, verb: str, file: int, number: int, rank: int, size: int, deadline: float, fast: bool) -> ParallelVae:
    """The VAE as process `rank` of `size` computes it. Only process 0 gets the result.

    Args:
        file: descriptor of a file that these processes alone have.
        number: of the VAE among the models that they hold.
        fast: by the operators that are close to the framework's, not equal.
    """
    key, made = (verb, file, size, fast), _KNOWN.setdefault(vae, {})
    if key not in made:
        for other in [each for each in made if each[0] == verb]:  # of workers that are gone, or another number of them
            made.pop(other).release()
        group = Group.of_file(file, f"vae-{verb}-{size}-{number}", range(size), rank)
        options = VaeOptions(strict=not fast, engines=False, output=OutputSpec(ranks=(0,)))
        options = replace(options, deadline=min(deadline, options.deadline))
        made[key] = ParallelVae(find_binding(vae, verb).graph, group, options)
    return made[key]


def weights_changed(vae: Any) -> None:
    """In place: this process reads them again, as a worker does with those that it was sent."""
    for parallel in _KNOWN.get(vae, {}).values():
        parallel.weights_changed()


def compute(
    vae: Any, verb: str, file: int, number: int, rank: int, size: int, deadline: float, fast: bool, given: torch.Tensor
) -> None:
    """A worker's part."""
    with contextlib.suppress(VaeFallback, ModelInvalid, RanksFailed):  # of all processes: 0 goes on without the workers
        of(vae, verb, file, number, rank, size, deadline, fast)(given)


def connect(vae: Any, file: int, number: int, rank: int, size: int, deadline: float, fast: bool) -> None:
    """A worker's part of `prepare`."""
    with contextlib.suppress(VaeFallback):
        of(vae, "decode", file, number, rank, size, deadline, fast).connect()


def prepare(workers: Workers, size: int, vae: Any, *, fast: bool) -> None:
    """Have the processes, which hold the VAE, connect for a decode, and compile its kernels from now on.

    Raises:
        VaeFallback: they did not connect.
        WorkersFailed: a worker failed.
    """
    parallel, file, number = _here(workers, size, vae, "decode", fast)
    calls = [
        workers.call(rank - 1, connect, vae, file, number, rank, size, workers.deadline, fast)
        for rank in range(1, size)
    ]
    _with_replies(calls, parallel, parallel.connect)


def run(workers: Workers, size: int, vae: Any, verb: str, given: torch.Tensor, *, fast: bool) -> torch.Tensor:
    """Decode or encode by this process and the first workers, which hold the VAE.

    Args:
        size: of how many processes.

    Raises:
        VaeFallback: the framework should do it.
        WorkersFailed: a worker failed.
    """
    parallel, file, number = _here(workers, size, vae, verb, fast)
    parallel.refuse_traced(given)
    calls = [
        workers.call(rank - 1, compute, vae, verb, file, number, rank, size, workers.deadline, fast, given)
        for rank in range(1, size)
    ]
    return _with_replies(calls, parallel, partial(parallel, given))


def _here(workers: Workers, size: int, vae: Any, verb: str, fast: bool) -> tuple[ParallelVae, int, int]:
    """The VAE as this process computes it, and the workers' file and number of it, by which they meet."""
    file, number = workers.file, workers.key(vae)
    return of(vae, verb, file, number, 0, size, workers.deadline, fast), file, number


def _with_replies(calls: list[RemoteCall], parallel: ParallelVae, own: Callable[[], T]) -> T:
    """The result of this process together with the workers, when they have replied."""
    replies = Replies(calls, parallel.abandon)
    try:
        result = own()
    except (VaeFallback, ModelInvalid) as reason:
        replies.results()
        raise VaeFallback(str(reason)) from reason
    except RanksFailed:
        replies.results()  # or the error of a worker that is gone
        raise
    except Exception:
        replies.raise_failure()
        raise
    replies.results()
    return result
