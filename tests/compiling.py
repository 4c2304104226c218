"""Graphs of `CompiledBlocks` without inductor, for tests that ask about the graphs and not about its kernels."""

from __future__ import annotations

import pytest


def use_aot_eager(patch: pytest.MonkeyPatch) -> None:
    """Graphs are traced and differentiated as ever and run by eager's kernels: g++ takes a second for each of
    inductor's."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    patch.setattr(compile_fx, "compile_fx", aot_eager)
