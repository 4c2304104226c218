"""State dicts of optimizers and schedules as JSON and named tensors, and back."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from wanshim.core.shared import tree
from wanshim.errors import ResumeInvalid

MOST_TEXT = 2**18  # characters of one attribute
NOT_SAVED = "Train with an optimizer and a schedule whose state is dense tensors and plain values, or without resume"


def flatten(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON, its tensors put into `tensors`.

    Raises:
        ResumeInvalid: it holds something that is neither a dense tensor nor made of numbers, strings, lists and dicts.
    """
    try:
        return tree.flatten(value, name, tensors)
    except tree.NotFlat as error:
        raise ResumeInvalid(str(error), expected=error.expected, hint=NOT_SAVED) from None


def rebuild(described: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `flatten` described, its tensors on the CPU."""
    return tree.rebuild(described, lambda place: tensors[place["tensor"]])


def restore_optimizer(
    optimizer: torch.optim.Optimizer, described: Any, tensors: Mapping[str, torch.Tensor], name: str = "optimizer"
) -> None:
    """Load a flattened `state_dict()`, and compare.

    torch casts what it loads to the parameters' dtype, and an optimizer may load it in a way of its own. If the state
    is not the saved one then, each tensor is put back where it was, at any depth, in its own dtype and on the CPU if
    it was there.

    Raises:
        ResumeInvalid: the optimizer does not give the saved state back even so.
    """
    optimizer.load_state_dict(rebuild(described, tensors))
    numbered = _parameters(optimizer)
    devices = any(parameter.device.type != "cpu" for parameter in numbered)
    with suppress(ResumeInvalid):
        check_restored(optimizer.state_dict(), described, tensors, name, devices)
        return
    placed: dict[tuple[str, torch.device], torch.Tensor] = {}
    for key, state in dict(described["dict"])["state"]["dict"]:
        owner = numbered[key] if type(key) is int and key < len(numbered) else key
        device = (numbered[0] if owner is key else owner).device
        optimizer.state[owner] = tree.rebuild(state, partial(_place, tensors, placed, device))
    check_restored(optimizer.state_dict(), described, tensors, name, devices)


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that an optimizer has of its own beside torch's, `state_dict()` leaves out and `flatten` can
    save. One that holds parameters is none: they are the model's."""
    parameters = set(map(id, _parameters(optimizer)))
    common = vars(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    found: dict[str, Any] = {}
    for name in [name for name in vars(optimizer) if name not in common]:
        tensors: dict[str, torch.Tensor] = {}
        with suppress(ResumeInvalid):
            flatten(vars(optimizer)[name], name, tensors)
            if parameters.isdisjoint(map(id, tensors.values())):
                found[name] = vars(optimizer)[name]
    return found


def _is_plain(value: Any) -> bool:
    """Whether a value is made of numbers, strings, lists and dicts."""
    tensors: dict[str, torch.Tensor] = {}
    with suppress(ResumeInvalid, RecursionError):
        flatten(value, "value", tensors)
        return not tensors
    return False


class PlainState:
    """The plain attributes of an object, of which a state has those that have changed since this was made: an output
    folder is that of the start. A state has none of them if another attribute has changed that it cannot have: a count
    or flag may be about it, as one that says that a file is open.

    Args:
        without: names of the framework's own attributes.
    """

    def __init__(self, owner: object, without: Collection[str] = ()) -> None:
        self.owner, self._without = owner, {*vars(torch.nn.Module()), *without}
        self.left: list[str] = []  # changed, and no part of what `changed` gave
        self._begin, self._others = self._contents()

    def _contents(self) -> tuple[dict[str, str], dict[str, Any]]:
        """The contents of plain attributes, and the others."""
        own = {name: value for name, value in vars(self.owner).items() if name not in self._without}
        plain = {name: content(value) for name, value in own.items() if _is_plain(value)}
        return plain, {name: value for name, value in own.items() if name not in plain}

    def changed(self) -> dict[str, Any]:
        """By name, of JSON, as short as a file's header has room for from many ranks."""
        plain, others = self._contents()
        changed = {name: text for name, text in plain.items() if text != self._begin.get(name)}
        bound = any(name not in self._others or self._others[name] is not value for name, value in others.items())
        self.left = [name for name, text in changed.items() if bound or len(text) > MOST_TEXT]
        return {name: json.loads(text) for name, text in changed.items() if name not in self.left}

    def restore(self, changed: Mapping[str, Any]) -> None:
        """Set what `changed` gave, but for a name that is something else now."""
        for name, described in changed.items():
            if _is_plain(getattr(self.owner, name, None)):
                setattr(self.owner, name, rebuild(described, {}))


def restore_attributes(optimizer: torch.optim.Optimizer, described: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set those that were saved."""
    place = partial(_place, tensors, {}, _parameters(optimizer)[0].device)
    for name, value in tree.rebuild(described, place).items():
        setattr(optimizer, name, value)


def content(value: Any) -> str:
    """A text that is the same for equal values of `flatten`."""
    tensors: dict[str, torch.Tensor] = {}
    described = json.dumps(flatten(value, "value", tensors))
    return described + "".join(sha256(_bytes(tensor).numpy()).hexdigest() for tensor in tensors.values())


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _place(
    tensors: Mapping[str, torch.Tensor],
    placed: dict[tuple[str, torch.device], torch.Tensor],
    device: torch.device,
    described: dict[str, Any],
) -> torch.Tensor:
    """A copy of a saved tensor on `device`, or on the CPU if it was there; the same one each time."""
    key = described["tensor"], torch.device("cpu") if described["cpu"] else device
    if key not in placed:
        placed[key] = tensors[key[0]].to(key[1], copy=True)
    return placed[key]


def check_restored(
    value: Any, described: Any, tensors: Mapping[str, torch.Tensor], name: str, devices: bool = False
) -> None:
    """Compare what was loaded with what was saved.

    Args:
        devices: a tensor that is on the CPU now and was not, or the reverse, is a difference.

    Raises:
        ResumeInvalid: they differ; a thing in which they do.
    """
    now: dict[str, torch.Tensor] = {}
    texts = [json.dumps(each) for each in (flatten(value, name, now), described)]
    if not devices:
        texts = [text.replace('"cpu": false', '"cpu": true') for text in texts]  # in a string the quotes are escaped
    found = None if texts[0] == texts[1] else f"the {name} has other entries"
    for place, tensor in now.items() if found is None else ():
        saved = tensors[place]
        if (tensor.dtype, tensor.shape) != (saved.dtype, saved.shape):
            found = f"{place} is {tensor.dtype} {tuple(tensor.shape)}, not {saved.dtype} {tuple(saved.shape)}"
        elif not torch.equal(_bytes(tensor), _bytes(saved)):
            found = f"{place} has other values"
    if found is not None:
        raise ResumeInvalid(f"After it was loaded, {found}", expected="the saved state, bit for bit", hint=NOT_SAVED)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
