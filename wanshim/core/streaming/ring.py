"""The few places on the device in which streamed blocks take turns, and the copies that fill them ahead of use.

Method: a ring of device buffers filled from page-locked memory, as block swap in kohya-ss/musubi-tuner does
(its PR 972 streams one way only, since frozen weights need no way back); here the host's copy is one for
all ranks, and a checkpoint's recomputation is what turns the direction round.

A forward without gradients may be so short that the device waits for its weights. Blocks then stay, as `Waits` allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wanshim.core.shared.gpu_memory import release_cached
from wanshim.core.streaming.block_weights import BlockWeights
from wanshim.core.streaming.plan import streamed_blocks
from wanshim.errors import WanshimError
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.streaming.host_copy import HostCopy
    from wanshim.core.streaming.page_locked import PageLocked


@dataclass
class StreamCount:
    """Since the start. A late block was not asked for ahead: the device waited for the whole copy."""

    loads: int = 0
    loaded_bytes: int = 0
    late: int = 0


WAITED = 0.1  # of a forward, from which on slots of their own are worth their memory


@dataclass(eq=False)
class Slot:
    memory: torch.Tensor
    index: int | None = None  # which of the streamed blocks it holds
    ready: torch.cuda.Event | None = None


class Waits:
    """The share of a forward in which a CUDA device waited for weights. It computes behind the program, so a forward is
    read some time after it was issued; those in between are not timed, nor is the first. Copies from memory that is not
    page-locked hold the program, and are not seen.

    Args:
        may_keep: called once, if a forward waited, with the bytes of a slot and how many more would do; returns how
            many there may be.
        on_kept: called when blocks have slots of their own.
    """

    def __init__(self, device: torch.device, may_keep: Callable[[int, int], int], on_kept: Callable[[], None]) -> None:
        self.may_keep, self.on_kept = may_keep, on_kept
        self._device = device
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the forwards until now, which are not those that count."""
        self._events: list[torch.cuda.Event] = []  # the begin, before and behind each wait, and the end
        self._is_first, self._is_whole = True, False

    def begin_forward(self) -> float:
        """The share of the forward that was timed, once it has ended, and the next one is timed; else 0."""
        if self._is_first:
            self._is_first = False
            return 0.0
        if not self._is_whole:
            self._is_whole = bool(self._events)
            self._note()
        if not (self._is_whole and self._events[-1].query()):
            return 0.0
        begin, *pairs, end = self._events
        waited = sum(before.elapsed_time(behind) for before, behind in zip(pairs[::2], pairs[1::2], strict=True))
        self._events, self._is_whole = [], False
        self._note()
        return waited / max(begin.elapsed_time(end), 1e-3)

    def wait(self, ready: torch.cuda.Event) -> None:
        """Have what is issued next wait for weights."""
        is_timed = bool(self._events) and not self._is_whole
        if is_timed:
            self._note()
        torch.cuda.current_stream(self._device).wait_event(ready)
        if is_timed:
            self._note()

    def _note(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)


def waits_on(device: torch.device, may_keep: Callable[[int, int], int], on_kept: Callable[[], None]) -> Waits | None:
    """None: elsewhere than on CUDA nothing waits."""
    return Waits(device, may_keep, on_kept) if device.type == "cuda" else None


