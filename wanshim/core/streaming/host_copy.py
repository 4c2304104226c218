"""The weights of a model's blocks in one piece of host memory that processes share, and a model that computes from
there without gradients."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from wanshim.core.model_split.split import find_blocks
from wanshim.core.shared.host_memory import (
    PAGE,
    THREADS,
    available_bytes,
    is_dense,
    of_this_process,
    page_lock,
    populate,
    release_pinned,
    room_for,
    side_by_side,
    unnamed_file,
)
from wanshim.core.shared.weight_bytes import num_bytes, stored_bytes, tensors
from wanshim.core.streaming.block_weights import BlockWeights, Weight, bounds_of, owners, room, strides, used_once
from wanshim.core.streaming.page_locked import ELSEWHERE, PageLocked, is_page_locked
from wanshim.core.streaming.plan import SLOTS
from wanshim.core.streaming.ring import Ring, Waits
from wanshim.errors import HostMemoryInvalid, PlacementInvalid
from wanshim.undo import Undo

Moved = Callable[[Sequence[torch.Tensor]], None]
_NUMBERS = itertools.count()
_AT_ONCE = 2  # blocks that are moved, at least: giving memory back takes as long as a copy
_SPARE = 1 / 8  # of the host's free memory: because more blocks are moved at once, up to twice that lies in two places
_FILES = 64  # of memory that processes share, at most: pages come to several at once
_COMES, _IS_THERE, _FAILED = range(3)  # a block, for the processes that share its copy
_POLL_SECONDS = 0.005


class HostCopy:
    """The memory, and where in it each block is.

    Args:
        memory: uint8, flat.
        bounds: begin and end of each block, in bytes; a block begins with a page.
        descriptors: of the files that it is, for other processes; they are closed with this object.
        states: a byte a block, in those files: whether its weights have come.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        bounds: Sequence[tuple[int, int]],
        descriptors: Sequence[int] = (),
        states: torch.Tensor | None = None,
    ) -> None:
        self.number, self._states = next(_NUMBERS), states
        self.memory, self.bounds, self.descriptors = memory, tuple(bounds), tuple(descriptors)
        # Offsets of weights that lie on a device, and here besides, and of those that are on their way.
        self._elsewhere: Any = WeakIdKeyDictionary()
        self._moves: list[Future[None]] = []  # of a block each
        self._locking: threading.Thread | None = None

    def __del__(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    @classmethod
    def of(cls, model: nn.Module, *, shared: bool, moved: Moved = lambda weights: None) -> HostCopy:
        """Move the weights of the model's blocks there. Those on a device stay on it, and are written by `write`.

        They come in the background, block by block, each weight into its place with the same values. A `Ring` waits for
        the block that it needs; `wait` for all before the model computes otherwise.

        Args:
            shared: other processes can map it, by its descriptors.
            moved: called, in a thread, with a block's weights when they have come; what else has their old memory may
                let go of it.

        Raises:
            PlacementInvalid: no block has weights that can lie there.
            HostMemoryInvalid: the host has not that much memory.
        """
        found = _weights(model)
        if any(t.is_meta for t in itertools.chain.from_iterable(found)):
            raise PlacementInvalid(f"{type(model).__name__} has weights that are not loaded")
        bounds = bounds_of(sum(map(room, block)) for block in found)
        size = bounds[-1][1]
        largest = max(end - begin for begin, end in bounds)
        at_once = max(_AT_ONCE, min(THREADS, int(_SPARE * available_bytes() / largest)))
        twice = at_once * largest
        is_kept = any(map(is_page_locked, itertools.chain.from_iterable(found)))  # by torch, until it is released
        stays = is_kept or any(t.device.type != "cpu" for block in found for t in block)
        added = size if stays else min(size, twice)
        purpose = f"the weights of {type(model).__name__}"
        with room_for(size, purpose, added=added):
            files = map(unnamed_file, _file_sizes(bounds))
            made = cls.in_files(files, bounds) if shared else cls(of_this_process(size), bounds)
            if made._states is not None:
                populate(made._states)
        made._move(found, purpose, moved, at_once)
        if is_kept:
            threading.Thread(target=made._release, name="wanshim-release", daemon=True).start()
        return made

    @classmethod
    def in_files(cls, descriptors: Iterable[int], bounds: Sequence[tuple[int, int]]) -> HostCopy:
        """The memory of such files, which are closed with it.

        Raises:
            OSError: the system cannot map them.
        """
        with ExitStack() as until_mapped:
            files = []
            for descriptor in descriptors:
                until_mapped.callback(os.close, descriptor)
                files.append(descriptor)
            memory = side_by_side(files, _file_sizes(bounds))
            until_mapped.pop_all()
        return cls(memory[: bounds[-1][1]], bounds, files, memory[-_state_bytes(bounds) :])

    def _move(self, found: Sequence[Sequence[torch.Tensor]], purpose: str, moved: Moved, at_once: int) -> None:
        inference = torch.is_inference_mode_enabled()  # of this thread

        def move(at: int, block: Sequence[torch.Tensor], begin: int, end: int) -> None:
            state = _FAILED
            with torch.inference_mode(inference):
                try:
                    if self.descriptors:  # to write to pages that there are not would end the process
                        with room_for(self.memory.numel(), purpose, added=0):
                            populate(self.memory[begin:end])
                    self._put(block)
                    moved(block)
                    state = _IS_THERE
                finally:
                    if self._states is not None:
                        self._states[at] = state

        for block, (offset, _) in zip(found, self.bounds, strict=True):
            for tensor in block:
                self._elsewhere[tensor] = offset
                offset += room(tensor)
        pool = ThreadPoolExecutor(at_once, "wanshim-move")  # if one fails, the others stay as good
        pieces = zip(found, self.bounds, strict=True)
        self._moves = [pool.submit(move, at, block, *bounds) for at, (block, bounds) in enumerate(pieces)]
        pool.shutdown(wait=False)

    def _release(self) -> None:
        """Return the page-locked memory that blocks have left, behind all of them: it may wait for the device, and the
        device for a process that waits for a block."""
        self.settle()
        release_pinned()

    def _put(self, block: Sequence[torch.Tensor]) -> None:
        for tensor in block:
            if tensor.device.type == "cpu":
                place = self.view(tensor, self._elsewhere[tensor])
                source = tensor.detach().resolve_conj().resolve_neg()
                # Not by torch, which would take threads for each of those that move a block.
                ctypes.memmove(place.data_ptr(), source.data_ptr(), source.nbytes)
                tensor.data = place  # what it had is free now: few blocks lie here twice
                del self._elsewhere[tensor]

    @property
    def _comes_here(self) -> bool:
        """Whether this process brings the weights, and not one that shares the files."""
        return bool(self._moves) or self._states is None

    def wait(self, at: int | None = None) -> None:
        """Wait until the block of that index has come; None: all.

        Raises:
            Exception: the reason for which it did not; in another process HostMemoryInvalid.
        """
        for move in self._moves if at is None else self._moves[at : at + 1]:
            move.result()
        if self._comes_here:
            return
        for each in range(len(self.bounds)) if at is None else (at,):  # they come in another process
            if not self._settle_anywhere(each):
                raise HostMemoryInvalid("weights did not come into memory that processes share")

    def settle(self, at: int | None = None) -> bool:
        """Wait until no weight of that block is on its way; whether all have come. Who needed one has said why not."""
        moves = self._moves if at is None else self._moves[at : at + 1]
        wait(moves)
        return not any(move.exception() for move in moves)

    def _settle_anywhere(self, at: int) -> bool:
        """`settle`, in whatever process the weights come."""
        if self._comes_here:
            return self.settle(at)
        assert self._states is not None
        while self._states[at] == _COMES:
            time.sleep(_POLL_SECONDS)
        return bool(self._states[at] == _IS_THERE)

    def has(self, at: int) -> bool:
        """Whether the block of that index has come."""
        if self._comes_here:
            return not self._moves or self._moves[at].done()
        assert self._states is not None
        return bool(self._states[at] != _COMES)

    def load(self, block: BlockWeights, target: torch.Tensor) -> None:
        """Copy a block's weights to a device, behind what is issued there."""
        target.copy_(block.on(self.memory), non_blocking=True)

    def view(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """A dense tensor of that size, with a storage of its own: of several in one storage, a file would have all."""
        buffer: Any = self.memory.numpy()
        flat = torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.as_strided(like.size(), strides(like))

    def places(self, number: int, found: Sequence[tuple[str, torch.Tensor]], at: int) -> BlockWeights:
        """Places for these tensors of block `number`, side by side in the piece of the memory with that index."""
        begin, end = self.bounds[at]
        weights, offset = [], 0
        for path, tensor in found:
            weights.append(Weight(tensor, path, offset, self.view(tensor, begin + offset)))
            offset += room(tensor)
        return BlockWeights(number, tuple(weights), begin, end - begin)

    def offset(self, tensor: torch.Tensor) -> int | None:
        """The place of a weight, in bytes; None: it is not here."""
        found: int | None = self._elsewhere.get(tensor)  # before its place, which another thread may set meanwhile
        at = tensor.data_ptr() - self.memory.data_ptr()
        return at if tensor.device.type == "cpu" and 0 <= at < self.memory.numel() else found

    def offsets(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """The places of those tensors that are here, by their numbers."""
        found = ((at, self.offset(tensor)) for at, tensor in enumerate(tensors))
        return {at: offset for at, offset in found if offset is not None}

    def write(self, tensor: torch.Tensor) -> None:
        """Bring a weight up to date that lies elsewhere, on a device, and is not on its way."""
        offset = self._elsewhere.get(tensor)
        if offset is None:
            return
        at = bisect_right(self.bounds, offset, key=lambda bound: bound[0]) - 1
        if tensor.device.type != "cpu" or self.has(at):
            self.wait(at)
            self.view(tensor, offset).copy_(tensor.detach())

    def layouts(self, model: nn.Module) -> list[BlockWeights] | None:
        """Weights of each block that lie here, whatever module objects they are by now; None: too many lie elsewhere,
        as after a move. Adapters may have come or gone."""
        found, elsewhere = [], 0
        for number, (block, (begin, end)) in enumerate(zip(find_blocks(model)[1], self.bounds, strict=True)):
            here = []
            for path, *_, tensor in owners(block, str(number)):
                if (offset := self.offset(tensor)) is None:
                    elsewhere += tensor.nbytes
                else:
                    comes = tensor.device.type == "cpu" and tensor in self._elsewhere
                    place = self.view(tensor, offset) if comes else tensor.detach()
                    here.append(Weight(tensor, path, offset - begin, place))
            found.append(BlockWeights(number, tuple(here), begin, end - begin))
        return found if elsewhere <= ELSEWHERE * self.memory.numel() else None

    @property
    def is_settled(self) -> bool:
        """Whether no weight is on its way, and no page is being locked."""
        return all(map(self.has, range(len(self.bounds)))) and not (self._locking and self._locking.is_alive())

    @property
    def parts(self) -> list[int]:
        """The bounds between blocks, at which locking pages begins anew: no copy crosses one."""
        return [begin for begin, _ in self.bounds[1:]]

    def lock(self, device: torch.device) -> None:
        """Begin to lock the pages for GPUs, in a thread, each block's when its weights have come: the host has no room
        for all of them before. Until it has, copies take longer and are right."""
        if device.type != "cuda" or self._locking is not None:
            return
        self._locking = threading.Thread(
            target=page_lock,
            args=(self.memory, self.parts, device, self._settle_anywhere),
            name="wanshim-lock",
            daemon=True,
        )
        self._locking.start()


def num_files(bounds: Sequence[tuple[int, int]]) -> int:
    """The number of files of memory that processes share, with blocks of these bounds."""
    return len(_file_sizes(bounds))


def _file_sizes(bounds: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes of each file: of so many blocks that there are at most `_FILES`."""
    begins = [begin for begin, _ in bounds[:: -(-len(bounds) // _FILES)]]
    ends = [*begins[1:], -(-bounds[-1][1] // PAGE) * PAGE + _state_bytes(bounds)]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def _state_bytes(bounds: Sequence[tuple[int, int]]) -> int:
    """Whole pages behind the blocks, with a byte for each of them."""
    return -(-len(bounds) // PAGE) * PAGE


def compute_from(
    copy: HostCopy | PageLocked | None, model: nn.Module, device: torch.device, waits: Waits | None = None
) -> Undo:
    """Let the model compute on `device` with its blocks' weights coming from the copy ahead of use.

    Args:
        copy: or the weights themselves, page-locked; None: all of the model comes to the device.
        waits: as of `Ring`.

    Returns:
        An Undo, whose `remove` gives each tensor back the memory that it had.

    Raises:
        PlacementInvalid: the weights of its blocks do not lie in the copy.
        torch.OutOfMemoryError: the device cannot hold the rest.
    """
    layouts = [] if copy is None else copy.layouts(model)
    if layouts is None or any(weight.tensor.device.type != "cpu" for layout in layouts for weight in layout.weights):
        raise PlacementInvalid(f"weights of {type(model).__name__} that lie elsewhere than in their copy on the host")
    if device.type == "cuda":  # what stays is not put among memory that a larger tensor could have
        torch.cuda.empty_cache()
    waiting = {id(weight.tensor) for layout in layouts for weight in layout.weights}
    undo = Undo()
    try:
        with torch.inference_mode(False):  # what a call in that mode sets must serve one without, too
            for tensor in tensors(model):
                if id(tensor) not in waiting:
                    undo.add(partial(setattr, tensor, "data", tensor.data))
                    tensor.data = tensor.data.to(device)
            if copy is not None:
                for at, layout in enumerate(layouts):
                    undo.add(partial(_to_rest, copy, at, layout))
                copy.lock(device)
                Ring(layouts, copy, device, SLOTS, waits).attach(find_blocks(model)[1], undo)
    except BaseException:
        undo.remove()
        raise
    if device.type == "cuda":
        undo.add(partial(torch.cuda.synchronize, device))
    return undo


def _to_rest(copy: HostCopy | PageLocked, at: int, layout: BlockWeights) -> None:
    """The block's weights lie in the copy again; those that failed to come there have never left their place."""
    if copy.settle(at):
        layout.wait()


def bytes_when_streamed(model: nn.Module) -> int | None:
    """Bytes on the device of a model that `compute_from` serves; None: it cannot be."""
    try:
        blocks = _weights(model)
    except PlacementInvalid:
        return None
    waiting = sum(map(stored_bytes, itertools.chain.from_iterable(blocks)))
    return num_bytes(model) - waiting + SLOTS * max(sum(map(room, block)) for block in blocks)


def _weights(model: nn.Module) -> list[list[torch.Tensor]]:
    """The weights of each block that can lie in host memory: dense ones, used in one place alone.

    Raises:
        PlacementInvalid: the model has no blocks, too few to take turns, or tensors that are more than their bytes.
    """
    name, blocks = find_blocks(model)
    found = [[t for _, t in block] for block in used_once(model, name, blocks, lambda t: t.numel() > 0 and is_dense(t))]
    plain = all(type(t) in (nn.Parameter, torch.Tensor) for t in tensors(model))
    if len(blocks) < SLOTS or not all(found) or not plain:
        raise PlacementInvalid(
            f"{type(model).__name__}.{name} cannot be streamed",
            expected=f"at least {SLOTS} blocks of plain tensors",
        )
    return found
