"""Put a plan into effect on a living model, and take it back.

Method: layer split with a bridge at the stage boundaries, as in modelscope/DiffSynth-Studio#1436, with three
differences: inputs shared by all blocks cross once, the output of a stage crosses where it is made, and the
model itself keeps its devices whoever calls `.to` on it or on a parent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from wanshim.core.model_split.bridge import Bridge
from wanshim.core.model_split.draws import Draws
from wanshim.core.model_split.pin import pin
from wanshim.core.model_split.plan import SplitPlan, plan_split
from wanshim.core.model_split.quantize import quantize_base
from wanshim.core.shared.copies import detached_copy
from wanshim.core.shared.weight_bytes import base_dtypes, num_bytes, own_tensors, tensors
from wanshim.errors import PlacementInvalid
from wanshim.undo import Undo

log = logging.getLogger("wanshim")

ATTRIBUTE = "_wanshim_split"


@dataclass(frozen=True)
class Companion:
    """A module that works with a block although it is not in it: in its stead (`after=False`), or on its output."""

    module: nn.Module
    block: int
    after: bool


class SplitHandle:
    """A split that stands. `plan` says what lies where; `remove()` takes it back."""

    def __init__(self, model: nn.Module, plan: SplitPlan) -> None:
        self.model = model
        self.plan = plan
        self.draws = Draws(torch.device(plan.home))
        # what runs one after the other: the stage, and the modules of which one is called
        self.units: list[tuple[int, list[nn.Module]]] = []
        # every module and the device it was given
        self.placed: list[tuple[nn.Module, torch.device]] = []
        # what takes back hooks and attributes, those of others that build on the split too
        self.attached: list[Undo] = []
        self.undo = self.attach(Undo())
        self._moved: list[tuple[nn.Module, torch.device]] = []  # modules, and where their own tensors came from

    def attach(self, undo: Undo) -> Undo:
        """Count `undo` among what a copy of the model is made without."""
        self.attached.append(undo)
        return undo

    def copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """A deep copy of the model or of a satellite as `remove()` would leave it: weights on the devices they came
        from."""
        origins = [(t, device) for m, device in self._moved for _, t in own_tensors(m) if t.device != device]
        return detached_copy(module, memo, reversed(self.attached), [m for m, _ in self.placed], origins)

    def move(self, module: nn.Module, device: torch.device) -> None:
        """Move the module's own parameters and buffers, until the split is removed."""
        origins = {t.device for _, t in own_tensors(module)}
        if not origins or origins == {device}:
            return
        if len(origins) == 1:
            self._moved.append((module, next(iter(origins))))
        _move_own(module, device)

    def device_behind(self, block: int) -> torch.device:
        """The device of a block's output when the caller gets it."""
        later = [stage for stage, _ in self.units[block + 1 :]]
        return torch.device(self.plan.devices[later[0]] if later else self.plan.home)

    def bring_outputs(self, module: nn.Module, blocks: Sequence[int]) -> None:
        """The outputs of `module`, a sequence, are added to the outputs of these blocks: each is brought there."""
        bridges = [Bridge(self.device_behind(block)) for block in blocks]

        def bring(module: nn.Module, args: Any, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [bridge.cross(output) for bridge, output in zip(bridges, outputs, strict=True)]

        self.undo.add(module.register_forward_hook(bring).remove)

    def remove(self) -> None:
        """Unhook the model and bring its weights back to where they came from. Safe to call twice."""
        try:
            self.undo.remove()
        finally:
            while self._moved:
                _move_own(*self._moved.pop())


def split_of(model: nn.Module) -> SplitHandle | None:
    """The handle of a model that is split, else None."""
    handle: SplitHandle | None = getattr(model, ATTRIBUTE, None)
    return handle if handle is not None and handle.undo else None


def split_model(
    model: nn.Module,
    devices: Sequence[str | torch.device],
    split_at: int | Sequence[int] | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
    exits: Sequence[str] = (),
    companions: Sequence[Companion] = (),
    satellites: Sequence[nn.Module] = (),
    reason: str | None = None,
    base: str | None = None,
) -> SplitHandle:
    """Split `model` by its list of blocks over `devices`, in this process.

    Parameters keep their identity, so an optimizer made before goes on to work; adapters inside a block
    (LoRA) go with it. Modules outside the blocks go to the first device, but for the exits, and the output
    of the last block or exit returns there. Afterwards no `.to`, `.cuda` or `.cpu` of the model or of a parent
    moves it; dtype
    changes still apply. `hf_device_map` keeps accelerate from placing it.

    Copies of the model by `copy.deepcopy`, pickle or `torch.save` are not split; their weights lie on the devices
    they came from. Pickling needs memory for one such copy; `state_dict()` does not.

    Args:
        model: called as before; its blocks are called one after the other with tensors of any device.
        devices: one a stage, all of one kind, such as `("cuda:0", "cuda:1")`. A device may repeat; with another
            between, trained inputs that all blocks share get a gradient summed in another order.
        split_at: the first block of the second stage, or of each stage after the first. Default: by bytes.
        blocks: attribute path of the `ModuleList`, or paths of several that run one after the other, whatever
            each takes and returns; their blocks count on through them. Default: the largest one in the model.
        exits: attribute paths of modules that take the last block's output, such as `head`; one of them is
            called. They stay with the last block, so that what returns is small. Paths that lead nowhere
            are passed over.
        companions: modules that go with a block; their inputs are brought to them.
        satellites: other models that work with this one. They go to the first device, but for companions in
            them, and stay there like the model.
        reason: for the plan, where the split points come from.
        base: quantise the blocks' frozen Linear weights first, `float8` or `int8` (see `quantize_base`), layer by
            layer on the first device; what arrives on a device is quantised. They stay so after `remove()`.

    Raises:
        PlacementInvalid: the model is split already, has no list of blocks, or plan and devices do not fit.
            The model is as it was before.
        torch.OutOfMemoryError: a stage does not fit its device; the weights are back where they were.
    """
    if split_of(model) is not None:
        raise PlacementInvalid(
            f"{type(model).__name__} is split already: {split_of(model).plan}",  # type: ignore[union-attr]
            hint="Call remove() on its handle first",
        )
    names, block_list = _blocks_of(model, blocks)
    targets = check_devices(devices, model)
    points = [split_at] if isinstance(split_at, int) else split_at
    modules = dict(model.named_modules())
    exit_paths = [path for path in exits if path in modules]
    sizes = [num_bytes(block) for block in block_list]
    sizes[-1] += sum(num_bytes(modules[path]) for path in exit_paths)
    for companion in companions:
        sizes[companion.block] += num_bytes(companion.module)
    plan = plan_split(
        sizes,
        sum(map(num_bytes, (model, *satellites))) - sum(sizes),
        [str(device) for device in targets],
        split_at=points,
        reason=reason,
    )
    plan = replace(plan, base=base_dtypes(block_list))
    handle = SplitHandle(model, plan)
    handle.units = [(i, [b]) for i, stage in enumerate(plan.stages) for b in block_list[stage.first : stage.last]]
    if exit_paths:
        handle.units.append((len(plan.stages) - 1, [modules[path] for path in exit_paths]))
    homes = {id(block): torch.device(plan.device_of(i)) for i, block in enumerate(block_list)}
    homes |= {id(modules[path]): targets[-1] for path in exit_paths}
    homes |= {id(c.module): homes[id(block_list[c.block])] for c in companions if not c.after}
    homes |= {id(c.module): handle.device_behind(c.block) for c in companions if c.after}
    _check_no_tensor_in_two_places((model, *satellites), homes, targets[0])
    if base is not None:  # all is checked; what follows plans with the bytes that are left
        layers = quantize_base(block_list, base, compute_device=targets[0])
        log.info("wanshim: %d Linear layers quantised to %s", layers, base)
        return split_model(
            model, devices, split_at, blocks=blocks, exits=exits, companions=companions, satellites=satellites,
            reason=reason,
        )  # fmt: skip
    handle.placed = [found[1:] for root in (model, *satellites) for found in _walk(root, homes, targets[0])]
    try:
        for module, device in handle.placed:
            handle.move(module, device)
    except BaseException:
        handle.remove()
        raise
    bridges = _connect(handle)
    for companion in companions:  # they take turns with the blocks: what both are given crosses once
        before = bridges[str(homes[id(companion.module)])].before
        handle.undo.add(companion.module.register_forward_pre_hook(before, with_kwargs=True).remove)
    _pin(model, names, exit_paths, handle)
    for satellite in satellites:
        pin(satellite, handle.undo, handle.copy)
    return handle


def find_blocks(model: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """The list of blocks of a model, by attribute path or the one that holds most bytes.

    Raises:
        PlacementInvalid: there is none, or `path` leads to something else.
    """
    if path is not None:
        found = dict(model.named_modules()).get(path)
        if not isinstance(found, nn.ModuleList):
            raise PlacementInvalid(f"{type(model).__name__}.{path} is {type(found).__name__}", expected="a ModuleList")
        return path, found
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not lists:
        raise PlacementInvalid(
            f"{type(model).__name__} has no ModuleList of two or more blocks", expected="a model with a list of blocks"
        )
    return max(lists, key=lambda item: num_bytes(item[1]))


def _blocks_of(model: nn.Module, paths: str | Sequence[str] | None) -> tuple[list[str], list[nn.Module]]:
    """All blocks in the order of execution, and the attribute path of each."""
    wanted = [paths] if paths is None or isinstance(paths, str) else paths
    found = [
        (f"{path}.{i}", block)
        for path, blocks in (find_blocks(model, p) for p in wanted)
        for i, block in enumerate(blocks)
    ]
    return [name for name, _ in found], [block for _, block in found]


def check_devices(devices: Sequence[str | torch.device], model: nn.Module | None = None) -> list[torch.device]:
    """The devices, if `model` can be split over them.

    Raises:
        PlacementInvalid: a name that is no device, a GPU that is not there, or devices of several kinds.
    """
    targets = []
    for name in devices:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            raise PlacementInvalid(f"device {name!r}", expected="a torch device such as cuda:0 or cpu") from None
        if device.type == "cuda" and device.index is None:
            raise PlacementInvalid(f"device {name!r}", expected="one with an index, such as cuda:0")
        if device.type == "cuda" and device.index >= torch.cuda.device_count() and not _is_fake(model):
            raise PlacementInvalid(
                f"device {name!r} does not exist: this machine shows {torch.cuda.device_count()} CUDA devices",
                topic="existing_devices",
            )
        targets.append(device)
    if len({device.type for device in targets}) > 1:
        raise PlacementInvalid(f"devices {', '.join(map(str, devices))}", expected="devices of one kind")
    return targets


def _is_fake(model: nn.Module | None) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return model is not None and any(isinstance(t, FakeTensor) for t in tensors(model))


def _check_no_tensor_in_two_places(
    roots: Sequence[nn.Module], homes: Mapping[int, torch.device], home: torch.device
) -> None:
    """A parameter tied between two stages cannot lie on both."""
    seen: dict[int, tuple[str, torch.device]] = {}
    for path, module, device in (found for root in roots for found in _walk(root, homes, home)):
        for name, tensor in own_tensors(module):
            full = f"{path}.{name}".lstrip(".")
            other, place = seen.setdefault(id(tensor), (full, device))
            if place != device:
                raise PlacementInvalid(
                    f"{other} and {full} are one tensor but belong to stages on {place} and {device}",
                    hint="Choose split points that keep both on one device",
                )


def _walk(
    module: nn.Module, homes: Mapping[int, torch.device], device: torch.device, path: str = ""
) -> Iterator[tuple[str, nn.Module, torch.device]]:
    """Every module with its path and the device it goes to: a block's own from the block down."""
    device = homes.get(id(module), device)
    yield path, module, device
    for name, child in module.named_children():
        yield from _walk(child, homes, device, f"{path}.{name}".lstrip("."))


def _move_own(module: nn.Module, device: torch.device) -> None:
    """Tensor subclasses move as torch moves them."""
    nn.Module._apply(module, lambda t: t.to(device), recurse=False)


def _connect(handle: SplitHandle) -> dict[str, Bridge]:
    """Hook every block. Returns the bridge onto each device."""
    plan = handle.plan
    places = [*plan.devices, plan.home]  # of each stage, and where the last one's output goes
    bridges: dict[str, Bridge] = {}
    for device in plan.devices:
        if device not in bridges:
            bridges[device] = Bridge(torch.device(device), via=next(reversed(bridges.values()), None))
    for i, (stage, modules) in enumerate(handle.units):
        last = i + 1 == len(handle.units) or handle.units[i + 1][0] != stage
        for module in modules:
            before = bridges[places[stage]].before
            handle.undo.add(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            if last:
                leave = partial(_leave, torch.device(places[stage]), bridges[places[stage + 1]], handle.draws)
                handle.undo.add(module.register_forward_hook(leave).remove)
    return bridges


def _leave(stage: torch.device, bridge: Bridge, draws: Draws, module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of the block before a boundary: its output leaves for the next device, and draws go on there.

    Inside that block's checkpoint, so what the next block's checkpoint keeps lies on its own device.
    """
    draws.carry(stage, bridge.device)
    return bridge.cross(output)


def _pin(model: nn.Module, names: Sequence[str], exits: Sequence[str], handle: SplitHandle) -> None:
    """Make the model keep its devices: against `.to` of anyone, and for accelerate's `prepare`."""
    plan = handle.plan
    device_map: dict[str, str] = dict.fromkeys(exits, plan.devices[-1])
    device_map |= {names[i]: stage.device for stage in plan.stages for i in range(stage.first, stage.last)}
    device_map[""] = plan.home
    handle.undo.set(model, {"hf_device_map": device_map, ATTRIBUTE: handle})
    pin(model, handle.undo, handle.copy)
