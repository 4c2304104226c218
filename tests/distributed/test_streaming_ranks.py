"""Two ranks of one host share one copy of the waiting weights, under DDP; a rank that differs stops both."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.unit.streaming.model import Model, data
from wanshim.core.ranks.host import host_ranks
from wanshim.core.streaming import stream_model
from wanshim.demo.meeting import served_store

pytestmark = pytest.mark.slow  # real modules over several steps; `make matrix` runs it

SECONDS = 240  # a bound for a machine under load, not what anything takes


def _rank(rank: int, variables: dict[str, str], streamed: bool, spoilt: bool, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(variables)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS))
    try:
        answers.put((rank, _train(rank, streamed, spoilt)))
    except Exception as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
    finally:
        dist.destroy_process_group()


def _train(rank: int, streamed: bool, spoilt: bool) -> dict[str, Any]:
    model, shared = Model(), False
    if spoilt and rank == 1:
        model.blocks[3].base.weight.data[0, 0] += 1
    if streamed:
        handle = stream_model(model, "cpu", count=4, host=host_ranks((rank, 2)))
        model._ddp_params_and_buffers_to_ignore = handle.waiting
        # what one rank writes the other sees: there is one copy
        dist.barrier()
        before = handle.ring.host.memory[-1].item()
        dist.barrier()
        if rank == 0:
            handle.ring.host.memory[-1] = before ^ 1  # padding of the last weight
        dist.barrier()
        shared = handle.ring.host.memory[-1].item() == before ^ 1
    wrapped = DistributedDataParallel(model)
    for step in range(3):
        wrapped(data(2 * step + rank)).backward()
    return {"shared": shared, "grads": [p.grad.tolist() for p in model.parameters() if p.grad is not None]}


def both(streamed: bool, spoilt: bool = False) -> dict[int, Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with served_store() as variables:
        arguments = (variables, streamed, spoilt, answers)
        ranks = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(2)]
        for process in ranks:
            process.start()
        try:
            return dict(answers.get(timeout=SECONDS) for _ in ranks)
        finally:
            for process in ranks:
                process.join(10)
                process.kill()


def test_ranks_that_share_their_weights_train_as_resident_ddp() -> None:
    resident, streamed = both(streamed=False), both(streamed=True)
    for rank in range(2):
        assert streamed[rank]["grads"] == resident[rank]["grads"]
        assert streamed[rank]["shared"]
    assert resident[0]["grads"] == resident[1]["grads"]


def test_rank_with_another_base_model_stops_both() -> None:
    answers = both(streamed=True, spoilt=True)
    assert "blocks.3.base.weight is not what the first rank of this host has" in answers[1]
    assert "rank 1 failed: WanshimError: blocks.3" in answers[0]
    assert "blocks.3.base.weight" in answers[0]
