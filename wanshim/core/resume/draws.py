"""The random states of a process: its own states, and generators that an object such as a dataset holds."""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

from wanshim.core.sequence.random_state import random_states, set_random_states
from wanshim.core.shared.held import generator_kinds, held_objects

CPU = torch.device("cpu")


class Draws:
    """The random states of this process, and of the generators that `holder` has in its attributes and containers.

    A copy of it, made together with one of `holder`, is about the copy's generators.

    Args:
        without: objects that are not looked into.
    """

    def __init__(self, holder: object, without: Iterable[object] = ()) -> None:
        generators = (one for one in held_objects(holder, without) if isinstance(one, generator_kinds()))
        self.held: list[Any] = [one for one in generators if not isinstance(one, random.SystemRandom)]  # has no state

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
