"""The job of a pipeline and its machine, as data: all that `decide` knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of the user.

    Args:
        gpus: how many, the pipeline's own included; None: all in sight.
        devices: which, the pipeline's own first; None: its own and the next ones.
        at_most: over how many GPUs guidance may go, and the tokens of a forward; None: whatever uses the most GPUs.
        fast_forwards: forwards are computed by what is faster and changes bits.
        fast_vae: likewise decodes and encodes.
    """

    gpus: int | None = None
    devices: tuple[str, ...] | None = None
    at_most: tuple[int, int] | None = None
    fast_forwards: bool = False
    fast_vae: bool = False

    @property
    def asks_for_one(self) -> bool:
        return self.gpus == 1 or (self.devices is not None and len(self.devices) == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """The forwards of one pipeline.

    Args:
        pipeline: its name.
        devices: that may be used, the pipeline's own first.
        no_pair: why a step has no two independent forwards, or empty.
        no_sequence: why the tokens of a forward cannot go over GPUs, or empty.
        heads: of self-attention, at most so many GPUs share a forward's tokens.
        weights: bytes of the models that each GPU holds.
        streamed: bytes of them that a GPU holds where blocks wait in host memory; None: they cannot.
        is_offloaded: the script offloads them on the first device, so what that holds of them is not known.
        own_streamed: bytes of them that the first device holds where blocks of one at a time come from host memory in
            place of that; None: they cannot.
        working: bytes that a forward needs beside them, on one GPU; None: not known.
        at_most: see Request.
        why_one: why there is one device alone, if there is.
        fast_forwards, fast_vae: see Request.
    """

    pipeline: str
    devices: tuple[str, ...]
    no_pair: str = ""
    no_sequence: str = ""
    heads: int = 0
    weights: int = 0
    streamed: int | None = None
    is_offloaded: bool = False
    own_streamed: int | None = None
    working: int | None = None
    at_most: tuple[int, int] | None = None
    why_one: str = ""
    fast_forwards: bool = False
    fast_vae: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the machine.

    Args:
        available: bytes that a worker may hold, by device; a device that is not named has no limit.
    """

    available: Mapping[str, int] = field(default_factory=dict)
