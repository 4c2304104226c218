"""Digests of tensors on GPUs by one kernel: equal to those of `digest.py`, for weights that are compared at each call.

The separate operators there take three launches for 8 MB. A call's first forward waits for them: 0.18 s for 26 GiB on
an H200, 0.015 s for this kernel (benchmarks/results/generate_overhead_1xH200.json).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .digest import BLOCK, FACTORS, digests
from .fallback import cause_of
from .kernel_compiler import COMPILER, Kernel
from .kernel_launch import launch, noted
from .optional_triton import tl, triton

logger = logging.getLogger("wanshim.kernels")
_AT_ONCE, _ROUNDS = 1024, 64  # words of a program: so many, so many times
_OF_PROGRAM = _AT_ONCE * _ROUNDS
_failed: set[torch.device] = set()


def digests_by_kernel(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The digest of each tensor, as `digests`: of those on a GPU by one kernel, once that is compiled. The first call
    for a GPU asks for it. One that is not contiguous, or no multiple of 32 bits, is left to `digests`.

    Args:
        tensors: as there.
    """
    found: dict[int, int] = {}
    for device in {tensor.device for tensor in tensors if tensor.is_cuda} - _failed:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device and _has_words(tensor)]
        if not places or triton is None:
            continue
        try:
            if _kernel(device).done.is_set():
                with torch.cuda.device(device):
                    found |= zip(places, sums([tensors[place] for place in places]), strict=True)
        except torch.OutOfMemoryError:
            pass  # the operators need no tables, and the next call may have room
        except Exception as error:  # a kernel that this machine cannot compile or run
            logger.debug("digests by torch's operators on %s: %s", device, cause_of(error))
            _failed.add(device)
    rest = [place for place in range(len(tensors)) if place not in found]
    found |= zip(rest, digests([tensors[place] for place in rest]), strict=True)
    return [found[place] for place in range(len(tensors))]


def sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The digests of tensors on one device, each contiguous and of whole words of 32 bits."""
    device, words = tensors[0].device, np.array([tensor.nbytes // 4 for tensor in tensors])
    programs = -(-words // _OF_PROGRAM)
    of = np.repeat(np.arange(len(tensors)), programs)
    first = (np.arange(len(of)) - np.repeat(programs.cumsum() - programs, programs)) * _OF_PROGRAM
    addresses = np.array([tensor.data_ptr() for tensor in tensors])
    tables = [torch.from_numpy(each).to(device) for each in (addresses, words, of, first)]
    out = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    _launch(len(of), *tables, out)
    return out.tolist()


def _has_words(tensor: torch.Tensor) -> bool:
    """Whether its memory is one run of words of 32 bits, as `digest.py` reads it."""
    fits = tensor.element_size() >= 4 or not tensor.nbytes % 4
    return fits and tensor.nbytes > 0 and tensor.is_contiguous() and not tensor.data_ptr() % 4


@cache
def _kernel(device: torch.device) -> Kernel:
    """The kernel for a device, on the way to be compiled."""
    with noted() as launches:
        _launch(1, *(torch.empty(1, dtype=torch.int64, device="meta") for _ in range(5)))
    return COMPILER.start(launches, device, awaited=False)[0]


def _launch(programs: int, *tables: torch.Tensor) -> None:
    launch(_digest, (programs,), *tables, AT_ONCE=_AT_ONCE, ROUNDS=_ROUNDS, WHOLE=BLOCK, FIRST=FACTORS[0],
           SECOND=FACTORS[1], num_warps=4)  # fmt: skip


if TYPE_CHECKING:  # Triton reads its functions as source; to a type checker their arguments mean nothing
    _digest: Any
elif triton is not None:

    @triton.jit
    def _digest(
        ADDRESS, WORDS, OF, START, OUT, AT_ONCE: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
        FIRST: tl.constexpr, SECOND: tl.constexpr,
    ):  # fmt: skip
        """Each program adds the digest of its words to that of their tensor. `WHOLE`: words that `digest.py` sums up
        before it multiplies by a number for them; a program has words of one such block alone."""
        tensor, start = tl.load(OF + tl.program_id(0)), tl.load(START + tl.program_id(0))
        words = tl.load(ADDRESS + tensor).to(tl.pointer_type(tl.int32))
        count, total = tl.load(WORDS + tensor), tl.zeros((AT_ONCE,), tl.int64)
        for each in range(ROUNDS):
            at = start + each * AT_ONCE + tl.arange(0, AT_ONCE)
            x = (at % WHOLE + 1).to(tl.uint64) << 32
            x = (x ^ (x >> 30)) * FIRST
            x = (x ^ (x >> 27)) * SECOND
            factor = ((x ^ (x >> 31)) | 1).to(tl.int64, bitcast=True)
            total += tl.load(words + at, mask=at < count, other=0).to(tl.int64) * factor
        tl.atomic_add(OUT + tensor, tl.sum(total) * (1 + start // WHOLE * (2 * WHOLE)), sem="relaxed")
