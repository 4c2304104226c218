"""The tiny call that the contract kit makes."""

from __future__ import annotations

import tempfile
from typing import Any


def make_two_groups() -> list[float]:
    """The default group of one rank, and a further one: how many seconds each waits."""
    import torch
    import torch.distributed as dist

    def seconds(group: Any) -> float:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        found = [seconds(dist.group.WORLD), seconds(dist.new_group([0]))]
        dist.destroy_process_group()
        return found
