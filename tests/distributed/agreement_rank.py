"""One rank of a gloo job whose ranks check their patch sets. Writes what it met; run as a script."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch.distributed as dist

from wanshim.core import agreement
from wanshim.errors import RankDisagreement


def main(rank: int, world: int, features: str, result: Path) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    fingerprint = {"wanshim": "0.1.0", "features": dict([features.split("=")]), "host": f"node-{rank}"}
    agreement.set_fingerprint_provider(lambda: fingerprint)
    started = time.monotonic()
    try:
        agreement.ensure(call="decode")
        if rank == 0:  # nobody else: ranks that have agreed wait for each other no more
            agreement.ensure(call="decode", timeout_s=1.0)
        met = "agreed"
    except RankDisagreement as error:
        met = str(error)
    # Not to stdout, where gloo of torch 2.9 prints lines of its own.
    result.write_text(f"{met}\nseconds {time.monotonic() - started:.1f}", encoding="utf-8")
    dist.barrier()  # a rank's connections end with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
