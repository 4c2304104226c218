"""Groups that are not the whole job, ranks without work, and who receives frames: all in one set of four processes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wanshim.core.decoding import OutputSpec, ParallelVae, VaeOptions, parallelize_decode, read_graph
from wanshim.core.ranks import agreement
from wanshim.core.ranks import group as ranks_group
from wanshim.core.ranks.group import Rendezvous
from wanshim.core.ranks.store import default_store
from wanshim.errors import ModelInvalid

from .ranks import run_ranks, values
from .tiny import make_latent, make_vae

pytestmark = pytest.mark.slow  # four processes on few cores

SIZE = 4
DEADLINE = 5.0
MODES = ("temporal", "spatial", "tile")


@dataclass(frozen=True)
class Case:
    """One decode: by which ranks of the job, how many of them at work, who receives (within the group)."""

    mode: str
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    active: int | None = None
    output: tuple[int, ...] | None = None
    height: int = 5
    axis: str = "auto"


SUBGROUPS = [Case(mode, (1, 3)) for mode in MODES]
RECEIVERS = [Case("temporal", (2, 3), output=(0,)), Case("spatial", (1, 2, 3), output=(1, 2))]
IDLE = [Case(mode, active=active) for mode in MODES for active in (2, 3)]
EMPTY_BANDS = [
    Case("spatial", height=3, axis="height"),
    Case("spatial", (1, 2, 3), active=2, height=2, axis="height"),
    Case("spatial", height=1, axis="height"),
]
CASES = [*SUBGROUPS, *RECEIVERS, *IDLE, *EMPTY_BANDS]
PAIRS = ((0, 2), (1, 3))  # two groups that work at the same time, as with sequence parallel inside data parallel


def play(rank: int, size: int) -> tuple[dict[Case, str], dict[str, Any], list[str]]:
    groups = {ranks: dist.new_group(list(ranks)) for ranks in sorted({*PAIRS, *(case.ranks for case in CASES)})}
    vae = make_vae("2.1")
    graph = read_graph(vae)
    ends = {}
    for case in CASES:
        dist.barrier()  # ranks outside a case's group would run ahead and wait in the next one
        if rank in case.ranks:
            ends[case] = run_case(vae, graph, case, groups[case.ranks])
    dist.barrier()
    told = outputs(rank, vae, groups)
    dist.barrier()
    return ends, told, pairs(rank, vae, graph, groups)


def run_case(vae: Any, graph: Any, case: Case, group: Any) -> str:
    """The mode that ran and what came of it here: right, none, or how far off."""
    reference = reference_of(case.height, case.mode == "tile")
    vae.enable_tiling(32, 32, 24, 24)
    vae.use_tiling = case.mode == "tile"
    options = VaeOptions(
        mode=case.mode,
        axis=case.axis,
        active=case.active,
        deadline=DEADLINE,
        tiles=tiles(vae),
        output=OutputSpec(ranks=case.output),
    )
    decoder = ParallelVae(graph, group, options)
    try:
        frames = decoder(make_latent(3, case.height, 5))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        decoder.release()
    assert decoder.plan is not None
    mode = decoder.plan.mode
    if not frames.numel():
        return f"{mode} none"
    difference = (frames - reference).abs().max().item()
    return f"{mode} right" if difference <= 1e-5 else f"{mode} off by {difference}"


@cache
def reference_of(height: int, tiled: bool) -> torch.Tensor:
    """What diffusers alone decodes, once a process."""
    vae = make_vae("2.1")
    vae.enable_tiling(32, 32, 24, 24)
    vae.use_tiling = tiled
    decoded = vae.decode(make_latent(3, height, 5)).sample
    assert isinstance(decoded, torch.Tensor)
    return decoded


def tiles(vae: Any) -> Any:
    from wanshim.core.decoding import TileSettings

    return TileSettings.of(vae)


def outputs(rank: int, vae: Any, groups: dict[tuple[int, ...], Any]) -> dict[str, Any]:
    """What the VAE's own decode returns where not all ranks receive: each entry says None or how many frames."""
    vae.use_tiling = False
    latent, told = make_latent(2, batch=2), {}
    for output in (0, "rank1", (0, 3)):
        handle = parallelize_decode(vae, output=output, deadline=DEADLINE)
        told[f"{output}"] = count(vae.decode(latent).sample)
        told[f"{output} tuple"] = count(vae.decode(latent, return_dict=False)[0])
        vae.enable_slicing()  # diffusers decodes sample by sample and concatenates
        told[f"{output} sliced"] = count(vae.decode(latent).sample)
        vae.disable_slicing()
        handle.remove()
        told[f"{output} removed"] = not {"decode", "_decode"} & set(vae.__dict__)
    outside = groups[2, 3]
    for name, group, output in (("beyond", dist.group.WORLD, 4), ("beyond group", outside, "rank2")):
        if group is outside and rank < 2:
            continue
        try:
            parallelize_decode(vae, group, output=output)
        except ModelInvalid as error:
            told[name] = str(error)
    if rank < 2:
        handle = parallelize_decode(vae, outside)
        try:
            vae.decode(latent)
        except ModelInvalid as error:
            told["no member"] = str(error)
        handle.remove()
    return told


