"""DDP sums gradients in buckets, and arranges them anew after its first backward: in the order in which gradients were
ready. More than two ranks round a sum by where it lies in its bucket, so a resumed run has the buckets of the run from
its first step on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from wanshim.undo import Undo


def note_ready(parameters: Sequence[torch.nn.Parameter], undo: Undo) -> list[int]:
    """Filled by the next backward: the places of `parameters` in the order in which their gradients are ready."""
    ready: list[int] = []

    def note(place: int, *_: object) -> None:
        ready.append(place)
        handles[place].remove()

    # on the nodes that accumulate: a hook on a parameter is a user's, who wants the gradient
    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    handles = [node.register_hook(partial(note, place)) for place, node in enumerate(nodes)]
    for handle in handles:
        undo.add(handle.remove)
    undo.add(nodes.clear)  # a node lives as long as somebody holds it
    return ready


def arrange_buckets(model: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], ready: list[int]) -> None:
    """The next forward has the buckets that DDP makes of this order. Gradients are None afterwards.

    Called by all ranks; nothing is done where DDP does not rearrange its buckets.
    """
    if model.find_unused_parameters or len(ready) < len(parameters):
        return
    model.reducer.prepare_for_backward([])
    for place in ready:
        (parameters[place].sum() * 0).backward()
    for parameter in parameters:
        parameter.grad = None
