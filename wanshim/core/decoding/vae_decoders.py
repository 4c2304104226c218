"""Decoders of VAEs that a patched framework owns: made at the first decode, gone with the VAE.

A patch sits on a class; here is what belongs to one object of it. `DecoderCache.run` either decodes on all ranks or
reports why this decode stays with the framework, and does the same on every rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from wanshim.core import agreement
from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.plan import TileSettings
from wanshim.errors import DecodeDisagreement, DecodeInvalid, DecodeRankAbsent

from .decoder import DecodeOptions, ParallelDecoder
from .plan import DecodePlan

log = logging.getLogger("wanshim")
T = TypeVar("T")


class DecodeFallback(Exception):
    """This decode stays with the framework; the text says why."""


def chosen_options(mode: str | None, fast: bool, *, active: int | None = None) -> DecodeOptions:
    """What the user's settings ask of a patched decode.

    Args:
        mode: auto, temporal, spatial, tile or off; None: nothing was set, which is auto.
        fast: the fast operators.
        active: see `DecodeOptions`.

    Raises:
        DecodeFallback: the mode is off.
    """
    if mode == "off":
        raise DecodeFallback("the decode mode is off")
    return DecodeOptions(mode=mode or "auto", strict=not fast, active=active)


def sequence_group(module: str) -> Any:
    """The ranks that hold one latent: the sequence-parallel group that `module` keeps, else None, which is all.

    Args:
        module: a `parallel_state` as xDiT and FastVideo have it; looked up among what is imported, never imported.
    """
    state = sys.modules.get(module)
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state.get_sp_group().device_group


class DecoderCache:
    """One `ParallelDecoder` per living VAE.

    Args:
        feature: the name to log under.
        read: builds the graph of a VAE; raises DecodeInvalid for one it does not know.
    """

    def __init__(self, feature: str, read: Callable[[Any], DecoderGraph]) -> None:
        self.feature = feature
        self._read = read
        self._made: WeakKeyDictionary[Any, ParallelDecoder] = WeakKeyDictionary()
        self._reported: set[str] = set()
        self.plan: DecodePlan | None = None

    def run(
        self,
        vae: Any,
        latent: torch.Tensor,
        options: DecodeOptions,
        *,
        group: Any = None,
        tiles: TileSettings | None = None,
        lean: bool = False,
    ) -> torch.Tensor:
        """Decode on all ranks of `group`; an empty tensor on a rank that gets no output.

        Raises:
            DecodeFallback: the framework should decode itself, on every rank.
            DecodeFailed: a rank failed while decoding.
            DecodeRankAbsent: a rank did not call decode within the deadline.
            RankDisagreement: the ranks carry different patch sets.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise DecodeFallback(
                "no process group: torch.distributed.init_process_group was not called in this process"
            )
        if dist.get_world_size(group) == 1:
            raise DecodeFallback("one process: there is nobody to share with")
        if torch.is_grad_enabled() and latent.requires_grad:
            raise DecodeFallback("the latent wants gradients")
        agreement.ensure(group, call="decode", timeout_s=options.deadline, absent=DecodeRankAbsent)
        try:
            decoder = self._decoder(vae, group, options)
            frames = decoder(latent, tiles=tiles, lean=lean)
            self.plan = decoder.plan
        except DecodeDisagreement as error:
            if error.differing == ("latent",):
                raise DecodeFallback("the ranks decode different latents") from error
            raise
        except DecodeInvalid as error:
            raise DecodeFallback(str(error)) from error
        return latent.new_empty(0) if frames is None else frames

    def decode_or_fallback(self, notes: list[str], decode: Callable[[], T], fallback: Callable[[], T]) -> T:
        """`decode()`, or `fallback()` where it raises DecodeFallback; either is reported in `notes`, once."""
        try:
            result = decode()
        except DecodeFallback as reason:
            self._report_once(notes, f"left to the framework: {reason}")
            return fallback()
        self._report_once(notes, str(self.plan))
        return result

    def _report_once(self, notes: list[str], text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            notes.append(text)
            log.info("wanshim: %s: %s", self.feature, text)

    def _decoder(self, vae: Any, group: Any, options: DecodeOptions) -> ParallelDecoder:
        decoder = self._made.get(vae)
        if decoder is None or decoder.options != options or decoder.group is not group:
            if decoder is not None:
                decoder.release()
            decoder = ParallelDecoder(self._read(vae), group, options)
            self._made[vae] = decoder
        return decoder
