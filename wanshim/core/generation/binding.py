"""Ties a framework's pipeline to the core, for one call of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wanshim.core.sequence import BlockList
from wanshim.core.streaming.host_copy import Moved


class NotShared(Exception):
    """This call runs on one GPU; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A function that the denoising loop calls, and that workers can compute.

    Args:
        owner: the object on which the loop looks it up.
        attribute: under this name.
        function: what a worker calls with the same arguments: a module among `modules`, or a function of a module file.
        modules: what it needs, by name.
        empty: from its arguments, an uninitialized result: tensors of the shapes and dtypes that it returns.
        same: the argument, given by name, that is equal in the two forwards of a step.
        blocks: from `function` and its arguments, the blocks through which its tokens go; a function of a module file.
        reads: names of the arguments that it reads; no others are sent. None: all.
        few: from its arguments, those of a forward with few tokens, by which new copies are compared; None: they are
            not.
        count: from its arguments, their tokens, by which those that go over processes are compared; None: they are not.
        is_compiled: by torch.compile, whose kernels are made for sizes: copies are compared at each, with all tokens.
        sent: from its arguments, those with which a worker calls `function`; None: the same.
    """

    owner: Any
    attribute: str
    function: Callable[..., Any]
    modules: Mapping[str, nn.Module]
    empty: Callable[..., Any]
    same: str
    blocks: Callable[..., Sequence[BlockList]] | None = None
    reads: frozenset[str] | None = None
    few: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] | None = None
    count: Callable[[tuple[Any, ...], dict[str, Any]], int] | None = None
    is_compiled: bool = False
    sent: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] | None = None

    def used(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[nn.Module]:
        """Those of its modules that a forward with these arguments computes with."""
        given = {id(each) for each in (self.owner, *args, *kwargs.values())}
        return [module for module in self.modules.values() if id(module) in given]

    def as_sent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return (args, kwargs) if self.sent is None else self.sent(args, kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The script's own offload of the models of a call, which this process streams in place of that.

    Args:
        before: called with a model that is to compute: others leave the device, as that offload has it. It returns a
            function that is called with weights of the model which have other places in host memory; None: that
            offload leaves the model alone.
        ends: objects and the names of their methods before which the streams end: those by which that offload moves
            models between their forwards, and what needs the device's memory next.
        keeps: whether it keeps the weights in host memory between calls, as files do not need to be.
        room: bytes more of the device that it would let a model have from forward to forward; it may be less than 0.
    """

    before: Callable[[nn.Module], Moved | None]
    ends: tuple[tuple[object, str], ...]
    keeps: bool = True
    room: Callable[[nn.Module], float] = lambda module: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBinding:
    """One call of a pipeline.

    Args:
        name: of the pipeline's class.
        forwards: those that the loop calls. One that the program's own code calls, which the framework has called, is
            none of the loop's.
        package: of the framework.
        is_guided: whether the loop calls a forward twice a step, with the prompt and without, and reads neither result
            before both have returned.
        no_pair: why it never does in this call, or empty.
        no_sequence: why the tokens of a forward cannot go over processes, or empty: then each forward has `blocks`.
        heads: of self-attention, the fewest of all forwards.
        may_change: the user's own code runs between steps, and may change models.
        own: objects and the names of their methods by which it does, beside a callback that is an argument. No forward
            within them is one of the loop's.
        runs_unseen: it may run in no such method, too, between any two forwards: in the bar that shows the steps.
        check: raises NotShared if the framework is set to compute what a worker would not, as that code may have it.
        set_up: a function of a module file that a worker calls with its copy of a forward's module, for what the
            framework keeps in the process and not in the module.
        vae: whose decode and encode the processes share; None: this process computes them.
        decodes: whether the call ends with a decode that they can share: not of latents, and not in tiles.
        device: on which the forwards compute, where the script's offload keeps weights elsewhere; None: they are there.
        offload: what is there in place of which this process can stream the models; None: nothing, or it cannot.
        without_hooks: a context in which a module has its weights, and none of the hooks by which the script offloads
            or caches.
    """

    name: str
    forwards: tuple[Forward, ...]
    is_guided: Callable[[], bool]
    package: str = ""
    no_pair: str = ""
    no_sequence: str = ""
    heads: int = 0
    may_change: bool = False
    own: tuple[tuple[object, str], ...] = ()
    runs_unseen: bool = False
    check: Callable[[], None] = lambda: None
    set_up: Callable[[nn.Module], None] | None = None
    vae: nn.Module | None = None
    decodes: bool = True
    device: torch.device | None = None
    offload: Offload | None = None
    without_hooks: Callable[[nn.Module], AbstractContextManager[object]] = lambda module: nullcontext()

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Those of all forwards, by name."""
        return {name: module for forward in self.forwards for name, module in forward.modules.items()}

    @property
    def copied(self) -> list[nn.Module]:
        """All that workers hold copies of: those modules, and the VAE."""
        return [*self.modules.values(), *([] if self.vae is None else [self.vae])]

    @contextmanager
    def as_made(self) -> Iterator[None]:
        """All that is copied without the script's hooks."""
        with ExitStack() as stack:
            for module in self.copied:
                stack.enter_context(self.without_hooks(module))
            yield
