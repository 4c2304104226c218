"""A data loader that begins at any batch of an epoch, without loading those before it, and draws at random what it
would have drawn there.

Samples that this process loads draw from its random states, which training uses too; each worker draws from its own.
So it is noted with which states a sample was loaded, and where the epoch begins in the middle they are set first. A
worker gets every Nth batch: to keep its number, it is given up to N - 1 batches that it does not load.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from threading import Thread
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from wanshim.core.resume.draws import Draws, as_text
from wanshim.core.resume.signals import end_workers_at_exit, ignore_in_worker


@dataclass(frozen=True)
class _Wanted:
    """A sample of batch `place`; index None: it is not to be loaded. `random`: the states to load it with."""

    place: int
    index: Any
    random: str | None


class Order:
    """The batches of one data loader, in place of its sampler, dataset and collation. A batch that it then gives is a
    pair, of which `batch_of` takes the batch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.workers = loader.num_workers
        if self.workers:
            end_workers_at_exit(os.getpid())
        self.draws = Draws(loader.dataset)
        self.first = 0
        self.length = len(loader)
        self.random: dict[int, str] = {}  # place -> the states that its samples are loaded with
        self._loaded_with: tuple[int, dict[str, Any]] | None = None  # the last batch that this process loaded
        self._left: deque[tuple[int, str]] = deque(maxlen=self.workers)  # what the workers were left with by batches
        vars(loader).update(
            batch_sampler=_Numbered(loader.batch_sampler, self),
            dataset=_Samples(loader.dataset, self.draws, self if self.workers == 0 else None),
            collate_fn=partial(_collate, loader.collate_fn),
        )

    def begin(self, first: int, noted: dict[str, Any], random: str) -> None:
        """The next epoch begins at batch `first`.

        Args:
            noted: what `note` gave when the batch before it had been trained.
            random: the states of this process then; "" at the start of an epoch.
        """
        self.first, self._loaded_with = first, None
        self._left.clear()
        self.random = {int(place): states for place, states in noted.items()} if first else {}
        if self.workers == 0 and first:
            self.random[first + 1] = random  # loaded before `first` is trained

    @property
    def base(self) -> int:
        """The place of the first batch that the loader gives: batches from there to `first` are empty."""
        return self.first - self.first % self.workers if self.workers else self.first

    def batch_of(self, place: int, given: tuple[Any, str | None]) -> Any:
        batch, left = given
        if left is not None:
            self._left.append((place, left))
        return batch

    def note(self) -> dict[str, str]:
        """The argument of `begin` that begins after the batch that was given last."""
        if self.workers:
            return {str(place + self.workers): left for place, left in self._left}
        return {} if self._loaded_with is None else {str(self._loaded_with[0]): as_text(self._loaded_with[1])}

    def loads(self, place: int) -> None:
        if self._loaded_with is None or self._loaded_with[0] != place:
            self._loaded_with = (place, self.draws.states())


class _InPlaceOf:
    """The original's attributes that a loader reads beside its items."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __len__(self) -> int:
        return len(self._original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._original, name)


class _Numbered(_InPlaceOf):
    """In place of a batch sampler."""

    def __init__(self, original: Any, order: Order) -> None:
        super().__init__(original)
        self._order = order

    def __iter__(self) -> Iterator[list[_Wanted]]:
        order = self._order
        for place, batch in enumerate(self._original):
            if place < order.base:
                continue
            loaded = place >= order.first
            states = [order.random.pop(place, None), *[None] * (len(batch) - 1)]
            yield [_Wanted(place, index if loaded else None, one) for index, one in zip(batch, states, strict=True)]


class _Samples(_InPlaceOf, Dataset[Any]):
    """In place of a dataset: each sample with the random states that a worker was left with by it."""

    def __init__(self, original: Any, draws: Draws, order: Order | None) -> None:
        super().__init__(original)
        self._draws, self._order = draws, order

    def __getitem__(self, wanted: _Wanted) -> tuple[Any, str | None]:
        in_worker = get_worker_info() is not None
        if in_worker:
            ignore_in_worker()
            _end_without_loader(os.getpid())
        if wanted.index is None:
            return None, None
        if wanted.random is not None:
            self._draws.set(wanted.random)
        if self._order is not None:
            self._order.loads(wanted.place)
        return self._original[wanted.index], self._draws.text() if in_worker else None


@cache
def _end_without_loader(worker: int) -> None:
    """Worker `worker`, this process, ends if the process that it loads for is gone.

    torch's worker then leaves its loop, but Python waits until all its batches are in the queue's pipe, of 64 KiB.
    Nobody empties that, and the random states beside each batch, 20 KiB, fill it.

    A worker of a fork server has that for its parent, which lives as long as its workers: torch's never sees an end.
    """
    loader, asked_for_it = os.getppid(), parent_process()

    def end_with_loader() -> None:
        assert asked_for_it is not None
        asked_for_it.join()
        os._exit(1)

    if asked_for_it is not None and asked_for_it.pid != loader:
        Thread(target=end_with_loader, name="wanshim-loader", daemon=True).start()
        return

    def end() -> None:
        if os.getppid() != loader:
            os._exit(1)

    Finalize(None, end, exitpriority=0)  # before the one of the queue that waits, which has -5


def _collate(original: Callable[[list[Any]], Any], samples: list[tuple[Any, str | None]]) -> tuple[Any, str | None]:
    """In place of `collate_fn`."""
    batch = [sample for sample, _ in samples]
    return None if batch[0] is None else original(batch), samples[-1][1]
