"""Ranks out of step: a call too many or too few fails alone, within its deadline, and spoils none after it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wanshim.core.decoding import VaeHandle, parallelize_decode
from wanshim.errors import WanshimError

from .ranks import run_ranks, values
from .tiny import make_latent, make_vae

pytestmark = pytest.mark.slow  # each scenario waits for deadlines

DEADLINE = 3.0
MANY = 10 * DEADLINE  # a bound for a machine under load: nobody waits for ever
SIZE = 3


@dataclass(frozen=True)
class End:
    """How one call ended: the error's name and text, or whether the frames were right."""

    error: str
    text: str
    right: bool
    seconds: float


class Rank:
    """One rank with one handle for all scenarios."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.vae = make_vae("2.1")
        self.latent = make_latent(3, 3, 4)
        self.reference = self.vae.decode(self.latent).sample
        self.handle: VaeHandle = parallelize_decode(self.vae, mode="temporal", deadline=DEADLINE, raise_failures=True)
        self.store: Any = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())

    def call(self, latent: torch.Tensor | None = None) -> End:
        start = time.monotonic()
        try:
            frames = self.vae.decode(self.latent if latent is None else latent).sample
        except WanshimError as error:
            return End(type(error).__name__, str(error), False, time.monotonic() - start)
        return End("", "", torch.equal(frames, self.reference), time.monotonic() - start)

    def joint(self) -> list[End]:
        """Two calls of all ranks, which begin together."""
        dist.barrier()
        return [self.call(), self.call()]

    # Scenarios: the calls out of step, then what the joint ones after them came to.

    def one_call_more(self) -> tuple[End | None, list[End]]:
        lone = self.call(make_latent(1, 3, 4)) if self.rank == 0 else None
        return lone, self.joint()

    def one_call_more_in_the_middle(self) -> tuple[End | None, list[End]]:
        dist.barrier()
        before = self.call()
        lone = self.call() if self.rank == 1 else None
        return lone, [before, *self.joint()]

    def one_call_fewer(self) -> tuple[End | None, list[End]]:
        dist.barrier()
        lone = self.call() if self.rank != 1 else None
        return lone, self.joint()

    def another_latent(self) -> tuple[End | None, list[End]]:
        """Rank 2 calls something else first: that call and its partners fail at once."""
        dist.barrier()
        apart = self.call(make_latent(2, 3, 4) if self.rank == 2 else None)
        return apart, self.joint()

    def latent_reversed_in_time(self) -> tuple[End | None, list[End]]:
        dist.barrier()
        apart = self.call(self.latent.flip(2) if self.rank == 1 else None)
        return apart, self.joint()

    def one_decoder_more(self) -> tuple[End | None, list[End]]:
        lone = None
        if self.rank == 2:
            self.handle.remove()
            other = parallelize_decode(self.vae, mode="temporal", deadline=0.5, raise_failures=True)
            lone = self.call()
            other.remove()
            self.handle = parallelize_decode(self.vae, mode="temporal", deadline=DEADLINE, raise_failures=True)
        return lone, self.joint()

    def connection_lost(self) -> tuple[End | None, list[End]]:
        """As after an interrupt between two decodes: one rank has closed its connections, the others have not."""
        dist.barrier()
        before = self.call()
        if self.rank == 1:
            assert self.handle.parallel._comm is not None
            self.handle.parallel._comm.close()
        return None, [before, *self.joint()]

    def late(self) -> tuple[End | None, list[End]]:
        """Rank 1 calls when the others have begun to wait for it."""
        dist.barrier()
        if self.rank == 1:
            self.store.wait(["0 calls", "2 calls"])
        self.store.set(f"{self.rank} calls", "")
        return None, [self.call(), *self.joint()]

    def one_gives_up_while_others_wait(self) -> tuple[End | None, list[End]]:
        """Rank 0 calls early and gives up; the call that rank 1 makes meanwhile waits on for ranks 2 and 0."""
        dist.barrier()
        lone = self.call() if self.rank == 0 else None
        if self.rank == 0:
            self.store.set("gave up", "1")
        elif self.rank == 1:
            time.sleep(0.5 * DEADLINE)  # the lateness itself, less than the deadline
        else:
            self.store.wait(["gave up"])
        return lone, [self.call(), *self.joint()]


SCENARIOS = (
    "one_call_more",
    "one_call_more_in_the_middle",
    "one_call_fewer",
    "another_latent",
    "latent_reversed_in_time",
    "one_decoder_more",
    "connection_lost",
    "late",
    "one_gives_up_while_others_wait",
)


def play(rank: int, size: int) -> dict[str, tuple[End | None, list[End]]]:
    mine = Rank(rank)
    return {name: getattr(mine, name)() for name in SCENARIOS}


@pytest.fixture(scope="module")
def played() -> list[dict[str, tuple[End | None, list[End]]]]:
    return values(run_ranks(play, SIZE))


@pytest.mark.parametrize("name", SCENARIOS)
def test_joint_decodes_after_ranks_were_out_of_step_are_right(name: str, played: Any) -> None:
    for rank, scenarios in enumerate(played):
        for end in scenarios[name][1]:
            assert end.right, f"rank {rank}: {end}"


@pytest.mark.parametrize(
    ("name", "callers", "absent"),
    [
        ("one_call_more", (0,), "ranks 1, 2"),
        ("one_call_more_in_the_middle", (1,), "ranks 0, 2"),
        ("one_call_fewer", (0, 2), "rank 1"),
        ("one_decoder_more", (2,), "ranks 0, 1"),
        ("one_gives_up_while_others_wait", (0,), "rank 2"),
    ],
)
def test_call_that_other_ranks_do_not_make_fails_in_time_and_names_them(
    name: str, callers: tuple[int, ...], absent: str, played: Any
) -> None:
    for rank in callers:
        end = played[rank][name][0]
        assert end.error == "RankAbsent"
        assert f"{absent} did not call decode within" in end.text
        assert end.seconds < MANY


@pytest.mark.parametrize("name", ["another_latent", "latent_reversed_in_time"])
def test_call_that_meets_another_request_fails_on_every_rank_at_once(name: str, played: Any) -> None:
    ends = [scenarios[name][0] for scenarios in played]
    assert {end.error for end in ends} == {"RankDisagreement"}
    assert len({end.text for end in ends}) == 1  # and no rank's deadline passed, which is another error
