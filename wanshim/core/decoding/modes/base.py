"""The plan and the run of one way to decode and encode: a mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wanshim.core.decoding.plan import VaeJob, VaePlan

from .network import VaeRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to decode and to encode.

    Args:
        name: what a caller asks for, and what a plan says.
        plan: the plans of this mode for a job, the largest chunk first; none where it does not apply.
        run: runs a plan. Every rank calls it and hands the same regions to the sink.
        parallel: the ranks work together. False: each receiver computes everything, and no caller asks for it by name.
        encodes: it can encode too.
    """

    name: str
    plan: Callable[[Any, VaeJob], list[VaePlan]]
    run: Callable[[VaeRun], None]
    parallel: bool = True
    encodes: bool = True