class Ring:
    """Blocks by their index among the streamed ones. Used by one thread at a time.

    Args:
        waits: of the forwards to come; None: no block stays.
    """

    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        host: HostCopy | PageLocked,
        device: torch.device,
        slots: int,
        waits: Waits | None = None,
    ) -> None:
        self.blocks = blocks
        self.host = host
        self.device = device
        self.count = StreamCount()
        self.timed: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] | None = None  # of each copy, when set
        size = max(block.num_bytes for block in blocks)
        self.slots = [Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(slots)]
        self._own: dict[int, Slot] = {}  # by block
        self._waits = waits
        self._loads = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._compute: torch.cuda.Stream | None = None
        self._task = -1
        self._lowest = len(blocks)

    def attach(self, blocks: nn.ModuleList, undo: Undo) -> None:
        """Acquire each streamed block of the model's `blocks` before it computes."""
        for index, layout in enumerate(self.blocks):

            def before(module: nn.Module, args: Any, index: int = index) -> None:
                self.acquire(index)

            block = blocks[layout.number]
            if block._compiled_call_impl is None:
                undo.add(block.register_forward_pre_hook(before, prepend=True).remove)
            else:  # the program's graph has the hooks of its block in it
                undo.set(
                    block, {"_compiled_call_impl": _after(partial(self.acquire, index), block._compiled_call_impl)}
                )

    def acquire(self, index: int) -> None:
        """Before a block computes: its weights lie on the device for whatever is issued next, and those of the
        one after it, in this direction, are on their way."""
        task = torch._C._current_graph_task_id()
        backward = task != -1
        self._check_order(index, task)
        self._follow()
        if index == 0:
            self._keep_if_waited()
        slot = self._holding(index)
        if slot is None:
            slot = self._victim(index, index)
            self._load(slot, index)
            self.count.late += 1
        if slot.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            (stream.wait_event if self._waits is None else self._waits.wait)(slot.ready)
        self.blocks[index].bind(slot.memory)
        ahead = self._next(index, backward)
        while ahead != index and ahead in self._own and self._own[ahead].index == ahead:
            ahead = self._next(ahead, backward)
        self._prefetch(ahead, index)

    def release(self) -> None:
        """Every block's tensors lie on the host again, where the program may write to them: slots are filled anew."""
        for block in self.blocks:
            block.wait()
        for slot in (*self.slots, *self._own.values()):
            slot.index = None

    def _keep_if_waited(self) -> None:
        """Give blocks slots of their own if forwards wait for weights and the device has the memory."""
        # Until all weights have come, and their pages are locked, any forward waits.
        if self._waits is None or not self.host.is_settled:
            return
        if self._waits.begin_forward() <= WAITED:
            return
        waits, self._waits = self._waits, None
        total, size, more = len(self.blocks), self.slots[0].memory.numel(), len(self.blocks) - len(self.slots)
        count = waits.may_keep(size, more) if more > 0 else 0
        turns = streamed_blocks(total, total - count)
        release_cached(self.device)  # what stays is not put among memory that a larger tensor could have
        with torch.inference_mode(False), suppress(torch.OutOfMemoryError):
            for at in sorted(set(range(total)).difference(turns)):
                self._own[at] = Slot(torch.empty(size, dtype=torch.uint8, device=self.device))
        if self._own:
            waits.on_kept()

    def _next(self, index: int, backward: bool) -> int:
        if backward:
            return index - 1
        # without a backward to come, the next forward follows
        return (index + 1) % len(self.blocks) if not torch.is_grad_enabled() else index + 1

    def _prefetch(self, index: int, current: int) -> None:
        # To wait here for a block that is on its way to the host would hold the block at work.
        if 0 <= index < len(self.blocks) and self._holding(index) is None and self.host.has(index):
            self._load(self._victim(current, index), index)

    def _holding(self, index: int) -> Slot | None:
        own = self._own.get(index)  # not yet filled where the block still lies in a slot of the turns
        if own is not None and own.index == index:
            return own
        return next((slot for slot in self.slots if slot.index == index), None)

    def _victim(self, current: int, wanted: int) -> Slot:
        """Its own slot, an empty one, or that whose block is farthest from here; never that of the block at work."""
        if wanted in self._own:
            return self._own[wanted]
        others = [slot for slot in self.slots if slot.index != current or current == wanted]
        return max(others, key=lambda s: len(self.blocks) + 1 if s.index is None else abs(s.index - wanted))

    def _load(self, slot: Slot, index: int) -> None:
        if slot.index is not None:
            self.blocks[slot.index].wait()
        block = self.blocks[index]
        self.host.wait(index)
        target = slot.memory[: block.num_bytes]
        slot.index = index
        self.count.loads += 1
        self.count.loaded_bytes += block.num_bytes
        if self._loads is None:
            self.host.load(block, target)
            return
        # All that reads the slot's old block has been issued: the block now at work came after it.
        self._loads.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self._loads):
            begun = self._time()
            self.host.load(block, target)
            ended = self._time()
        slot.ready = self._loads.record_event()
        if self.timed is not None and begun is not None and ended is not None:
            self.timed.append((begun, ended, block.num_bytes))

    def _time(self) -> torch.cuda.Event | None:
        if self.timed is None or self._loads is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._loads)
        return event

    def _follow(self) -> None:
        """If the caller has changed its stream, what it issues now comes after what it issued there."""
        if self._loads is None:
            return
        current = torch.cuda.current_stream(self.device)
        if self._compute is not None and self._compute != current:
            current.wait_stream(self._compute)
        self._compute = current

    def _check_order(self, index: int, task: int) -> None:
        """A block's slot is filled anew when an earlier block begins its backward. So within one backward they
        must come one by one, from the last to the first, the blocks of one forward after those of another."""
        if task == -1:
            if torch.is_grad_enabled() and not _saved_tensors_are_hooked():
                raise WanshimError(
                    "a streamed block ran with gradients and without checkpointing: its backward would read another "
                    "block's weights",
                    expected="gradient checkpointing of every streamed block",
                    topic="checkpointing",
                )
        elif task == self._task and index >= self._lowest and (self._lowest, index) != (0, len(self.blocks) - 1):
            raise WanshimError(
                "one backward came to streamed block "
                f"{self.blocks[index].number} after block {self.blocks[self._lowest].number}",
                expected="a checkpoint for each block, and the blocks of each forward from the last to the first",
                hint="Checkpoint blocks singly",
            )
        self._task, self._lowest = task, index if task != -1 else len(self.blocks)


def _after(first: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return call(*args, **kwargs)

    return both


def _saved_tensors_are_hooked() -> bool:
    """Whether somebody (a checkpoint) takes the tensors that autograd would keep."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
