from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from wanshim.core.encoding import cache
from wanshim.core.encoding.cache import EmbeddingCache
from wanshim.core.encoding.directory import CacheDirectory

KEY = "ab" * 32


def tensors() -> dict[str, torch.Tensor]:
    return {
        "embeds": torch.randn(1, 4, 8).bfloat16(),
        "mask": torch.ones(1, 4, dtype=torch.int64),
        "turned": torch.randn(4, 2).t(),
        "pooled": torch.full((3,), float("nan")),
    }


def same(left: dict[str, torch.Tensor] | None, right: dict[str, torch.Tensor]) -> bool:
    return (
        left is not None
        and left.keys() == right.keys()
        and all(left[name].dtype == right[name].dtype for name in right)
        and all(torch.equal(left[name].view(torch.uint8), right[name].contiguous().view(torch.uint8)) for name in right)
    )


@pytest.mark.parametrize(
    "description",
    [{}, {"prompt": "色调艳丽 “过曝”"}, {"prompt": '"sha256": "' + "0" * 64 + '"'}, {"prompt": "0" * 200}],
    ids=["empty", "chinese", "looks like the digest", "zeros"],
)
def test_cache_saved_tensors_come_back_bit_for_bit(
    directory: CacheDirectory, cache_dir: Path, description: dict[str, object]
) -> None:
    saved = tensors()
    EmbeddingCache(directory).save(KEY, saved, description)
    assert same(EmbeddingCache(directory).load(KEY), saved)
    with safetensors.safe_open(cache_dir / f"{KEY}.safetensors", "pt") as file:
        assert json.loads(file.metadata()["wanshim"])["description"] == description


def test_cache_empty_has_nothing(directory: CacheDirectory) -> None:
    assert EmbeddingCache(directory).load(KEY) is None


def test_cache_any_flipped_byte_is_detected_and_set_aside(
    directory: CacheDirectory, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = EmbeddingCache(directory)
    store.save(KEY, {"embeds": torch.arange(4.0)}, {"prompt": "x"})
    path = cache_dir / f"{KEY}.safetensors"
    good = path.read_bytes()
    caplog.set_level(logging.CRITICAL)
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
        assert store.load(KEY) is None, f"byte {position} of {len(good)}"
        assert not path.exists()
    assert len(list(cache_dir.glob("*.rejected-*"))) == len(good)


def test_cache_truncated_file_is_set_aside_with_a_reason(
    directory: CacheDirectory, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = EmbeddingCache(directory)
    store.save(KEY, tensors(), {})
    path = cache_dir / f"{KEY}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert store.load(KEY) is None
    assert "checksum" in caplog.text
    assert "set aside" in caplog.text


def of_another_format() -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "FORMAT", "wanshim.encoding/0")
        return cache._pack(KEY, tensors(), {})


@pytest.mark.parametrize(
    "data",
    [
        safetensors.torch.save({"embeds": torch.ones(2)}),
        safetensors.torch.save({"embeds": torch.ones(2)}, {"wanshim": "[1]"}),
        (2).to_bytes(8, "little") + b"[]",
        of_another_format(),
    ],
    ids=["no entry", "entry is a list", "header is a list", "of another format"],
)
def test_cache_foreign_file_is_set_aside(directory: CacheDirectory, cache_dir: Path, data: bytes) -> None:
    (cache_dir / f"{KEY}.safetensors").write_bytes(data)
    assert EmbeddingCache(directory).load(KEY) is None
    assert len(list(cache_dir.glob("*.rejected-*"))) == 1


def test_cache_foreign_file_that_cannot_be_moved_is_reported_as_left_in_place(
    directory: CacheDirectory, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    (cache_dir / f"{KEY}.safetensors").write_bytes(b"foreign")
    monkeypatch.setattr(os, "rename", refuse)
    assert EmbeddingCache(directory).load(KEY) is None
    assert "left in place, and encoding again" in caplog.text


def test_cache_file_of_another_user_is_set_aside_whatever_it_holds(
    directory: CacheDirectory, cache_dir: Path, give_away: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = EmbeddingCache(directory)
    store.save(KEY, tensors(), {})
    give_away(cache_dir / f"{KEY}.safetensors")
    assert store.load(KEY) is None
    assert "belongs to user 12345; set aside" in caplog.text


def test_cache_file_renamed_to_another_key_is_set_aside(directory: CacheDirectory, cache_dir: Path) -> None:
    store = EmbeddingCache(directory)
    store.save(KEY, tensors(), {})
    other = "cd" * 32
    (cache_dir / f"{KEY}.safetensors").rename(cache_dir / f"{other}.safetensors")
    assert store.load(other) is None


def test_cache_parts_of_a_killed_writer_are_removed(directory: CacheDirectory, cache_dir: Path) -> None:
    for key in (KEY, "other"):
        (cache_dir / f".{key}.safetensors.0011.partial").mkdir()
        (cache_dir / f".{key}.safetensors.0011.partial" / "part").write_bytes(b"half")
    EmbeddingCache(directory).discard_parts(KEY)
    assert [path.name for path in cache_dir.iterdir()] == [".other.safetensors.0011.partial"]
