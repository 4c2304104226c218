"""Which blocks wait on the host: decided from byte counts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wanshim.core.model_split.plan import format_bytes
from wanshim.errors import PlacementInvalid

SLOTS = 2  # streamed blocks that have memory on the device at a time: one at work, one on its way


@dataclass(frozen=True)
class StreamPlan:
    """`streamed`: numbers of the blocks whose frozen weights wait on the host; the rest lies on `device`."""

    device: str
    num_blocks: int
    streamed: tuple[int, ...]
    resident_bytes: int  # what stays on the device for good, trainable parameters included
    host_bytes: int  # what waits, once a host
    ring_bytes: int  # device memory the streamed blocks take turns in
    slots: int

    @property
    def device_bytes(self) -> int:
        return self.resident_bytes + self.ring_bytes

    @property
    def link_bytes(self) -> int:
        """Bytes that cross the link in a step: each streamed block ahead of its forward and of its backward, but for
        those still in the ring at either turn."""
        per_block = self.host_bytes / max(len(self.streamed), 1)
        return round(2 * max(len(self.streamed) - self.slots, 0) * per_block)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"streaming {len(self.streamed)} of {self.num_blocks} blocks to {self.device}",
                f"  {self.device}: {format_bytes(self.resident_bytes)} for good, and "
                f"{format_bytes(self.ring_bytes)} in which {self.slots} streamed blocks take turns",
                f"  host: {format_bytes(self.host_bytes)} of frozen weights, page-locked, one copy for all its ranks",
                f"  link: {format_bytes(self.link_bytes)} a step, ahead of use",
            ]
        )


def streamed_blocks(num_blocks: int, count: int) -> tuple[int, ...]:
    """`count` blocks spread evenly, the last one of each run: so each has the time of its neighbours to arrive."""
    return tuple((i + 1) * num_blocks // count - 1 for i in range(count))


def plan_stream(
    frozen_bytes: Sequence[int], other_bytes: int, device: str, *, count: int | None, budget: int | None, slots: int
) -> StreamPlan:
    """Choose how many blocks wait on the host.

    Args:
        frozen_bytes: bytes of each block that can wait.
        other_bytes: bytes of everything that stays on the device.
        count: that many blocks; default: as few as the budget allows.
        budget: bytes of weights the device may hold, the ring included; default: half of the blocks wait, and no
            fewer than take turns.
        slots: blocks that take turns on the device.

    Raises:
        PlacementInvalid: the model has too few blocks, the count is outside it, or not even all blocks waiting would
            fit the budget.
    """
    num_blocks = len(frozen_bytes)
    ring = slots * max(frozen_bytes, default=0)
    if count is None and budget is None:
        count = max(num_blocks // 2, slots)
    if count is None:
        assert budget is not None
        count = _fewest(frozen_bytes, other_bytes + ring, budget)
    if num_blocks < slots:
        raise PlacementInvalid(
            f"a model of {num_blocks} block{'s' * (num_blocks != 1)} cannot be streamed",
            expected=f"at least {slots} blocks, of which {slots} take turns on the device",
            topic="stream_off",
        )
    if not slots <= count <= num_blocks:
        raise PlacementInvalid(
            f"{count} streamed blocks in a model of {num_blocks} with {slots} taking turns",
            expected=f"from {slots} to {num_blocks}",
        )
    streamed = streamed_blocks(num_blocks, count)
    host = sum(frozen_bytes[i] for i in streamed)
    return StreamPlan(device, num_blocks, streamed, other_bytes + sum(frozen_bytes) - host, host, ring, slots)


def _fewest(frozen_bytes: Sequence[int], fixed: int, budget: int) -> int:
    num_blocks = len(frozen_bytes)
    for count in range(1, num_blocks + 1):
        waiting = sum(frozen_bytes[i] for i in streamed_blocks(num_blocks, count))
        if fixed + sum(frozen_bytes) - waiting <= budget:
            return max(count, 2)
    raise PlacementInvalid(
        f"with every block streamed the device still holds {format_bytes(fixed)} of weights",
        expected=f"at most {format_bytes(budget)}",
        hint="Use fewer frames, or a larger card",
    )
