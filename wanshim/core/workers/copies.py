"""Record of what one worker holds: copies of modules, and their tensors, found by their elements.

Modules with equal weights share them in the worker, whatever objects of this process they belong to: two pipelines
loaded from one checkpoint, or a transformer before and after an adapter was added to it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from .packing import Packed, TensorSpec

Address = tuple[int, TensorSpec]  # a digest of the elements, and all else of a tensor


@dataclass(frozen=True, slots=True)
class Update:
    """Message parts that turn what a worker holds into what it should hold.

    Args:
        numbers: of the module's tensors, in their order.
        new: places among them whose elements must be sent.
        dropped: numbers of tensors that no module has any more.
    """

    numbers: tuple[int, ...]
    new: tuple[int, ...]
    dropped: tuple[int, ...]


class Copies:
    """Modules that one worker holds, by key."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[Packed, tuple[Address, ...], tuple[int, ...]]] = {}
        self._numbers: dict[tuple[Address, int], int] = {}  # equal tensors of one module stay apart: the first, ...
        self._next = itertools.count()

    @property
    def keys(self) -> frozenset[int]:
        return frozenset(self._modules)

    def has(self, key: int, packed: Packed, addresses: Sequence[Address]) -> bool:
        """Whether the worker holds the module as it is now."""
        return key in self._modules and self._modules[key][:2] == (packed, tuple(addresses))

    def put(self, key: int, packed: Packed, addresses: Sequence[Address]) -> Update:
        """Record a module, in place of what it was before."""
        seen: Counter[Address] = Counter()
        contents = []
        for address in addresses:
            contents.append((address, seen[address]))
            seen[address] += 1
        new = tuple(place for place, content in enumerate(contents) if content not in self._numbers)
        self._numbers |= {contents[place]: next(self._next) for place in new}
        numbers = tuple(self._numbers[content] for content in contents)
        self._modules[key] = packed, tuple(addresses), numbers
        return Update(numbers, new, self._unused())

    def drop(self, keys: Iterable[int]) -> tuple[int, ...]:
        """Record that these modules go; the numbers of the tensors that go with them."""
        for key in keys:
            self._modules.pop(key, None)
        return self._unused()

    def num_bytes(self, keys: Collection[int], *, on_host: bool) -> int:
        """Bytes on the worker's device of these modules.

        Args:
            on_host: its device is the CPU, where tensors of the host count too.
        """
        chosen = [each for key, each in self._modules.items() if key in keys]
        tensors = {n: spec for _, addresses, numbers in chosen for n, (_, spec) in zip(numbers, addresses, strict=True)}
        return sum(spec.num_bytes for spec in tensors.values() if on_host or not spec.on_host)

    def _unused(self) -> tuple[int, ...]:
        used = {number for *_, numbers in self._modules.values() for number in numbers}
        unused = {content: number for content, number in self._numbers.items() if number not in used}
        for content in unused:
            del self._numbers[content]
        return tuple(unused.values())
