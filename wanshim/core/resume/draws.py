"""The random states of a process: its own states, and generators that an object such as a dataset holds."""

from __future__ import annotations

import base64
import json
import random
import sys
from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from wanshim.core.sequence.random_state import random_states, set_random_states

CPU = torch.device("cpu")
MOST_ITEMS, MOST_OBJECTS = 1_000, 100_000  # looked at: of one container, and in all


class Draws:
    """The random states of this process, and of the generators that `holder` has in its attributes and containers.

    A copy of it, made together with one of `holder`, is about the copy's generators.

    Args:
        without: whose generators are not of this one.
    """

    def __init__(self, holder: object, without: Draws | None = None) -> None:
        others = [id(generator) for generator in (without.held if without is not None else ())]
        self.held: list[Any] = [generator for generator in _generators(holder) if id(generator) not in others]

    def states(self, device: torch.device = CPU) -> dict[str, Any]:
        return random_states(device) | self.held_states()

    def held_states(self) -> dict[str, Any]:
        return {"held": [_state(generator) for generator in self.held]}

    def text(self, device: torch.device = CPU) -> str:
        """`states` as JSON."""
        return as_text(self.states(device))

    def set(self, text: str, device: torch.device = CPU) -> None:
        """Draw from now on what the process drew whose states these are, or its generators, if the text has those of
        `held_states` alone."""
        states = _decoded(json.loads(text))
        if states.keys() != {"held"}:
            set_random_states(states, device)
        if len(states["held"]) == len(self.held):  # else the user has accepted that they differ
            for generator, state in zip(self.held, states["held"], strict=True):
                _set_state(generator, state)


def as_text(states: dict[str, Any]) -> str:
    return json.dumps(states, default=_encoded)


def _encoded(value: Any) -> Any:
    """Encode what JSON lacks: torch's states, and arrays of NumPy's."""
    if isinstance(value, torch.Tensor):
        return {"bytes": base64.b64encode(bytes(value.tolist())).decode()}
    return {"array": value.tolist(), "dtype": str(value.dtype)}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value] if any(isinstance(item, dict) for item in value) else value
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return torch.frombuffer(bytearray(base64.b64decode(value["bytes"])), dtype=torch.uint8)
    if "array" in value:
        return sys.modules["numpy"].array(value["array"], dtype=value["dtype"])
    return {name: _decoded(item) for name, item in value.items()}


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    of_numpy = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return (random.Random, torch.Generator, *of_numpy)


def _generators(holder: object) -> list[Any]:
    """In the order in which they are found."""
    kinds = _kinds()
    found: list[Any] = []
    seen: dict[int, object] = {}  # each stays alive: its id is not given to another
    waiting = deque([holder])
    while waiting and len(seen) < MOST_OBJECTS:
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if not isinstance(one, kinds):
            waiting.extend(islice(_held(one), MOST_ITEMS))
        elif not isinstance(one, random.SystemRandom):  # has no state
            found.append(one)
    return found


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, (str, bytes, int, float, type, ModuleType, torch.Tensor)):
        return ()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, deque)):
        return value
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        return filter(None, map(_content, value.__closure__ or ()))
    attributes = getattr(value, "__dict__", None)
    return attributes.values() if isinstance(attributes, dict) else ()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        version, internal, gauss_next = generator.getstate()
        return [version, list(internal), gauss_next]
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    bits = getattr(generator, "bit_generator", None)
    return bits.state if bits is not None else generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
