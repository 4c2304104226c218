"""Decoders and encoders of VAEs that a patched framework owns: made at the first call, gone with the VAE.

A patch sits on a class; here is what belongs to one object of it. `VaeCache.run` either works on all ranks or
reports why this call stays with the framework, and does the same on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from wanshim.core.decoding.model.framework import VaeFallback
from wanshim.core.decoding.model.graph import Graph
from wanshim.core.decoding.plan import TileSettings
from wanshim.core.ranks import agreement
from wanshim.core.shared.digest import digest
from wanshim.core.shared.forks import group_is_inherited
from wanshim.core.shared.kernel_compiler import COMPILER
from wanshim.errors import ModelInvalid, RankAbsent, RankDisagreement

from .call import ParallelVae, VaeOptions
from .plan import VaePlan

_ONE_RANK = "only one rank of its group calls the VAE here"
_DIFFERENT = {"decode": "the ranks decode different latents", "encode": "the ranks encode different videos"}


def sequence_group(module: str) -> Any:
    """The ranks that hold one sample: the sequence-parallel group that `module` keeps, else None, which is all.

    Args:
        module: a `parallel_state` as xDiT and FastVideo have it; looked up among what is imported, never imported.
    """
    state = sys.modules.get(module)
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state.get_sp_group().device_group


class _Alone:
    """In place of a group: this rank works for others, who do not call."""


_holders: ContextVar[Any] = ContextVar("holders of one sample")


@contextmanager
def held_by(group: Any, together: Callable[[str], bool] | None = None) -> Iterator[None]:
    """Inside, the ranks of `group` (None: all) share the calls of patched VAEs, instead of the framework's group.

    Args:
        together: whether all of them make a call that each describes in these words; None: they always do.
    """
    token = _holders.set((group, together))
    try:
        yield
    finally:
        _holders.reset(token)


def held_alone() -> AbstractContextManager[None]:
    """Inside, the framework computes the calls of patched VAEs on this rank alone."""
    return held_by(_Alone)


def gains_alone(given: torch.Tensor) -> bool:
    """Whether the operators are faster than the framework's own where one process computes all."""
    return isinstance(given, torch.Tensor) and given.is_cuda


def _alone(group: Any) -> str | None:
    """Why no other rank takes part, or None."""
    if not (dist.is_available() and dist.is_initialized()):
        return "no process group: torch.distributed.init_process_group was not called in this process"
    if group_is_inherited():
        return "this process was forked from a rank: it is none itself"
    return "one process: there is nobody to share with" if dist.get_world_size(group) == 1 else None


class VaeCache:
    """One `ParallelVae` per living VAE.

    Args:
        read: builds the graph of a VAE; raises ModelInvalid for one it does not know.
        verb: decode or encode.
    """

    def __init__(self, read: Callable[[Any], Graph], verb: str = "decode") -> None:
        self.verb = verb
        self._read = read
        self._apart: WeakSet[Any] = WeakSet()  # whose ranks hold different samples, as in data-parallel work
        self._all_apart = ""  # what differed where ranks came with different VAEs
        self._made: WeakKeyDictionary[Any, ParallelVae] = WeakKeyDictionary()
        self.plan: VaePlan | None = None

    def run(
        self,
        vae: Any,
        given: torch.Tensor,
        options: VaeOptions,
        *,
        group: Any = None,
        tiles: TileSettings | None = None,
        lean: bool = False,
        **changed: Any,
    ) -> torch.Tensor:
        """Decode or encode on all ranks of `group`; an empty tensor on a rank that gets no output. One process on CUDA
        is a group of one.

        Args:
            options: what the user has set.
            tiles, lean: see `ParallelVae`.
            changed: fields of `options` that the framework sets instead.

        Raises:
            VaeFallback: the framework should do it itself, on every rank.
            RanksFailed: a rank failed on the way.
            RankAbsent: a rank did not call within the deadline.
            RankDisagreement: the ranks carry different patch sets.
        """
        group, together = _holders.get((group, None))
        if group is _Alone:
            raise VaeFallback(_ONE_RANK)
        alone = _alone(group)
        if alone is not None and not gains_alone(given):
            raise VaeFallback(alone)
        if self._all_apart or vae in self._apart:
            raise VaeFallback(self._all_apart or _DIFFERENT[self.verb])
        if together is not None and not together(f"{self.verb} {digest(given)}"):
            raise VaeFallback(_ONE_RANK)
        options = replace(options, **changed)
        try:
            parallel = self._of(vae, group, options)
            parallel.refuse_traced(given)
            agreement.ensure(group, call=self.verb, timeout_s=parallel.patience)
            output = parallel(given, tiles=tiles, lean=lean)
            self.plan = parallel.plan
            return output
        except RankDisagreement as error:
            if not error.differing:  # of patch sets
                raise
            # Every rank knows it, so that none waits for the others at its next sample; nor, where their VAEs differ,
            # at another VAE, which may be the one that a rank came with here.
            self._apart.add(vae)
            if of_vae := [each for each in error.differing if each not in ("shape", parallel.graph.source)]:
                self._all_apart = f"the ranks {self.verb} with different {', '.join(of_vae)}"
            raise VaeFallback(self._all_apart or _DIFFERENT[self.verb]) from error
        except ModelInvalid as error:
            raise VaeFallback(str(error)) from error
        except RankAbsent as error:
            parallel.missed = True
            error.topic = "vae_timeout"
            raise

    def prepare(self, vae: Any, given: torch.Tensor, options: VaeOptions, *, group: Any = None, **changed: Any) -> None:
        """Have what a call of one process launches compiled beside it: see `run`.

        Args:
            given: its size and device; it may have other channels.

        Raises:
            VaeFallback, ModelInvalid: the framework will do it.
        """
        if _alone(group) is None or not gains_alone(given):
            return
        parallel = self._of(vae, group, replace(options, **changed))
        shape = given.shape[0], parallel.graph.input_channels, *given.shape[2:]
        kernels = partial(parallel.operators.kernels_of, shape, given.device, parallel.graph.dtype)
        COMPILER.do(kernels, first=True)

    def _of(self, vae: Any, group: Any, options: VaeOptions) -> ParallelVae:
        parallel = self._made.get(vae)
        framework = None if parallel is None else parallel.graph.framework
        replaced = framework is not None and framework.replaced()
        if parallel is not None and (replaced or parallel.options != options or parallel.group is not group):
            parallel.release()
            self._made.pop(vae, None)
            parallel = None
        if parallel is None:  # threads that come at once get the same one, where their calls take turns
            parallel = self._made.setdefault(vae, ParallelVae(self._read(vae), group, options))
        return parallel
