"""Whose code makes a call within a pipeline's call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from wanshim.core.generation.own_code import called_by_program


def code_of(module: str) -> Callable[..., Any]:
    """A function of that module that calls what it is given."""
    namespace: dict[str, Any] = {"__name__": module}
    exec("def call(inner, *others):\n    return inner(*others)", namespace)
    found: Callable[..., Any] = namespace["call"]
    return found


def run(chain: list[str]) -> bool:
    """Answer from within functions of these modules, each of which calls the next."""
    first, *others = [*map(code_of, chain), partial(called_by_program, "diffusers", run.__code__)]
    return bool(first(*others))


@pytest.mark.parametrize(
    ("chain", "is_the_programs"),
    [
        (["diffusers.pipelines.wan"], False),
        (["diffusers.pipelines.wan", "torch.nn"], False),
        (["diffusers.pipelines.wan", "__main__"], True),  # a callback that calls a model
        (["diffusers.pipelines.wan", "__main__", "torch.nn"], True),
        (["diffusers.pipelines.wan", "__main__", "diffusers.hooks"], False),  # around a step of the framework's
        (["__main__"], False),  # a loop of the program's own
        (["__main__", "diffusers.pipelines.wan"], False),  # a subclass
    ],
)
def test_of_program_and_framework_the_nearer_one_makes_the_call(chain: list[str], is_the_programs: bool) -> None:
    assert run(chain) is is_the_programs
