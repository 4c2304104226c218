from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from wanshim.core.encoding import EncoderSource, EncodingRequest, encode_once, once
from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.encoding.leader_lock import FileLock, sign
from wanshim.core.encoding.once import Encoded
from wanshim.core.encoding.request import KeyMaker, numerics

Embeddings = dict[str, torch.Tensor]
MakeRequest = Callable[..., EncodingRequest]
Encode = Callable[[], Embeddings]


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a file or folder that of user 12345, as an open descriptor shows it; only root could do so on disk."""
    given: set[int] = set()
    fstat = os.fstat

    def of_another_user(fd: int) -> os.stat_result:
        found = fstat(fd)
        return os.stat_result([*found[:4], 12345, *found[5:]]) if found.st_ino in given else found

    monkeypatch.setattr(os, "fstat", of_another_user)
    return lambda path: given.add(path.stat().st_ino)


@pytest.fixture
def directory(cache_dir: Path) -> Iterator[CacheDirectory]:
    with CacheDirectory(cache_dir) as opened:
        yield opened


@pytest.fixture
def request_for(tmp_path: Path) -> Callable[..., EncodingRequest]:
    """Makes requests over an encoder and a tokenizer folder of a few bytes."""
    for name in ("text_encoder", "tokenizer"):
        folder = tmp_path / "model" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "weights.bin").write_bytes(name.encode() * 100)

    def make(prompt: str = "blurry", **changes: object) -> EncodingRequest:
        source = {
            "encoder": tmp_path / "model" / "text_encoder",
            "tokenizer": tmp_path / "model" / "tokenizer",
            "tokenizer_args": {"max_length": 512},
            "precision": "fp32",
            **changes,
        }
        return EncodingRequest(prompt=prompt, sources=(EncoderSource(**source),), implementation={"framework": "1.0"})

    return make


@pytest.fixture
def encode() -> Callable[[], Embeddings]:
    """An encoder that counts its calls in `encode.calls`."""

    def run() -> Embeddings:
        run.calls += 1  # type: ignore[attr-defined]
        return {"embeds": torch.arange(6.0).reshape(1, 2, 3).bfloat16(), "mask": torch.ones(1, 2)}

    run.calls = 0  # type: ignore[attr-defined]
    return run


@pytest.fixture
def run(request_for: MakeRequest, encode: Encode, cache_dir: Path) -> Callable[..., Encoded]:
    def call(**changes: object) -> Encoded:
        arguments = {"encode": encode, "request": request_for(), "device": "cpu", "cache_dir": cache_dir}
        return encode_once(**{**arguments, **changes})  # type: ignore[arg-type]

    return call


def held_turn(request: EncodingRequest, cache_dir: Path) -> FileLock:
    """The turn for `request`, held by somebody else."""
    name = KeyMaker(request, numerics(torch.device("cpu")), request.folders()).turn
    held = FileLock(CacheDirectory(cache_dir), name)
    assert held.claim()
    held.write(sign("encoding", 5))
    return held


@pytest.fixture
def turn(request_for: MakeRequest, cache_dir: Path) -> FileLock:
    return held_turn(request_for(), cache_dir)


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    once._warned.clear()
    yield
    once._warned.clear()


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every file system one on which nothing can be created, from the call on."""
    original = os.open

    def refuse(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return original(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    return lambda: monkeypatch.setattr(os, "open", refuse)
