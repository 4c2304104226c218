"""The identity of a run, and the differences of two."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from wanshim.core.shared.text import table as text_table

SAMPLED = 64  # elements of a weight, or files of a dataset, that are looked at


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]], *, values: bool) -> str:
    """A digest of names, shapes and dtypes, and, with `values`, of some elements of each tensor."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if values:
            found.update(tensor.detach().reshape(-1)[:SAMPLED].cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def contents_of(file: Path) -> list[Any]:
    """The contents of a file as its directory has them, if it is an archive as `torch.save` writes it: a checksum of
    each part. Another file counts by its size, and one that is not there is nothing."""
    with suppress(OSError):
        try:
            with ZipFile(file) as archive:
                return [[part.filename, part.CRC] for part in archive.infolist()]
        except (BadZipFile, NotImplementedError, UnicodeDecodeError):  # no archive, or a damaged one
            return [file.stat().st_size]
    return []


def digest_of(value: Any) -> str:
    """A digest of a value of JSON; what is not JSON counts by its type."""
    text = json.dumps(value, default=lambda item: type(item).__name__, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Values that are not the same, by name: as saved, and now."""
    names = dict.fromkeys((*saved, *now))
    return {name: (saved.get(name), now.get(name)) for name in names if saved.get(name) != now.get(name)}


def table(found: Mapping[str, tuple[Any, Any]]) -> str:
    return text_table([("", "the state", "this run"), *((name, *map(_shown, pair)) for name, pair in found.items())])


def _shown(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 48 else f"{text[:45]}..."
