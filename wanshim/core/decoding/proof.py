"""Strict proves itself: its result beside the framework's own, on the data at hand.

At the first call of a size the first latent frames are compared, every video of a batch: they depend on no later ones.
More of them, up to the whole, are where that takes less than a tenth of the call. Afterwards they are again at
intervals, each time twice as many. Where many ranks work on one video, or none keeps the frames, a short call of the
same kind gives what is compared. The framework's result of the whole decides where that of the first frames differs:
a convolution over all frames at once may add in another order for fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from time import perf_counter

import torch

from wanshim.core.decoding.model.framework import Framework
from wanshim.core.decoding.model.graph import Attention, Graph
from wanshim.core.decoding.operators.attention_kernel import stored_values
from wanshim.core.shared.gpu_memory import free_bytes

from .plan import VaeJob, frame_work

_FIRST = 0.1  # of the first call of a size, for comparing it
_AFTER = 0.004  # of the calls after it
_STRICT_TIME = 0.4  # of the framework's, at least
_FRAMES = 2  # the second is the first one with a past
_USABLE = 0.9  # of the free memory


@dataclass(slots=True, kw_only=True)
class CompareState:
    """Comparisons of calls of one size, and what followed from them.

    Args:
        dtype: in which they compute.
        laid: weights lie as the framework makes them. Else its own sums are channels last, and a norm of theirs adds
            in another order.
        compared: by the kind of call, what was found equal, in words; empty where nothing could be compared.
        unequal: the operators that were not: strict_cuda or strict.
        failed: why all ranks leave calls to the framework since one has failed; empty: none has.
        frames: how many latent frames are compared next.
        calls_left: until they are compared again.
    """

    dtype: torch.dtype
    laid: bool = True
    compared: dict[str, str] = field(default_factory=dict)
    unequal: set[str] = field(default_factory=set)
    failed: str = ""
    frames: int = _FRAMES
    calls_left: int = 1

    def frames_of(self, job: VaeJob) -> int:
        """Latent frames to compare: over ranks one for each of three, of which the second takes and gives."""
        return min(job.latent[2], max(self.frames, min(3, job.workers)))

    def passed(self, kind: str, text: str, job: VaeJob) -> None:
        """A comparison has found nothing unequal."""
        frames = self.frames_of(job)
        self.compared[kind] = text
        self.frames = 2 * frames
        work = 2 * frame_work(0, min(self.frames, job.latent[2]))  # the framework's and, over ranks, a short call
        self.calls_left = ceil(work * job.workers / (frame_work(0, job.latent[2]) * _STRICT_TIME * _AFTER))


class Comparison:
    """A result beside the framework's own."""

    def __init__(self, graph: Graph, framework: Framework, job: VaeJob, given: torch.Tensor) -> None:
        self._graph = graph
        self._framework = framework
        self._job = job
        self._given = given

    def most_frames(self, result: torch.Tensor, frames: int, start: float) -> str | None:
        """Compare the first `frames` latent frames, and more if that takes less than a tenth of the call.

        Args:
            result: the whole output.
            start: of the call, as `perf_counter` has it.

        Returns:
            What was found equal, in words; empty where memory does not suffice. None: it is not equal.
        """
        whole = self._job.latent[2]
        if result.is_cuda:
            torch.cuda.synchronize(result.device)
        begun = perf_counter()
        budget = _FIRST * (begun - start)
        text = self._frames(result, frames)
        took = perf_counter() - begun
        more = frames
        while more < whole and took * (1 + frame_work(0, more + 1) / frame_work(0, frames)) < budget:
            more += 1
        if text and more > frames:
            text = self._frames(result, more) or text
        return text

    def _frames(self, result: torch.Tensor, frames: int) -> str | None:
        whole = self._job.latent[2]
        if not self._has_memory(frames):
            return ""
        expected = self._framework.compute(self._graph.cut(self._given, 2, 0, frames))
        if _equal(result[:, :, slice(*self._graph.output_range(0, frames))], expected):
            return f"all {whole} latent frames" if frames == whole else f"the first {frames} of {whole} latent frames"
        del expected
        return None if frames == whole else self._frames(result, whole) or None

    def _has_memory(self, frames: int) -> bool:
        """Can the framework compute these frames beside what is held already?"""
        free = free_bytes(self._given.device)
        b, c, _, h, w = self._job.latent
        output = self._graph.output_shape((b, c, frames, h, w))
        plain = replace(self._job, strict=True, strict_cuda=False)  # as the framework computes it
        work = plain.working_bytes(self._graph, frames=1, chunk=1, first=False, keeps_history=True)
        work += max((self._scores(block, b, h * w) for block in self._graph.middle), default=0)
        return free is None or work + 3 * torch.Size(output).numel() * self._job.itemsize < _USABLE * free

    def _scores(self, block: object, frames: int, tokens: int) -> int:
        """Bytes that the framework's attention stores: all scores at once."""
        if not isinstance(block, Attention):
            return 0
        channels = block.qkv.in_channels
        return stored_values(frames, tokens, tokens, channels, in_parts=False) * self._job.itemsize


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Are the bits the same, but for those of what is not a number?

    Args:
        expected: may lack the last channels: some encoders return the mean alone.
    """
    found = found[:, : expected.shape[1]]
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(found, expected) or bool(((found == expected) | (found.isnan() & expected.isnan())).all())
