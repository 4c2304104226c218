"""The objects that an object holds, at any depth, and a function that puts their contents back."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from wanshim.core.shared.fallback import Fallback

MOST_ITEMS, MOST_OBJECTS = 1_000, 100_000  # looked at: of one container, and in all
MOST_ELEMENTS = 2**20  # of a tensor or array that is copied: larger ones are data
CONTAINERS = (dict, list, tuple, set, deque)


def held_objects(holder: object, without: Iterable[object] = ()) -> Iterator[Any]:
    """`holder` and what it has in attributes, containers, closures and partial functions, each once, nearest first.

    Args:
        without: neither these nor what is reached through them alone.
    """
    seen: dict[int, object] = {id(one): one for one in without}  # each stays alive: its id is not given to another
    most, waiting = len(seen) + MOST_OBJECTS, deque([holder])
    while waiting and len(seen) < most:
        one = waiting.popleft()
        if id(one) not in seen:
            seen[id(one)] = one
            yield one
            waiting.extend(islice(_held(one), MOST_ITEMS))


def generator_kinds() -> tuple[type, ...]:
    """The types of random generators."""
    numpy = sys.modules.get("numpy")
    of_numpy = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return (random.Random, torch.Generator, *of_numpy)


def put_back_later(holder: object, without: Iterable[object] = ()) -> Callable[[], None]:
    """A function that gives attributes, containers, tensors and arrays of `held_objects` the contents that they have
    now; each object stays the same one. Parameters and random generators are left to others.

    Raises:
        Fallback: an object's content can neither be read nor put back, as the position of an iterator.
    """
    steps: list[Callable[[], None]] = []
    for count, one in enumerate(held_objects(holder, without), 1):
        if count == MOST_OBJECTS:
            raise Fallback(f"{type(holder).__name__} holds {MOST_OBJECTS} objects or more")
        if isinstance(one, (type, ModuleType)):
            continue
        if isinstance(one, _values()):
            if _is_small(one):
                before = one.detach().clone() if isinstance(one, torch.Tensor) else one.copy()
                steps.append(partial(_put_back_values, one, before))
            continue
        attributes = getattr(one, "__dict__", None)
        if isinstance(one, Iterator) or not (isinstance(attributes, dict) or _is_known(one)):
            found = f"{type(one).__name__}, whose content cannot be put back"
            raise Fallback(f"{type(holder).__name__} holds an object of the type {found}")
        for content in (one, attributes):
            if isinstance(content, (dict, list, set, deque)):
                steps.append(partial(_put_back, content, copy.copy(content)))

    def put_back() -> None:
        for step in steps:
            step()

    return put_back


def _values() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (torch.Tensor, numpy.ndarray) if numpy is not None else (torch.Tensor,)


def _put_back(content: Any, before: Any) -> None:
    if _ids(content) != _ids(before):
        content.clear()
        (content.update if isinstance(content, (dict, set)) else content.extend)(before)


def _ids(content: Any) -> list[int]:
    return [*map(id, content), *map(id, content.values() if isinstance(content, dict) else ())]


def _is_small(values: Any) -> bool:
    """Whether these values are few, and neither a parameter nor in a layout that is not assigned to."""
    if isinstance(values, torch.Tensor):
        plain = type(values) is torch.Tensor and values.layout is torch.strided and not values.is_meta
        return plain and values.numel() <= MOST_ELEMENTS
    return bool(values.flags.writeable and values.size <= MOST_ELEMENTS)


def _put_back_values(values: Any, before: Any) -> None:
    with torch.no_grad():
        if bool((values != before).any()):
            values[...] = before


def _is_known(value: Any) -> bool:
    """Whether an object without attributes is a container or a generator, or stays the same: one that is compared by
    its value, or is its own copy."""
    known = (*CONTAINERS, *generator_kinds())
    of_value: Any = type(value).__hash__
    if isinstance(value, known) or of_value not in (None, object.__hash__):
        return True
    with suppress(Exception):  # whatever a class's own way to be copied raises
        return type(value) is object or copy.copy(value) is value
    return False


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, (str, bytes, int, float, type, ModuleType, torch.Tensor)):
        return ()
    attributes = getattr(value, "__dict__", None)
    return chain(_items(value), attributes.values() if isinstance(attributes, dict) else ())


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, CONTAINERS):
        return value
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        return filter(None, map(_content, value.__closure__ or ()))
    return ()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
