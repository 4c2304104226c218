"""Inputs and results of a call by content: what they are as text, what was drawn at random, and as named tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from wanshim.core.encoding.identity import value_identity
from wanshim.core.sequence.random_state import generator_state
from wanshim.core.shared.fallback import Fallback
from wanshim.core.shared.host_memory import pinned
from wanshim.core.shared.tree import NotFlat, flatten, rebuild
from wanshim.errors import WanshimError

_READERS = 8  # frames of a video that are read at once
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
# What a withheld tensor says of itself without being read.
_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad")
_METHODS = ("size", "dim", "numel", "stride", "is_floating_point")
_METADATA = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES} | {getattr(torch.Tensor, n) for n in _METHODS}


class WithheldRead(Exception):
    """A withheld tensor was read."""


class Withheld(torch.Tensor):
    """A stand-in for a tensor that was drawn at random: it has its shape, and whoever reads it gets `WithheldRead`.

    A call that does not read it has the same results whatever was drawn.
    """

    is_read: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Withheld:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Withheld, tensor.size(), strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        made.is_read = False
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Withheld):
                leaf.is_read = True
        raise WithheldRead(str(func))


def draw_states(device: torch.device) -> tuple[Any, ...]:
    """The states that this process draws from at random, to compare."""
    states = [torch.get_rng_state(), generator_state(device)]
    drawn: list[Any] = [random.getstate(), *(state.numpy().tobytes() for state in states)]
    if (numpy := sys.modules.get("numpy")) is not None:  # nobody has drawn from what nobody imported
        name, keys, *rest = numpy.random.get_state()
        drawn += [name, keys.tobytes(), *rest]
    return tuple(drawn)


def content(value: Any, withheld: Mapping[int, str] = {}) -> str:
    """A text that is another for any other value, bit for bit.

    Args:
        withheld: ids of tensors that count by their shape alone.

    Raises:
        Fallback: a value has no exact form.
    """
    if isinstance(value, _PLAIN) and type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, id(value) in withheld)
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({','.join(_of_items(value, withheld))})"
    if type(value) is dict:
        parts = (f"{content(key)}:{content(item, withheld)}" for key, item in value.items())
        return f"dict({','.join(parts)})"
    if _is_image(value):
        return _of_image(value)
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and not value.dtype.hasobject:
        return f"array {value.dtype} {value.shape} {sha256(value.tobytes()).hexdigest()}"
    try:
        return value_identity(value, lambda tensor: _of_tensor(tensor, False))
    except WanshimError as error:
        raise Fallback(error.found) from None


def _of_tensor(tensor: torch.Tensor, by_shape: bool) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise Fallback(f"a {type(tensor).__name__} has no exact form")
    shape = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device.type}"
    if by_shape:
        return f"withheld {shape}"
    flat = tensor.detach().cpu().contiguous().view(-1)
    return f"tensor {shape} {sha256(flat.view(torch.uint8).numpy() if flat.numel() else b'').hexdigest()}"


def _of_items(items: Sequence[Any], withheld: Mapping[int, str]) -> list[str]:
    if len(items) > 1 and all(map(_is_image, items)):
        with ThreadPoolExecutor(_READERS) as readers:  # a video: hashing releases the interpreter's lock
            return list(readers.map(_of_image, items))
    return [content(item, withheld) for item in items]


def _is_image(value: Any) -> bool:
    """Whether it is an image of PIL's, which is not imported for that."""
    return hasattr(value, "tobytes") and hasattr(value, "getpalette")


def _of_image(image: Any) -> str:
    palette = image.getpalette() if image.mode == "P" else None
    return f"image {image.mode} {image.size} {palette} {sha256(image.tobytes()).hexdigest()}"


def packed(outputs: Any, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The results of a call as JSON and named tensors. A result that is an input itself counts as that input.

    Raises:
        Fallback: they cannot be made again from that.
    """
    if type(outputs) is not dict or not all(isinstance(name, str) for name in outputs):
        raise Fallback("its result is no dict of names")
    places = {id(value): name for name, value in inputs.items() if value is not None}
    tensors: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    seen: dict[int, str] = {}  # a tensor may have two names, as a pipeline's latents
    try:
        for name, value in outputs.items():
            if id(value) in places and not isinstance(value, (bool, int, float, str)):
                described[name] = {"input": places[id(value)]}
            else:
                described[name] = {"value": flatten(value, name, tensors, partial(_pixels, tensors), seen)}
    except NotFlat as error:
        raise Fallback(f"its result {error}, which is not {error.expected}") from None
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    memory += {item.untyped_storage().data_ptr() for item in inputs.values() if type(item) is torch.Tensor}
    memory = [place for place in memory if place]  # an empty tensor has none
    if len(set(memory)) < len(memory):
        raise Fallback("its results share memory")
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise Fallback(f"its result {name} has a gradient")
        if _overlaps(tensor):
            raise Fallback(f"its result {name} overlaps itself in memory")
    strides = {name: list(tensor.stride()) for name, tensor in tensors.items()}
    return {"outputs": described, "strides": strides}, tensors


def unpacked(
    described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """The results of `packed`; tensors that were not on the CPU come to `device`, in the strides that they had."""
    made: dict[str, torch.Tensor] = {}

    def tensor_of(place: dict[str, Any]) -> Any:
        name = place["tensor"]
        if "image" in place:
            return _image(tensors[name], *place["image"])
        if name not in made:
            found = tensors[name] if place["cpu"] else _sent(tensors[name], device)
            stride = tuple(described["strides"][name])
            if stride != found.stride():
                found = torch.empty_strided(found.size(), stride, dtype=found.dtype, device=found.device).copy_(found)
            made[name] = found
        return made[name]

    return {
        name: inputs[entry["input"]] if "input" in entry else rebuild(entry["value"], tensor_of)
        for name, entry in described["outputs"].items()
    }


def _pixels(tensors: dict[str, torch.Tensor], name: str, value: Any) -> dict[str, Any]:
    """The place of an image among the tensors, as `flatten` has those of tensors.

    Raises:
        NotFlat: it is none that its mode, size and pixels make again.
    """
    if _is_image(value):
        made_of = [value.mode, list(value.size)]
        with suppress(ValueError):  # of no pixels, or of a mode that has more
            pixels = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
            if _of_image(_image(pixels, *made_of)) == _of_image(value):
                while name in tensors:  # of a key with a dot, as in `flatten`
                    name += "'"
                tensors[name] = pixels
                return {"tensor": name, "cpu": True, "image": made_of}
    raise NotFlat(name, value)


def _image(pixels: torch.Tensor, mode: str, size: Sequence[int]) -> Any:
    from PIL import Image  # where an image has come from

    return Image.frombytes(mode, tuple(size), pixels.numpy().tobytes())


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on its way to a device: the GPU still computes the step before, and a copy out of memory that is not
    page-locked would wait for that."""
    if device.type != "cuda":
        return tensor.to(device)
    return pinned(tensor).copy_(tensor).to(device, non_blocking=True)


def _overlaps(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value's containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
