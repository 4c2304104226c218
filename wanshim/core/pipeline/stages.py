"""State that the micro-batches of a pipeline share: streams, the copies between them, and what was copied already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from wanshim.core.model_split.plan import SplitPlan
from wanshim.core.pipeline.streams import StageLink, StageStream

PROLOGUE = -1  # the stage number of what comes before the first block; what comes after the last is stage S


class Stages:
    """A stream for each stage, and one of its own for what comes before the first block and after the last."""

    def __init__(self, plan: SplitPlan) -> None:
        self.streams = [StageStream(torch.device(device)) for device in plan.devices]
        self.side = StageStream(torch.device(plan.home), own_stream=True)
        # gets (begins, "forward", "backward" or "tail", stage, micro-batch, stream) around each piece of work
        self.trace: Callable[[bool, str, int, int, StageStream], None] | None = None
        self._links: dict[tuple[int, int], StageLink] = {}
        self._known = [WeakTensorKeyDictionary() for _ in self.streams]

    def stream_of(self, stage: int) -> StageStream:
        return self.streams[stage] if 0 <= stage < len(self.streams) else self.side

    def link(self, source: int, target: int) -> StageLink:
        key = (source, target)
        if key not in self._links:
            self._links[key] = StageLink(self.stream_of(source), self.stream_of(target))
        return self._links[key]

    def mark_of_caller(self) -> Any:
        """An event behind what the caller has issued on the home device."""
        return None if self.side.stream is None else torch.cuda.current_stream(self.side.device).record_event()

    def known(self, stage: int, source: torch.Tensor) -> torch.Tensor | None:
        """The copy of a prologue's tensor on a stage; also when a checkpoint replays the block."""
        found = self._known[stage].get(source)
        return found[1] if found is not None and found[0] == source._version else None

    def remember(self, stage: int, source: torch.Tensor, leaf: torch.Tensor) -> None:
        self._known[stage][source] = (source._version, leaf)
