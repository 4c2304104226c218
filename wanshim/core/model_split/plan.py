"""The placement of each block: decided from byte counts alone, before anything is moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from wanshim.errors import PlacementInvalid


def format_bytes(count: int) -> str:
    """Bytes as people read them: GiB for models, MiB for tiny ones."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks `first` to `last - 1` on one device; `num_bytes` counts their parameters and buffers."""

    device: str
    first: int
    last: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.device}: blocks {self.first} to {self.last - 1}, {format_bytes(self.num_bytes)}"


@dataclass(frozen=True)
class SplitPlan:
    """A model split by blocks. Modules outside the blocks live on `home`, where the output comes back to."""

    stages: tuple[Stage, ...]
    home: str
    home_bytes: int
    reason: str
    base: str = ""  # dtypes in which the blocks' frozen weights are stored

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(stage.device for stage in self.stages)

    @property
    def split_at(self) -> tuple[int, ...]:
        return tuple(stage.first for stage in self.stages[1:])

    @property
    def bytes_by_device(self) -> dict[str, int]:
        """Bytes of weights on each device."""
        count = dict.fromkeys(self.devices, 0)
        count[self.home] += self.home_bytes
        for stage in self.stages:
            count[stage.device] += stage.num_bytes
        return count

    def device_of(self, block: int) -> str:
        """The device of block number `block`."""
        return next(stage.device for stage in self.stages if stage.first <= block < stage.last)

    def __str__(self) -> str:
        lines = [f"split into {len(self.stages)} stages, {self.reason}"]
        lines += [f"  {stage}" for stage in self.stages]
        lines.append(f"  {self.home}: everything outside the blocks, {format_bytes(self.home_bytes)}")
        if self.base:
            lines.append(f"  frozen weights of the blocks: {self.base}")
        return "\n".join(lines)


def plan_split(
    block_bytes: Sequence[int],
    home_bytes: int,
    devices: Sequence[str],
    *,
    split_at: Sequence[int] | None = None,
    reason: str | None = None,
) -> SplitPlan:
    """Divide blocks into `len(devices)` runs so that the fullest device holds as little as possible.

    Args:
        block_bytes: bytes of each block, in the order of execution.
        home_bytes: bytes of everything else; they count towards the first device.
        devices: one a stage, in order.
        split_at: the first block of each stage after the first; default: balanced.
        reason: what the plan says of its split points; default: how they came about.

    Raises:
        PlacementInvalid: fewer than two devices, more devices than blocks, or a split point outside the model.
    """
    num_blocks, num_stages = len(block_bytes), len(devices)
    if num_stages < 2:
        raise PlacementInvalid(f"{num_stages} device for a model split", expected="at least 2", topic="name_devices")
    if num_stages > num_blocks:
        raise PlacementInvalid(
            f"{num_stages} devices for a model of {num_blocks} blocks", expected=f"at most {num_blocks} devices"
        )
    if split_at is None:
        points = _balanced(block_bytes, home_bytes, num_stages)
        reason = reason or "balanced by bytes"
    else:
        points = _checked(split_at, num_blocks, num_stages)
        reason = reason or "split points as given"
    bounds = [0, *points, num_blocks]
    stages = tuple(
        Stage(device, first, last, sum(block_bytes[first:last]))
        for device, (first, last) in zip(devices, pairwise(bounds), strict=True)
    )
    return SplitPlan(stages, devices[0], home_bytes, reason)


def _checked(split_at: Sequence[int], num_blocks: int, num_stages: int) -> list[int]:
    points = list(split_at)
    if len(points) != num_stages - 1:
        raise PlacementInvalid(
            f"{len(points)} split points {points} for {num_stages} devices", expected=f"{num_stages - 1} of them"
        )
    bounds = [0, *points, num_blocks]
    if any(first >= last for first, last in pairwise(bounds)):
        raise PlacementInvalid(
            f"split points {points} in a model of {num_blocks} blocks",
            expected=f"ascending block numbers from 1 to {num_blocks - 1}",
            topic="split_at",
        )
    return points


def _balanced(block_bytes: Sequence[int], home_bytes: int, num_stages: int) -> list[int]:
    """The contiguous partition with the least maximum, by dynamic programming over split points.

    Of equal ones the last cut sits as early as possible, so the first device, which also holds what the
    plan cannot see (text encoder, VAE), is never the fuller one without need.
    """
    prefix = [0]
    for size in block_bytes:
        prefix.append(prefix[-1] + size)
    num_blocks = len(block_bytes)
    # best[k][n]: (fullest device, its cuts) for the first n blocks on k + 1 devices
    best: list[dict[int, tuple[int, list[int]]]] = [{n: (home_bytes + prefix[n], []) for n in range(1, num_blocks + 1)}]
    for stage in range(1, num_stages):
        row: dict[int, tuple[int, list[int]]] = {}
        for n in range(stage + 1, num_blocks + 1):
            row[n] = min(
                (max(best[stage - 1][cut][0], prefix[n] - prefix[cut]), [*best[stage - 1][cut][1], cut])
                for cut in range(stage, n)
            )
        best.append(row)
    return best[-1][num_blocks][1]
