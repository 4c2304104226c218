"""Processes that race for one prompt: each leaves its result in results/<rank>.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from wanshim.core.encoding import EncoderSource, EncodingRequest, encode_once, once


def request(model: Path) -> EncodingRequest:
    source = EncoderSource(
        encoder=model / "text_encoder",
        tokenizer=model / "tokenizer",
        tokenizer_args={"max_length": 512},
        precision="fp32",
    )
    return EncodingRequest(prompt="blurry", sources=(source,))


def wait_until(done: Callable[[], bool], within_s: float = 240.0) -> None:
    end = time.monotonic() + within_s
    while not done():
        if time.monotonic() > end:
            raise TimeoutError("the other racers did not come")
        time.sleep(0.01)


def race(rank: int, root: Path, behaviour: str, others: int) -> dict[str, object]:
    def encode() -> dict[str, torch.Tensor]:
        (root / "calls" / f"{rank}").touch()
        (root / "model" / "text_encoder" / "weights.bin").read_bytes()
        if behaviour == "stall":
            time.sleep(60)
        wait_until(lambda: len(list((root / "waiting").iterdir())) >= others)
        if behaviour == "fail":
            raise MemoryError("22.7 GB do not fit")
        return {"embeds": torch.arange(8.0)}

    def sleep(seconds: float) -> None:
        (root / "waiting" / f"{rank}").touch()
        time.sleep(seconds)

    once.time = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)  # between two looks for another's result

    if behaviour == "stall while writing":
        os.fsync = lambda fd: ((root / "calls" / f"{rank}.writing").touch(), time.sleep(60))  # type: ignore[assignment]
    started = time.monotonic()
    try:
        found = encode_once(encode, request(root / "model"), device="cpu", cache_dir=root / "cache", timeout_s=30)
    except Exception as error:
        result = {"rank": rank, "error": type(error).__name__, "message": str(error)}
    else:
        result = {"rank": rank, "origin": found.origin, "embeds": found.tensors["embeds"].tolist()}
    return {**result, "seconds": time.monotonic() - started}


def race_all(root: Path, behaviours: tuple[str, ...]) -> None:
    """Forks a racer for each behaviour, so that eight of them start together, and waits for all."""
    torch.set_num_threads(1)
    for rank, behaviour in enumerate(behaviours):
        if os.fork() == 0:
            (root / "pids" / f"{rank}").write_text(str(os.getpid()))
            if rank and behaviours[0].startswith(("stall", "fail")):
                wait_until(lambda: any((root / "calls").iterdir()))  # the first has its turn
            else:
                wait_until(lambda: len(list((root / "pids").iterdir())) >= len(behaviours))
            result = race(rank, root, behaviour, 0 if behaviours[0].startswith("stall") else len(behaviours) - 1)
            (root / "results" / f"{rank}.json").write_text(json.dumps(result))
            os._exit(0)
    for _ in behaviours:
        os.wait()
