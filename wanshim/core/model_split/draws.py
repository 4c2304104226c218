"""Random numbers of a split model, which are those of the model on one device.

torch keeps a generator a device. A stage on another device draws from where the home device's generator stands, which
then stands where the stage left it; between two forward passes each generator is the program's own.
"""

from __future__ import annotations

from typing import Any

import torch

from wanshim.core.sequence.random_state import generator_state
from wanshim.core.sequence.run import backward_runs


class Draws:
    """The generators of a split model's CUDA devices. Devices of the CPU share one.

    Checkpoints keep the state of the devices that their inputs lie on, so a block that is computed again in backward
    draws what it drew. A block that torch.compile compiled draws from its own device's generator. Behind a forward that
    failed between two stages the next one puts a device's generator back.

    Args:
        home: device of what lies around the blocks.
    """

    def __init__(self, home: torch.device) -> None:
        self.home = home
        self.are_carried = True  # False while micro-batches overlap: none of their blocks draws
        self._own: dict[torch.device, torch.Tensor] = {}  # state of a device before its stage
        self._left = torch.empty(0)  # state of the home device where the stages of other devices began

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, such as one of a block with its hooks, has not carried anything yet."""
        return type(self), (self.home,)

    def carry(self, source: torch.device, target: torch.device) -> None:
        """Draw on `target` from where `source` stands: called between two stages, and behind the last one."""
        if source == target or source.type != "cuda" or not self.are_carried:
            return
        if torch.compiler.is_compiling() or backward_runs() or not torch.cuda.is_initialized():  # as of fake tensors
            return
        state = generator_state(source)
        if source == self.home:
            self._left = state
        elif source in self._own:
            torch.cuda.set_rng_state(self._own.pop(source), source)
        else:  # a forward that passed over the stages before, as a step cache does
            return
        if target != self.home:
            self._own.setdefault(target, generator_state(target))
            torch.cuda.set_rng_state(state, target)
        elif not torch.equal(state, self._left):
            torch.cuda.set_rng_state(state, target)
