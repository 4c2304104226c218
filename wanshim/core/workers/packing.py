"""A Python object as bytes, with the tensors and modules in it taken out, to be made again in another process.

A module packed whole is its structure: classes by name, attributes as they are, and in place of each tensor its number.
So whatever changes a model, an adapter that is injected, scaled, merged or removed, changes the bytes or the tensors.
A quantized weight, such as torchao's, is its class and the plain tensors in it, by the protocol of torch.compile
(`__tensor_flatten__`), which has all of it; one of a class that adds attributes to its elements, such as GGUF's, is
its class, those and a plain tensor. A module that torch.compile has compiled is compiled there with the same
arguments: its context, which torch can pickle, has them.
"""

from __future__ import annotations

import inspect
import io
import marshal
import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wanshim.core.shared.plain import is_optimized
from wanshim.errors import WorkersInvalid

if TYPE_CHECKING:
    from wanshim.core.streaming import HostCopy


# Pickled contexts of torch.compile: one that has compiled a graph has other bytes.
_CONTEXTS: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()
# Objects in which a copy of a function keeps nothing that the program would miss.
_UNSHARED = (nn.Module, str, int, float, bool, type(None), torch.dtype)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """All of a tensor but its elements: what is computed from it has the same bits only if its strides are the same.

    `is_weight`: a parameter or buffer, or a part of one. What else a module has may be written by its forward.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    is_parameter: bool
    requires_grad: bool
    is_weight: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, *, on_host: bool | None = None, is_weight: bool = False) -> TensorSpec:
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device.type == "cpu" if on_host is None else on_host,
            isinstance(tensor, nn.Parameter),
            tensor.requires_grad,
            is_weight,
        )

    @property
    def stored_size(self) -> list[int]:
        """The size without broadcast dimensions, which have one element in memory."""
        return [1 if stride == 0 else count for count, stride in zip(self.size, self.stride, strict=True)]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.stored_size) * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """Such a tensor, uninitialized, on the host or on `device`."""
        made = torch.empty_strided(
            self.stored_size, self.stride, dtype=self.dtype, device=torch.device("cpu") if self.on_host else device
        ).expand(self.size)
        return nn.Parameter(made, self.requires_grad) if self.is_parameter else made

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of such a tensor, on its device."""
        made = self.empty(tensor.device)
        elements(made).copy_(elements(tensor))
        return made

    def in_memory(self, copy: HostCopy, offset: int) -> torch.Tensor:
        """Such a dense tensor in memory that processes share."""
        like = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        made = copy.view(like, offset)
        return nn.Parameter(made, self.requires_grad) if self.is_parameter else made


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its broadcast dimensions: each of its elements once."""
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.size(dim)))
    return tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """The result of `pack` and argument of `unpack`, with the tensors beside it."""

    data: bytes
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """Places of tensors in memory that the processes share.

    Args:
        number: of that memory.
        offsets: of tensors, by their place in a `Packed`.
    """

    number: int
    offsets: Mapping[int, int]


def pack(
    value: Any, device: torch.device, modules: Mapping[int, nn.Module] | None = None, *, moved: bool = False
) -> tuple[Packed, list[torch.Tensor]]:
    """`value` and the tensors in it, each once.

    Args:
        device: where its tensors are, unless they are on the host.
        modules: held by the other process; in `value` they become their keys.
        moved: `value` is a module, whose parameters and buffers are for the other process's device wherever they are.

    Raises:
        WorkersInvalid: something in it cannot be copied.
    """
    buffer = io.BytesIO()
    is_module = isinstance(value, nn.Module)
    own = {id(tensor) for tensor in (*value.parameters(), *value.buffers())} if is_module else set()
    pickler = _Pickler(buffer, device, {id(module): key for key, module in (modules or {}).items()}, own)
    try:
        pickler.dump(value)
    except WorkersInvalid:
        raise
    except Exception as error:  # whatever class of it says that it cannot
        raise WorkersInvalid(
            f"{type(value).__qualname__} cannot be copied to another process: {error}",
            expected="objects of classes and functions that a module defines",
        ) from error
    specs = tuple(
        TensorSpec.of(t, on_host=False if moved and id(t) in own else None, is_weight=id(t) in own)
        for t in pickler.tensors
    )
    return Packed(buffer.getvalue(), specs), pickler.tensors


def unpack(packed: Packed, tensors: Sequence[torch.Tensor], modules: Mapping[int, nn.Module] | None = None) -> Any:
    """The value again, with these tensors."""
    return _Unpickler(packed.data, tensors, modules or {}).load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, device: torch.device, modules: Mapping[int, int], own: set[int]) -> None:
        super().__init__(buffer, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._device, self._modules, self._own = device, modules, own

    def reducer_override(self, value: Any) -> Any:
        """The way in which an object is packed; pickle asks once for each that is of no plain class of Python's."""
        if type(value) is OrderedDict:  # ten in each module, for hooks
            return NotImplemented
        if id(value) in self._modules:
            return _held, (self._modules[id(value)],)
        if isinstance(value, torch.Tensor):
            if not _is_of_class(value):
                self._check(value)
                self.tensors.append(value)
                return _tensor, (len(self.tensors) - 1,)
            parts, rest = _parts(value)
            if id(value) in self._own:
                self._own |= set(map(id, parts.values()))
            return _joined, (type(value), parts, rest, isinstance(value, nn.Parameter), value.requires_grad)
        if isinstance(value, nn.Module) and hasattr(type(value), "clear_cache"):
            value = copy(value)  # what a decode has left in a VAE is no part of it: the next one clears it first
            value.clear_cache()
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if is_optimized(value):
            return _optimized, (value._orig_mod, _context_of(value.dynamo_ctx))
        if isinstance(value, nn.Module) and value._compiled_call_impl is not None:
            make, given, state, *_ = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            context = _context_of(_variable(value._compiled_call_impl, "self"))
            return make, given, (state, context), None, None, _compiled
        if type(value) is MethodType and not isinstance(value.__self__, type):
            found = inspect.getattr_static(type(value.__self__), getattr(value.__func__, "__name__", ""), None)
            if found is not value.__func__:  # by whose name pickle would find another one, or none
                return _bound, (value.__func__, value.__self__)
        if isinstance(value, (type, FunctionType)) and value.__module__ in ("__main__", "__mp_main__"):
            raise WorkersInvalid(
                f"{value.__qualname__} is defined in the program itself, which no other process imports",
                expected="a class or function of a module",
                hint="Move it to a file of its own and import it",
            )
        if type(value) is FunctionType and "<locals>" in value.__qualname__:
            cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
            if all(isinstance(each, _UNSHARED) for each in cells):
                code = marshal.dumps(value.__code__, 2)  # the same bytes each time, as later versions have not
                return _local, (code, value.__module__, value.__name__, value.__defaults__, value.__kwdefaults__, cells)
        return NotImplemented

    def _check(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise WorkersInvalid(
                f"a tensor of class {type(tensor).__module__}.{type(tensor).__qualname__}",
                expected="plain tensors and parameters, of any dtype",
                hint="Quantized weights of this kind are not copied: generate on one GPU, or load plain weights",
            )
        if tensor.device.type != "cpu" and tensor.device != self._device:
            raise WorkersInvalid(
                f"a tensor on {tensor.device} beside others on {self._device}",
                expected=f"all tensors on {self._device}, or on the host",
            )


def _is_of_class(tensor: torch.Tensor) -> bool:
    """Whether its class is more than plain elements, and `_parts` has all of it; torch's own such classes, as DTensor,
    hold process groups."""
    cls = type(tensor)
    if cls.__module__.partition(".")[0] == "torch":
        return False
    has_elements = cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and tensor.layout is torch.strided
    return has_elements or is_traceable_wrapper_subclass(tensor)


def _parts(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    """The plain tensors of one, and what its class needs besides."""
    if not is_traceable_wrapper_subclass(tensor):
        return {"elements": torch.Tensor._make_subclass(torch.Tensor, tensor)}, dict(vars(tensor))
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, (context, tuple(tensor.shape), tensor.stride())


def _joined(
    cls: Any, parts: Mapping[str, torch.Tensor], rest: Any, is_parameter: bool, requires_grad: bool
) -> torch.Tensor:
    """A tensor of a class of its own, from what `_parts` returned."""
    if isinstance(rest, dict):
        found: torch.Tensor = torch.Tensor._make_subclass(cls, parts["elements"], requires_grad)
        vars(found).update(rest)
        return found
    made: torch.Tensor = cls.__tensor_unflatten__(parts, *rest)
    return nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


def _tensor(number: int) -> torch.Tensor:
    """Placeholder in a pickle for a tensor, by its place among those beside it."""
    raise NotImplementedError


def _held(key: int) -> nn.Module:
    """Placeholder in a pickle for a module that the other process holds, by its key."""
    raise NotImplementedError


def _bound(function: Any, owner: Any) -> MethodType:
    return MethodType(function, owner)


def _local(code: bytes, module: str, name: str, defaults: Any, by_name: Any, cells: tuple[Any, ...]) -> FunctionType:
    """A function that was made in another one, of a module that this process imports."""
    names = vars(import_module(module))
    made = FunctionType(marshal.loads(code), names, name, defaults, tuple(map(CellType, cells)))  # noqa: S302 - as below
    made.__kwdefaults__ = by_name
    return made


def _context_of(context: Any) -> bytes:
    if not type(context).__module__.startswith("torch._dynamo."):
        raise WorkersInvalid(
            "a module that is compiled in a way that this torch does not say",
            expected="torch.compile(module), module.compile() or compile_repeated_blocks()",
        )
    if context not in _CONTEXTS:
        _CONTEXTS[context] = pickle.dumps(context)
    return _CONTEXTS[context]


def _variable(function: Any, name: str) -> Any:
    """A variable of the scope in which a function was made; None if it uses none of that name."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True)).get(name)


def _optimized(module: nn.Module, context: bytes) -> Any:
    return pickle.loads(context)(module)  # noqa: S301 - from the process that started this one


def _compiled(module: nn.Module, state: tuple[dict[str, Any], bytes]) -> None:
    """Set a module's state, and compile it as the original."""
    values, context = state
    module.__setstate__(values)
    module._compiled_call_impl = pickle.loads(context)(module._call_impl)  # noqa: S301 - likewise


class _Unpickler(pickle.Unpickler):
    """Makes objects whose `_tensor` and `_held` are those that it is given."""

    def __init__(self, data: bytes, tensors: Sequence[torch.Tensor], modules: Mapping[int, nn.Module]) -> None:
        super().__init__(io.BytesIO(data))
        self._given = {"_tensor": tensors.__getitem__, "_held": modules.__getitem__}

    def find_class(self, module: str, name: str) -> Any:
        return self._given[name] if module == __name__ and name in self._given else super().find_class(module, name)