def pairs(rank: int, vae: Any, graph: Any, groups: dict[tuple[int, ...], Any]) -> list[str]:
    """What came of the calls of this rank's pair, while the other pair, which carries another patch set, decodes other
    latents."""
    pair = PAIRS[rank % 2]
    interleave(rank, pair)
    agreement.set_fingerprint_provider(lambda: {"wanshim": f"of {pair}", "host": f"node-{rank}"})
    try:
        agreement.ensure(groups[pair], call="decode", timeout_s=DEADLINE)
        ends = ["agreed"]
    except Exception as error:
        ends = [f"{type(error).__name__}: {error}"]
    finally:
        agreement.set_fingerprint_provider(None)
    for number in range(3):
        case = Case("temporal", pair, height=4 + 2 * (rank % 2) + number)
        ends.append(run_case(vae, graph, case, groups[pair]))
    return ends


def interleave(rank: int, pair: tuple[int, ...]) -> None:
    """From now on the second rank of each pair comes to a round when the first ranks of both pairs wait in theirs."""
    store, rounds = default_store(), itertools.count()
    store.set_timeout(timedelta(seconds=2 * DEADLINE))  # of reads too: a rank of a mixed-up round never writes
    join, wait = Rendezvous._join, ranks_group.wait_for

    def joins(self: Rendezvous, *args: Any) -> str:
        if rank == pair[1]:
            number = next(rounds)
            store.wait([f"test/{number}/{first}" for first, _ in PAIRS], timedelta(seconds=DEADLINE))
        return join(self, *args)

    def waits(*args: Any) -> bool:
        if rank == pair[0]:
            store.set(f"test/{next(rounds)}/{rank}", "")
        return wait(*args)

    Rendezvous._join = joins  # type: ignore[method-assign]
    ranks_group.wait_for = waits


def count(frames: torch.Tensor | None) -> int | None:
    return None if frames is None else frames.shape[2]


@pytest.fixture(scope="module")
def played() -> Any:
    return values(run_ranks(play, SIZE, seconds=240))


def ends_of(played: Any, cases: list[Case]) -> dict[Case, dict[int, str]]:
    return {case: {rank: played[rank][0][case] for rank in case.ranks} for case in cases}


def test_subgroup_that_does_not_begin_at_rank_0_decodes_as_one_device(played: Any) -> None:
    for case, ends in ends_of(played, SUBGROUPS).items():
        assert set(ends.values()) == {f"{case.mode} right"}, f"{case}: {ends}"


def test_receivers_are_counted_within_the_group(played: Any) -> None:
    first, second = ends_of(played, RECEIVERS).values()
    assert first == {2: "temporal right", 3: "temporal none"}
    assert second == {1: "spatial none", 2: "spatial right", 3: "spatial right"}


def test_two_groups_that_work_at_the_same_time_leave_each_other_alone(played: Any) -> None:
    assert [ends for _, _, ends in played] == [["agreed", *["temporal right"] * 3]] * SIZE


def test_ranks_that_only_receive_get_all_frames(played: Any) -> None:
    for case, ends in ends_of(played, IDLE).items():
        assert ends == dict.fromkeys(range(SIZE), f"{case.mode} right"), f"{case}: {ends}"


def test_ranks_with_an_empty_band_are_nobodys_neighbours(played: Any) -> None:
    for case, ends in ends_of(played, EMPTY_BANDS).items():
        assert set(ends.values()) == {"spatial right"}, f"{case}: {ends}"


@pytest.mark.parametrize(("output", "receivers"), [(0, {0}), ("rank1", {1}), ((0, 3), {0, 3})])
def test_decode_returns_none_on_ranks_that_receive_no_frames(output: Any, receivers: set[int], played: Any) -> None:
    for rank, (_, told, _) in enumerate(played):
        for way in ("", " tuple", " sliced"):
            assert told[f"{output}{way}"] == (5 if rank in receivers else None), f"rank {rank}{way}"
        assert told[f"{output} removed"]


def test_output_beyond_the_group_is_refused_on_every_rank(played: Any) -> None:
    assert {told["beyond"].split(". ")[0] for _, told, _ in played} == {"output names rank 4 of a group of 4"}
    assert {told["beyond group"].split(". ")[0] for _, told, _ in played[2:]} == {"output names rank 2 of a group of 2"}


def test_rank_outside_the_group_is_told_so(played: Any) -> None:
    for rank, (_, told, _) in enumerate(played[:2]):
        assert told["no member"].startswith(f"rank {rank} is not in the group that decodes.")
