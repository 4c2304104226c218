"""Whether a model computes with the code of its packages: a worker imports those, and nothing that was patched here."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_EVERYWHERE = frozenset({"torch", "wanshim", *sys.stdlib_module_names})
_METHODS = ("forward", "__call__")
_TORCH = {"torch": torch, "torch.nn.functional": F, "torch.Tensor": torch.Tensor}
_COMPUTE_NOTHING = ("load", "save", "compile", "backward")  # of torch, which programs replace
_GRAPH = "__compiled_fn_"  # torch.compile puts graphs among the names of a module
_TYPES_OF_FUNCTIONS = ("builtins", "functools", "torch", "typing", "typing_extensions")


def why_other_code(model: nn.Module, methods: Iterable[str] = ()) -> str:
    """The parts of `model` that another process would compute with other code or state; empty if there are none.

    A function that was put in place of a class's method, of a module's function or of torch's is known here alone. A
    class of the user's own may count its calls, or read what the program sets.

    Args:
        methods: of `model` itself, beside its forward.
    """
    package = _package(type(model).__module__)
    modules = set()
    for path, part in _parts(model):
        cls = type(part)
        where = f"{path}: " if path else ""
        if not is_installed(cls.__module__, package):
            return f"{where}{cls.__module__}.{cls.__qualname__} is no class of an installed package"
        for name in (*_METHODS, *(methods if part is model else ())):
            found = next((each for each in cls.__mro__ if name in vars(each)), object)
            known = {package, _package(found.__module__), *_EVERYWHERE}
            for function in _chain(vars(found).get(name)):
                if _package(_home(function)) not in known:
                    return f"{where}{found.__qualname__}.{name} is {_name(function)} here"
        modules |= {each.__module__ for each in cls.__mro__ if _package(each.__module__) not in sys.stdlib_module_names}
    modules.discard("torch")  # of tensors: `_why_other_torch` looks at what computes there
    places = [(name, vars(sys.modules[name])) for name in sorted(modules & sys.modules.keys())]
    for place, values in (*places, *((path, vars(module)) for path, module in model.named_modules())):
        for name, value in list(values.items()):
            if name.startswith(_GRAPH):
                continue
            value = value.__func__ if isinstance(value, MethodType) else value
            for function in _chain(value) if _wraps(value) else ():
                if not (is_installed(_home(function), package) or _imports(place, name, _home(function))):
                    return f"{'.'.join(filter(None, (place, name)))} is {_name(function)} here"
    return _why_other_torch()


def own_methods(thing: object, package: str) -> list[str]:
    """Names of an object's methods whose code is neither that package's, wherever it lies, nor any installed one's: of
    a class of the program's own, or put in place of a method."""
    names = dict.fromkeys(name for cls in type(thing).__mro__ for name, value in vars(cls).items() if callable(value))
    places = ((name, inspect.getattr_static(thing, name)) for name in names if not name.startswith("__"))
    return [name for name, value in places if hasattr(thing, "__dict__") and why_other_function(value, package)]


def is_own(thing: object, package: str) -> bool:
    """Whether an object's class, or a base of it, is the program's own: it may run code in no method that is known."""
    return not all(is_installed(cls.__module__, package) for cls in type(thing).__mro__)


def why_other_function(function: Any, package: str) -> str:
    """That what is called as a function has code neither of that package nor of any installed one; empty if not."""
    found = function
    while isinstance(found, (functools.partial, MethodType, staticmethod, classmethod)):
        found = found.func if isinstance(found, functools.partial) else found.__func__
    if not _wraps(found) and not isinstance(found, type):
        found = getattr(found, "__wrapped__", found)  # as of `functools.lru_cache`
    homes = [_home(each) for each in _chain(found)] if _wraps(found) else []
    homes = homes or [str((found if isinstance(found, type) else type(found)).__module__)]
    return "" if all(is_installed(home, package) for home in homes) else f"is {_name(found)} here"


