"""The bytes that a checkpoint would take up, from the headers of its safetensors files; no weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path


@dataclass(frozen=True)
class Elements:
    """Numbers of elements: `matrices`, weights of two dimensions, which can be quantised; and the rest."""

    matrices: int = 0
    rest: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.matrices + other.matrices, self.rest + other.rest)

    def bytes_at(self, itemsize: int, of_matrices: int | None = None) -> int:
        return self.matrices * (of_matrices or itemsize) + self.rest * itemsize


@dataclass(frozen=True)
class Header:
    """A model's checkpoint: each of its blocks in order of execution, and everything outside them."""

    blocks: tuple[Elements, ...]
    outside: Elements


def read_header(paths: Sequence[Path], block_lists: Sequence[str]) -> Header | None:
    """The header of a checkpoint in one or more files.

    Args:
        block_lists: attribute paths of the model's lists of blocks, one behind the other.

    Returns:
        None where a file is no safetensors file, or its names show no block.
    """
    if not paths or any(path.suffix != ".safetensors" for path in paths):
        return None
    names = "|".join(map(re.escape, block_lists))
    of_block = re.compile(rf"(?:^|\.)({names})\.(\d+)\.")
    blocks: dict[tuple[int, int], Elements] = {}
    outside = Elements()
    for name, _, shape in tensors_in(paths):
        size = prod(shape)
        elements = Elements(size, 0) if len(shape) == 2 and name.endswith("weight") else Elements(0, size)
        found = of_block.search(name)
        if found is None:
            outside += elements
        else:
            key = list(block_lists).index(found[1]), int(found[2])
            blocks[key] = blocks.get(key, Elements()) + elements
    return Header(tuple(blocks[key] for key in sorted(blocks)), outside) if blocks else None


def tensors_in(paths: Iterable[Path]) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype as safetensors writes it ("BF16") and shape of each tensor in safetensors files."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                entry = file.get_slice(name)
                yield name, entry.get_dtype(), entry.get_shape()
