"""Workers of a data loader whose batches carry random states, and a training that is killed."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker

from tests.forking import forking
from wanshim.core.resume.order import Order

WORKERS, AHEAD = 2, 8  # batches that wait: with their random states far more than the 64 KiB of a pipe


class _Said(Dataset[int]):
    """Says which process loads each sample."""

    def __init__(self, said: Connection) -> None:
        self.said = said

    def __len__(self) -> int:
        return 2 * WORKERS * AHEAD

    def __getitem__(self, index: int) -> int:
        self.said.send(os.getpid())
        return index


def _train(said: Connection, start_method: str) -> None:
    """Take no batch."""
    worker.MP_STATUS_CHECK_INTERVAL = 0.1  # seconds after which a worker looks for its parent; 5 by default
    loader: DataLoader[Any] = DataLoader(
        _Said(said), num_workers=WORKERS, prefetch_factor=AHEAD, multiprocessing_context=start_method
    )
    Order(loader)
    batches = iter(loader)
    signal.pause()
    del batches


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", pytest.param("forkserver", marks=pytest.mark.sweep)])
def test_workers_end_with_a_training_that_is_killed(start_method: str) -> None:
    said, theirs = forking().Pipe(duplex=False)
    training: Any = forking().Process(target=_train, args=(theirs, start_method))
    training.start()
    theirs.close()
    loading: set[int] = set()
    for _ in range(WORKERS * AHEAD):
        assert said.poll(60)
        loading.add(said.recv())
    training.kill()
    training.join()
    ended = said.poll(60)
    for number in loading if not ended else ():
        os.kill(number, signal.SIGKILL)
    assert ended, "workers of a training that was killed still run"
    with pytest.raises(EOFError):  # no process holds the other end
        said.recv()
