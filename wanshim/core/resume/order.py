"""A data loader that begins at any batch of an epoch, without loading those before it, and draws at random what it
would have drawn there.

Samples that this process loads draw from its random states, which training uses too; each worker draws from its own.
So it is noted with which states a sample was loaded, and where the epoch begins in the middle they are set first. A
worker gets every Nth batch: to keep its number, it is given up to N - 1 batches that it does not load.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from wanshim.core.resume.signals import ignore_in_worker
from wanshim.core.sequence.random_state import random_states, set_random_states

CPU = torch.device("cpu")


def as_text(states: dict[str, Any]) -> str:
    """Random states as JSON."""
    return json.dumps({name: _encoded(value) for name, value in states.items()})


def set_from_text(text: str, device: torch.device = CPU) -> None:
    """Draw from now on what the process drew whose states these are."""
    set_random_states({name: _decoded(value) for name, value in json.loads(text).items()}, device)


def _encoded(value: Any) -> Any:
    return base64.b64encode(bytes(value.tolist())).decode() if isinstance(value, torch.Tensor) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return torch.frombuffer(bytearray(base64.b64decode(value)), dtype=torch.uint8)
    return value


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
        self.first = 0
        self.length = len(loader)
        self.random: dict[int, str] = {}  # place -> the states that its samples are loaded with
        self._loaded_with: tuple[int, dict[str, Any]] | None = None  # the last batch that this process loaded
        self._left: deque[tuple[int, str]] = deque(maxlen=self.workers)  # what the workers were left with by batches
        vars(loader).update(
            batch_sampler=_Numbered(loader.batch_sampler, self),
            dataset=_Samples(loader.dataset, self if self.workers == 0 else None),
            collate_fn=_Collation(loader.collate_fn),
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
        """What `begin` takes to begin after the batch that was given last."""
        if self.workers:
            return {str(place + self.workers): left for place, left in self._left}
        return {} if self._loaded_with is None else {str(self._loaded_with[0]): as_text(self._loaded_with[1])}

    def loads(self, place: int) -> None:
        if self._loaded_with is None or self._loaded_with[0] != place:
            self._loaded_with = (place, random_states(CPU))


class _InPlaceOf:
    """What a loader reads of the original beside its items."""

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

    def __init__(self, original: Any, order: Order | None) -> None:
        super().__init__(original)
        self._order = order

    def __getitem__(self, wanted: _Wanted) -> tuple[Any, str | None]:
        in_worker = get_worker_info() is not None
        if in_worker:
            ignore_in_worker()
        if wanted.index is None:
            return None, None
        if wanted.random is not None:
            set_from_text(wanted.random)
        if self._order is not None:
            self._order.loads(wanted.place)
        return self._original[wanted.index], as_text(random_states(CPU)) if in_worker else None


class _Collation:
    """In place of `collate_fn`."""

    def __init__(self, original: Callable[[list[Any]], Any]) -> None:
        self._original = original

    def __call__(self, samples: list[tuple[Any, str | None]]) -> tuple[Any, str | None]:
        batch = [sample for sample, _ in samples]
        return None if batch[0] is None else self._original(batch), samples[-1][1]
