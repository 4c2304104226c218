"""The identity of a function as text: two functions of one identity compute the same from the same arguments.

A function is more than its instructions: what it closes over, its defaults, the object it is bound to and the data
attributes of that object's class decide too. What it finds by a global name, other methods of its class among them,
counts by that name alone; the versions in the request stand for the packages.
"""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import types
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import torch

from wanshim.errors import WanshimError

_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)
_NAMED = (type, types.ModuleType, types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType)


def code_identity(function: Callable[..., Any]) -> str:
    """Name and content of a function, so that an edited one gets another key.

    Raises:
        WanshimError: it is no Python function or method, or it depends on a value that has no exact form.
    """
    if not isinstance(getattr(function, "__code__", None), types.CodeType):
        raise _unnamed(_name(function), "is no Python function")
    return _identity(function, _name(function))


def value_identity(value: object, of_tensor: Callable[[torch.Tensor], str] | None = None) -> str:
    """Kind and content of any other value, such as a framework's settings.

    Args:
        of_tensor: the content of a tensor in it; None: a tensor has no exact form.

    Raises:
        WanshimError: it depends on a value that has no exact form.
    """
    return _identity(value, _name(type(value)), of_tensor)


def class_code(cls: type) -> str:
    """The code of a class's methods and of its bases', those of torch and Python left out: a patched one differs."""
    parts = []
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, value in sorted(vars(base).items(), key=itemgetter(0)):
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(found := getattr(value, "__code__", None), types.CodeType):
                parts.append(f"{_name(base)}.{name} {_code(found)}")
    return f"{_name(cls)}#{hashlib.sha256(_joined(parts).encode()).hexdigest()[:16]}"


def own_code(value: object) -> list[str]:
    """The functions that an object has in place of its class's, with their code; what wraps the class's own is none."""
    found = []
    for name, function in sorted(vars(value).items(), key=itemgetter(0)):
        if name.startswith("_") or not isinstance(function, (types.FunctionType, types.MethodType)):
            continue
        code = inspect.unwrap(function).__code__
        if code is not getattr(getattr(type(value), name, None), "__code__", None):
            found.append(f"{name} {_code(code)}")
    return found


def _identity(value: object, name: str, of_tensor: Callable[[torch.Tensor], str] | None = None) -> str:
    return f"{name}#{hashlib.sha256(_Description(name, of_tensor).of(value).encode()).hexdigest()[:16]}"


class _Description:
    """Describes values of one function. A value that holds itself is named by its number the second time."""

    def __init__(self, function: str, of_tensor: Callable[[torch.Tensor], str] | None = None) -> None:
        self._function, self._of_tensor = function, of_tensor
        self._met: dict[int, object] = {}  # holds them, so that no other object gets the same id meanwhile

    def of(self, value: Any) -> str:
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, _NAMED) and not _is_bound(value):
            return f"{type(value).__name__} {_name(value)}"
        if id(value) in self._met:
            return f"again {list(self._met).index(id(value))}"
        self._met[id(value)] = value
        return f"{_name(type(value))}({self._content(value)})"

    def _content(self, value: Any) -> str:
        if isinstance(value, types.FunctionType):
            cells = [self._cell(cell) for cell in value.__closure__ or ()]
            own = [self.of(part) for part in (value.__defaults__, value.__kwdefaults__)]
            return _joined([_name(value), _code(value.__code__), *own, *cells])
        if isinstance(value, types.MethodType):
            owner = value.__self__
            return _joined(map(self.of, (value.__func__, owner, *_class_data(owner))))
        if isinstance(value, types.BuiltinMethodType):
            return _joined([_name(value), self.of(value.__self__)])
        if type(value) in (tuple, list):
            return _joined(map(self.of, value))
        if type(value) in (set, frozenset):  # the order differs from process to process
            return _joined(sorted(map(self.of, value)))
        if type(value) is dict:
            return _joined(self.of(part) for item in value.items() for part in item)
        return self._made(value)

    def _made(self, value: Any) -> str:
        """Any other object by what pickle would make it from; nothing is pickled."""
        try:
            if isinstance(value, torch.Tensor):
                if self._of_tensor is not None:
                    return self._of_tensor(value)
                raise TypeError("its values are not read")
            reduce = copyreg.dispatch_table.get(type(value))
            made = reduce(value) if reduce else value.__reduce_ex__(2)
        except Exception as error:
            reason = f"depends on a {_name(type(value))}, which has no exact form ({error})"
            raise _unnamed(self._function, reason) from error
        if isinstance(made, str):
            return made
        make, arguments, state, *items = (*made, None, None, None)[:5]
        entries = [list(part) if part is not None else None for part in items]
        data = _class_data(type(value)) if make is copyreg.__newobj__ else ()  # type: ignore[attr-defined]
        return _joined(map(self.of, (make, arguments, state, *entries, *data)))

    def _cell(self, cell: types.CellType) -> str:
        try:
            content = cell.cell_contents
        except ValueError:
            return "empty"
        return self.of(content)


def _class_data(cls: Any) -> Iterable[tuple[str, Any]]:
    """Attributes of a class and its bases that are neither methods, slots nor Python's own; of an object none."""
    for base in cls.__mro__ if isinstance(cls, type) else ():
        for name, value in sorted(vars(base).items(), key=itemgetter(0)):
            if not (name.startswith("__") or name == "_abc_impl" or hasattr(value, "__get__")):
                yield name, value


def _code(code: types.CodeType) -> str:
    """Instructions, names and constants, without file names and line numbers."""
    constants = [_constant(constant) for constant in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, code.co_varnames, constants)).encode()).hexdigest()


def _constant(constant: object) -> str:
    if isinstance(constant, types.CodeType):
        return _code(constant)
    if isinstance(constant, frozenset):  # its order differs from process to process
        return repr(sorted(map(repr, constant)))
    return repr(constant)


def _is_bound(value: Any) -> bool:
    """Whether it is the method of an object, as `", ".join` is; a builtin function belongs to its module."""
    return not isinstance(getattr(value, "__self__", None), (type(None), type, types.ModuleType))


def _joined(parts: Iterable[str]) -> str:
    """Parts that no other list of parts is joined to."""
    return "".join(f"{len(part)}:{part}," for part in parts)


def _name(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '?')}.{named.__qualname__}"


def _unnamed(name: str, why: str) -> WanshimError:
    return WanshimError(
        f"{name} {why}, so its content cannot be named in a cache key",
        expected="a Python function whose closure and defaults are plain values, functions or simple objects",
        hint="Use mode='per_rank', which needs no key",
    )
