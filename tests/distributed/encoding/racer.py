"""Processes that race for one prompt. Run as a script: each leaves its result in results/<rank>.json.

Torch is imported once and the racers are forked from there, so that eight of them start together and cheaply.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # the dispatcher loads it on first use; here before the race begins

from wanshim.core.encoding import EncoderSource, EncodingRequest, encode_once


def request(model: Path) -> EncodingRequest:
    source = EncoderSource(
        encoder=model / "text_encoder",
        tokenizer=model / "tokenizer",
        tokenizer_args={"max_length": 512},
        precision="fp32",
    )
    return EncodingRequest(prompt="blurry", sources=(source,))


def race(rank: int, root: Path, behaviour: str) -> dict[str, object]:
    def encode() -> dict[str, torch.Tensor]:
        (root / "calls" / f"{rank}").touch()
        if behaviour == "fail":
            time.sleep(1.0)
            raise MemoryError("22.7 GB do not fit")
        (root / "model" / "text_encoder" / "weights.bin").read_bytes()
        time.sleep(60 if behaviour == "stall" else 0.5)
        return {"embeds": torch.arange(8.0)}

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


def main(root: Path, behaviours: list[str]) -> None:
    torch.set_num_threads(1)
    start = time.monotonic() + 0.3
    for rank, behaviour in enumerate(behaviours):
        if os.fork() == 0:
            (root / "pids" / f"{rank}").write_text(str(os.getpid()))
            late = 0.3 if rank and behaviours[0].startswith(("stall", "fail")) else 0.0
            time.sleep(max(0.0, start + late - time.monotonic()))
            result = race(rank, root, behaviour)
            (root / "results" / f"{rank}.json").write_text(json.dumps(result))
            os._exit(0)
    for _ in behaviours:
        os.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