def called_by_program(package: str, within: CodeType, depth: int = 1) -> bool:
    """Whether code of the program's own makes this call, which that package has called: of the two it is nearer.

    Args:
        within: of the function whose frame ends the way.
        depth: of the frame that it begins with.
    """
    frame: FrameType | None = sys._getframe(depth)
    found = False
    while frame is not None and frame.f_code is not within:
        home = str(frame.f_globals.get("__name__", ""))
        if _package(home) == package:
            return found
        found = found or not is_installed(home, package)
        frame = frame.f_back
    return False


def is_installed(module: str, package: str = "") -> bool:
    """Whether a module is one of an installed package, which a worker can import without running the program's code.

    Args:
        package: one that counts as installed, wherever it lies.
    """
    top = _package(module)
    return top in (package, *_EVERYWHERE) or _lies_among_packages(top)


def _why_other_torch() -> str:
    """Which function of torch's another process would not have; empty if none."""
    attention = F.scaled_dot_product_attention
    if not isinstance(attention, BuiltinFunctionType):  # by another function of torch's own, perhaps
        return f"torch.nn.functional.scaled_dot_product_attention is {_name(attention)} here"
    for place, owner in _TORCH.items():
        for name, value in list(vars(owner).items()):
            if name.startswith("_") or name in _COMPUTE_NOTHING or not callable(value):
                continue
            if isinstance(value, (type, ModuleType)):
                continue
            is_made = isinstance(value, (functools.partial, nn.Module)) or hasattr(value, "_torchdynamo_orig_callable")
            known = not is_made and _package(type(value).__module__) in _TYPES_OF_FUNCTIONS
            if not known or any(_package(_home(each)) not in ("torch", "wanshim") for each in _chain(value)):
                return f"{place}.{name} is {_name(value)} here"
    return ""


@functools.cache
def _imports(module: str, name: str, home: str) -> bool:
    """Whether the source of a module takes this name from the package of `home`, whatever way that is installed."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8")) if file.endswith(".py") else ast.Module([], [])
    except (OSError, ValueError, SyntaxError):
        return False
    taken = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0)
    return any(
        _package(node.module or "") == _package(home) and name in {each.asname or each.name for each in node.names}
        for node in taken
    )


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Its modules, and the objects in them that have code: those that are called, such as attention processors, and
    tensors, as of quantized weights; one of each class."""
    seen: set[type] = set()
    for path, module in model.named_modules():
        for part in (module, *module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            is_new = type(part) not in seen and (part is module or not isinstance(part, nn.Module))
            if is_new:
                seen.add(type(part))
            if is_new and (part is module or isinstance(part, torch.Tensor) or _has_call(part)):
                yield path, part


def _has_call(value: Any) -> bool:
    """An object that Python code makes callable, such as an attention processor."""
    if isinstance(value, (type, torch.Tensor)):
        return False
    return any(isinstance(vars(cls).get("__call__"), FunctionType) for cls in type(value).__mro__)


def _chain(function: Any) -> Iterator[FunctionType]:
    """A function and those that it wraps."""
    while function is not None:
        yield from (each for each in (getattr(function, "_self_wrapper", None), function) if type(each) is FunctionType)
        function = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)


def _wraps(value: Any) -> bool:
    """A function of Python's, or what calls one in its place."""
    return isinstance(value, (FunctionType, functools.partial)) or hasattr(type(value), "_self_wrapper")


def _home(function: FunctionType) -> str:
    """The module in which it was made; one that `exec` has made may have none."""
    return str(function.__globals__.get("__name__", ""))


@functools.cache
def _lies_among_packages(name: str) -> bool:
    """Whatever folder that is."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    places = getattr(module, "__path__", [file] if file else [])  # of a namespace package several, and no file
    return bool(places) and all(any(Path(place).parent.glob("*.dist-info")) for place in places)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _name(function: Any) -> str:
    module = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", "")
    return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"
