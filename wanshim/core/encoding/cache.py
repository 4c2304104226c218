"""Embeddings on disk: safetensors files named by what they were made from, and checked byte by byte when
read."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch

from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.shared.files import NotOwn

_log = logging.getLogger(__name__)

FORMAT = "wanshim.encoding/1"
_NO_DIGEST = "0" * 64
# How the digest field reads inside the file's header. A description that holds these words is escaped once
# more.
_DIGEST_FIELD = rb"\"sha256\": \"%s\""


class EmbeddingCache:
    """Named tensors by key, in one directory.

    A file holds the tensors and one metadata entry `wanshim`: a JSON object with the format version, the key,
    a description of what was encoded, and the SHA-256 of the whole file as it reads with that digest blanked.
    """

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self.rejected = 0  # files that could not be trusted

    def load(self, key: str) -> dict[str, torch.Tensor] | None:
        """The tensors stored under `key`, on the CPU; None where there are none that can be trusted.

        A file that is damaged, or that somebody else wrote, is set aside with a warning in the log.
        """
        found = self.load_described(key)
        return None if found is None else found[0]

    def load_described(self, key: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """As `load`, with the description that they were saved with."""
        name = _file_name(key)
        try:
            data = self._directory.read(name)
            return None if data is None else _unpack(data, key)
        except NotOwn as reason:
            self.rejected += 1
            aside = self._directory.set_aside(name)
            where = f"set aside as {aside}" if aside else "left in place"
            _log.warning("%s %s; %s, and encoding again", self._directory.path / name, reason, where)
            return None

    def save(self, key: str, tensors: Mapping[str, torch.Tensor], description: Mapping[str, object]) -> None:
        """Store `tensors` under `key`, whole or not at all.

        Raises:
            CacheUnavailable: the directory is read-only or full.
        """
        self._directory.write(_file_name(key), _pack(key, tensors, description))

    def discard_parts(self, key: str) -> None:
        """Remove what killed writers of `key` left."""
        self._directory.discard_parts(_file_name(key))


def _file_name(key: str) -> str:
    return f"{key}.safetensors"


def _pack(key: str, tensors: Mapping[str, torch.Tensor], description: Mapping[str, object]) -> bytes:
    entry = {"description": dict(description), "format": FORMAT, "key": key, "sha256": _NO_DIGEST}
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    blank = safetensors.torch.save(on_cpu, {"wanshim": json.dumps(entry, sort_keys=True)})
    return _with_digest(blank, _NO_DIGEST, hashlib.sha256(blank).hexdigest())


def _with_digest(data: bytes, old: str, new: str) -> bytes:
    return data.replace(_DIGEST_FIELD % old.encode(), _DIGEST_FIELD % new.encode(), 1)


def _unpack(data: bytes, key: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    entry = _entry(data)
    if entry.get("format") != FORMAT or entry.get("key") != key:
        raise NotOwn("was not written for this key")
    digest = str(entry.get("sha256"))
    blank = _with_digest(data, digest, _NO_DIGEST)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise NotOwn("is damaged: its checksum does not match")
    return safetensors.torch.load(data), entry["description"]


def _entry(data: bytes) -> dict[str, Any]:
    """The `wanshim` metadata entry of a safetensors file (its header is 8 bytes of length, then JSON)."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        return dict(json.loads(header["__metadata__"]["wanshim"]))
    except (ValueError, KeyError, TypeError) as error:
        raise NotOwn("is no file of this cache, or is damaged") from error
