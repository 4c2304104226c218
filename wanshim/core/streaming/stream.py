"""Let part of a living model's frozen weights wait on the host, and take it back."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from wanshim.core.model_split.split import find_blocks, split_of
from wanshim.core.ranks.group import Group
from wanshim.core.shared.copies import detached_copy, set_copier
from wanshim.core.shared.gpu_memory import indexed
from wanshim.core.shared.host_memory import THREADS, page_lock
from wanshim.core.shared.weight_bytes import num_bytes, own_tensors, tensors
from wanshim.core.streaming.block_weights import BlockWeights, Weight, bounds_of, can_wait, room, used_once
from wanshim.core.streaming.host_copy import HostCopy
from wanshim.core.streaming.plan import SLOTS, StreamPlan, plan_stream
from wanshim.core.streaming.ring import Ring
from wanshim.core.streaming.shared_memory import Shared, allocate
from wanshim.errors import PlacementInvalid, WanshimError
from wanshim.undo import Undo

ATTRIBUTE = "_wanshim_stream"
_CALL = "stream_model"


class Laps:
    """Seconds from one step to the next."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what], self._since = now - self._since, now


@dataclass(eq=False)
class StreamHandle:
    """Streaming that stands. `plan` says what lies where; `remove()` takes it back."""

    model: nn.Module
    plan: StreamPlan
    ring: Ring
    seconds: Mapping[str, float]  # what setting it up took, step by step
    _attached: Undo  # takes back hooks and attributes
    _origins: Mapping[torch.Tensor, torch.device]  # where the tensors came from
    _undo: Undo  # brings them back

    def copy(self, model: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """A deep copy of the model as `remove()` would leave it, its weights on the devices they came from."""
        self.ring.release()
        return detached_copy(model, memo, [self._attached], list(model.modules()), self._origins.items())

    @property
    def waiting(self) -> list[str]:
        """Names, in the model, of the tensors that wait on the host: what DDP must leave alone."""
        return [weight.path for block in self.ring.blocks for weight in block.weights]

    def remove(self) -> None:
        """Unhook the model; the weights that waited become tensors of this process's own. Safe to call twice."""
        try:
            self._attached.remove()
        finally:
            self._undo.remove()


def stream_of(model: nn.Module) -> StreamHandle | None:
    """The handle of a model that is streamed, else None."""
    handle: StreamHandle | None = getattr(model, ATTRIBUTE, None)
    return handle if handle is not None and handle._attached else None


def stream_model(
    model: nn.Module,
    device: str | torch.device,
    *,
    count: int | None = None,
    budget: int | None = None,
    blocks: str | None = None,
    slots: int = SLOTS,
    host: Group | None = None,
) -> StreamHandle:
    """Keep `model` on `device` but for frozen weights of some blocks, which come from host memory ahead of use.

    Parameters keep their identity; trainable ones (LoRA) stay on the device. Loss and gradients are those of
    the model wholly on the device, bit for bit. Each streamed block must be checkpointed by itself when it
    trains. `state_dict()` is whole at any time. No `.to` moves the waiting weights afterwards.

    Copies of the model by `copy.deepcopy`, pickle or `torch.save` are not streamed; their weights lie on the devices
    they came from. To write to weights that wait, as a merge of the adapters does, move the model to the CPU first.

    Args:
        model: wholly on the host, or on the device if it fits there. Its blocks are called in order.
        count: how many blocks wait, spread evenly; default: half.
        budget: in place of it, bytes of weights the device may hold.
        blocks: attribute path of the `ModuleList`; default: the largest one.
        slots: how many streamed blocks have room on the device at a time, at least 2.
        host: the ranks of this machine, which all call this in the same order and share one copy; None: this one.

    Raises:
        PlacementInvalid: the model is split or streamed already, has nothing to stream, or the plan does not fit.
        HostMemoryInvalid: the host has not that much memory to share.
        RanksFailed: another rank of the host failed, or did not come.
        WanshimError: this rank loaded other weights than the first one, or cannot reach its memory.
        torch.OutOfMemoryError: the device cannot hold it. In each case the model is as it was before.
    """
    target = indexed(device)
    _check(model, slots)
    name, block_list = find_blocks(model, blocks)
    found = _waiting(model, name, block_list)
    sizes = _sizes(found)
    rest = num_bytes(model) - sum(sizes)
    plan = plan_stream(sizes, rest, str(target), count=count, budget=budget, slots=slots)
    bounds = bounds_of(sizes[number] for number in plan.streamed)
    undo, attached = Undo(), Undo()
    origins = {tensor: tensor.device for tensor in tensors(model)}
    laps = Laps()
    shared: Shared | None = None
    try:
        shared = allocate(bounds[-1][1], host or Group(), _CALL)
        copy = HostCopy(shared.memory, bounds)
        layouts = [copy.places(number, found[number], at) for at, number in enumerate(plan.streamed)]
        laps.end("memory shared")
        if target.type == "cuda":
            undo.add(page_lock(copy.memory, copy.parts, target))
        laps.end("page-locked")
        _hand_over(layouts, shared, undo)
        laps.end("weights written and compared")
        _guard_moves(model, layouts, attached)
        _move(model, target, undo)
        ring = Ring(layouts, copy, target, slots)
        laps.end("the rest moved")
    except BaseException as error:
        if shared is not None:
            shared.abandon(error)
        attached.remove()
        undo.remove()
        raise
    undo.add(partial(_come_to_rest, ring))
    handle = StreamHandle(model, plan, ring, laps.seconds, attached, origins, undo)
    _connect(handle, block_list)
    return handle


def streamable_bytes(model: nn.Module, blocks: str | None = None) -> tuple[int, ...]:
    """Bytes of each block that can wait in host memory.

    Raises:
        PlacementInvalid: no block has any.
    """
    return tuple(_sizes(_waiting(model, *find_blocks(model, blocks))))


def _sizes(found: list[list[tuple[str, torch.Tensor]]]) -> list[int]:
    return [sum(room(tensor) for _, tensor in block) for block in found]


def _check(model: nn.Module, slots: int) -> None:
    if slots < 2:
        raise PlacementInvalid(f"{slots} slots", expected="at least 2: one at work, one on its way")
    if split_of(model) is not None or stream_of(model) is not None:
        raise PlacementInvalid(
            f"{type(model).__name__} is {'split' if split_of(model) is not None else 'streamed'} already",
            hint="Call remove() on its handle first",
        )


def _waiting(model: nn.Module, name: str, blocks: nn.ModuleList) -> list[list[tuple[str, torch.Tensor]]]:
    """The weights of each block that can wait: frozen, plain, and used in one place only."""
    found = used_once(model, name, blocks, can_wait)
    if not any(found):
        raise PlacementInvalid(
            f"no block of {type(model).__name__}.{name} has a frozen weight that could be streamed",
            expected="a frozen base of plain tensors with trainable adapters",
            hint="Full training and quantised bases are not streamed",
        )
    return found


def _hand_over(layouts: list[BlockWeights], shared: Shared, undo: Undo) -> None:
    """The weights move into the shared memory: written by the rank that leads, compared by the others."""
    weights = [weight for layout in layouts for weight in layout.weights]
    if shared.leads:
        for weight in weights:
            weight.place.copy_(weight.tensor.detach())
    shared.meet()
    if not shared.leads:
        _compare(weights)
    shared.meet()
    for layout in layouts:
        undo.add(partial(_own_again, layout, [weight.tensor.device for weight in layout.weights]))
        layout.wait()


def _compare(weights: Sequence[Weight]) -> None:
    """Compare the weights where they are: over the link from locked pages it is faster than here.

    Raises:
        WanshimError: a weight of this rank is not the shared one.
    """

    def is_shared(weight: Weight) -> bool:
        own = weight.tensor.detach()
        return torch.equal(weight.place.to(own.device), own)

    with ThreadPoolExecutor(THREADS) as pool:
        alike = list(pool.map(is_shared, weights))
    if not all(alike):
        raise WanshimError(
            f"{weights[alike.index(False)].path} is not what the first rank of this host has",
            expected="the same base model on every rank, since they share one copy of its frozen weights",
            hint="Give every rank the same checkpoint files",
        )


def _own_again(layout: BlockWeights, origins: list[torch.device]) -> None:
    for weight, device in zip(layout.weights, origins, strict=True):
        weight.tensor.data = weight.place.to(device, copy=True)


def _move(model: nn.Module, target: torch.device, undo: Undo) -> None:
    """Everything but what waits goes to the device."""
    for module in model.modules():
        own = [t for _, t in own_tensors(module)]
        origins = {t.device for t in own} - {target}
        if not origins:
            continue
        undo.add(partial(_put_back, [(t, t.device) for t in own]))
        module._apply(lambda t: t.to(target), recurse=False)


def _put_back(tensors: list[tuple[torch.Tensor, torch.device]]) -> None:
    for tensor, device in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def _guard_moves(model: nn.Module, layouts: Sequence[BlockWeights], undo: Undo) -> None:
    """A module that owns waiting tensors applies nothing to them: `.to(device)` moves the rest."""
    waiting = {id(weight.tensor) for layout in layouts for weight in layout.weights}
    for owner in model.modules():
        if own := {name for name, tensor in own_tensors(owner) if id(tensor) in waiting}:
            undo.set(owner, {"_apply": types.MethodType(partial(_apply_to_the_rest, own), owner)})


def _apply_to_the_rest(
    waiting: set[str], self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    whole = (dict(self._parameters), dict(self._buffers))
    _check_dtype(whole, waiting, fn)
    rests = [{name: t for name, t in tensors.items() if name not in waiting} for tensors in whole]
    self._parameters, self._buffers = rests
    try:
        return type(self)._apply(self, fn, *args, **kwargs)
    finally:
        self._parameters = {name: self._parameters.get(name, t) for name, t in whole[0].items()}
        self._buffers = {name: self._buffers.get(name, t) for name, t in whole[1].items()}


def _apply_at_rest(
    ring: Ring, self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    ring.release()  # a model on the CPU has no weight in a slot
    return type(self)._apply(self, fn, *args, **kwargs)


def _check_dtype(
    whole: tuple[Mapping[str, torch.Tensor | None], ...],
    waiting: set[str],
    fn: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    dtypes = {t.dtype for tensors in whole for name, t in tensors.items() if name in waiting and t is not None}
    for dtype in dtypes:
        turned = fn(torch.empty(1, dtype=dtype)).dtype
        if turned != dtype:
            raise WanshimError(
                f"weights that wait on the host were to become {turned}",
                expected=f"{dtype}, as they were when the streaming began",
                hint="Convert the model first, then stream it",
            )


def _connect(handle: StreamHandle, blocks: nn.ModuleList) -> None:
    ring = handle.ring
    ring.attach(blocks, handle._attached)
    model = handle.model
    whole = model.register_state_dict_pre_hook(lambda *_: ring.release())
    handle._attached.add(whole.remove)
    handle._attached.set(model, {"_apply": types.MethodType(partial(_apply_at_rest, ring), model)})
    refuse = model.register_load_state_dict_pre_hook(partial(_refuse_loading, set(handle.waiting)))
    handle._attached.add(refuse.remove)
    handle._attached.set(model, {ATTRIBUTE: handle})
    set_copier(model, handle.copy, handle._attached)


def _come_to_rest(ring: Ring) -> None:
    if ring.device.type == "cuda":
        torch.cuda.synchronize(ring.device)
    ring.release()


def _refuse_loading(
    waiting: set[str], module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any
) -> None:
    refused = next((name for name in state_dict if name.removeprefix(prefix) in waiting), None)
    if refused is not None:
        raise WanshimError(
            f"{refused} was to be loaded into a model whose weights are streamed and shared between ranks",
            hint="Load it first, then stream the model; adapters can be loaded at any time",
        )
