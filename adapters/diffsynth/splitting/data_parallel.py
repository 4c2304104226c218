"""accelerate's view of a job whose ranks train each sample in groups: a world of one process a group.

accelerate divides samples, steps the schedule, reduces and gathers by `num_processes`, which counts groups here. Its
collectives run over ranks that hold one group each: the first ranks of all groups are one such world, the second ranks
another. What one process broadcasts is brought to all ranks of each group, if they all call. A name of a process
(`process_index`, `is_main_process`) stays that of a rank of the job, so that one rank writes. Calls of
torch.distributed by any other code keep all ranks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from wanshim.undo import Undo

_OF_THE_JOB = ("destroy_process_group",)  # takes a group, and is no collective of it


def count_groups(accelerator: Any, ranks: int, group: Any, meet: Callable[[], bool], undo: Undo) -> None:
    """Until `undo` ends, accelerate counts each `ranks` consecutive ranks of the job as one process.

    DDP is left out where there is one group.

    Args:
        group: this rank's group; None: all ranks.
        meet: waits until all its ranks call it; whether they do.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    groups, rank = accelerator.num_processes // ranks, accelerator.process_index
    members = list(range(rank % ranks, ranks * groups, ranks))
    world = dist.new_group(members, use_local_synchronization=True)
    state = PartialState()
    for each in (accelerator.state, state):
        undo.set(each, {"num_processes": groups})
    # of one group too, or every rank would run what on_main_process leaves to one
    undo.add(partial(setattr, PartialState, "use_distributed", PartialState.use_distributed))
    PartialState.use_distributed = property(lambda self: True)
    divides = {"process_index": rank // ranks}
    undo.replace(accelerator, "prepare_data_loader", partial(_while_called, (accelerator.state, state), divides))
    undo.replace(state, "split_between_processes", partial(_while_entered, state, divides))
    if groups == 1:
        alone = {"distributed_type": DistributedType.NO}
        undo.replace(accelerator, "prepare_model", partial(_while_called, (accelerator.state, state), alone))
    over = partial(_over, world, members, group, rank // ranks * ranks, meet)
    seen = _Seen(torch, {"distributed": _Seen(dist, {}, over)})
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "accelerate" and vars(module).get("torch") is torch:
            undo.set(module, {"torch": seen})


class _Seen:
    """A module as accelerate's code sees it: some of its attributes replaced, all others its own."""

    def __init__(
        self, module: Any, replaced: Mapping[str, Any], change: Callable[[str, Any], Any] = lambda name, value: value
    ) -> None:
        self._module, self._change = module, change
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return self._change(name, getattr(self._module, name))


def _over(
    world: Any, members: list[int], group: Any, first: int, meet: Callable[[], bool], name: str, function: Any
) -> Any:
    """A collective of the default group as one of `world`, whose processes accelerate counts from 0; a broadcast then
    goes from the first rank of each group to its others."""
    if not inspect.isfunction(function) or name in _OF_THE_JOB:
        return function
    signature = inspect.signature(function)
    if "group" not in signature.parameters:
        return function

    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("group") is not None:
            return function(**given)
        for end in ("src", "dst"):
            if given.get(end) is not None and given[end] < len(members):
                given[end] = members[given[end]]
        result = function(**{**given, "group": world})
        if "src" in given and meet():
            return function(**{**given, "group": group, "src": first})
        return result

    return collective


def _while_called(
    states: tuple[Any, ...], values: Mapping[str, Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """A method that finds these values in accelerate's states."""

    def called(*args: object, **kwargs: object) -> Any:
        with Undo() as back:
            for state in states:
                back.set(state, values)
            return original(*args, **kwargs)

    return called


def _while_entered(state: Any, values: Mapping[str, Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose context manager finds these values in accelerate's state when it is entered."""

    @contextmanager
    def entered(*args: object, **kwargs: object) -> Iterator[Any]:
        manager = original(*args, **kwargs)
        part = _while_called((state,), values, manager.__enter__)()
        with ExitStack() as stack:
            stack.push(manager)
            yield part

    return entered
