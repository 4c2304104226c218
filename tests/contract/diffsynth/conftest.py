"""Fixtures of DiffSynth's contract tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def _blocks_are_traced_once() -> Iterator[None]:
    """Most runs plan for the same tiny block, and a trace of it takes as long as their first step: torch's operators
    on shapes are written in Python."""
    from diffsynth.models import wan_video_dit

    from wanshim.adapters.diffsynth.splitting import job, micro_batch

    trace, found = job.micro_batch, {}

    def is_code(value: Any) -> bool:
        return callable(value) or isinstance(value, bool)  # DiffSynth's flags of kernels

    def trace_once(pipe: Any, tokens: int, chunk: int | None, **changes: Any) -> Any:
        block = pipe.dit.blocks[0]
        modules = list(block.named_modules())
        if any("forward" in vars(module) for _, module in modules):  # this run's own
            return trace(pipe, tokens, chunk, **changes)
        key = (
            (tokens, chunk, *changes.items(), pipe.torch_dtype),
            tuple(value for _, value in sorted(vars(pipe.dit).items()) if isinstance(value, int)),
            tuple((name, type(module), type(module).forward, module.extra_repr()) for name, module in modules),
            tuple((t.shape, t.dtype, t.requires_grad) for t in (*block.parameters(), *block.buffers())),
            tuple(value for code in (wan_video_dit, micro_batch) for value in vars(code).values() if is_code(value)),
        )
        if key not in found:
            found[key] = trace(pipe, tokens, chunk, **changes)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "micro_batch", trace_once)
        yield
