"""Scenarios in processes that have imported neither wanshim nor a framework.

Each runs in a fork of a server that holds the frameworks' big dependencies and nothing of theirs: a fresh state,
without the ten seconds that torch takes to import.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.forking import forking


def fresh(scenario: Callable[..., Any], *arguments: Any) -> Any:
    """What `scenario`, a module-level function, returns in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        return pool.submit(_guarded, scenario, *arguments).result(timeout=200)


def _guarded(scenario: Callable[..., Any], *arguments: Any) -> Any:
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == "wanshim"]:
        del sys.modules[name]  # the core, which patches nothing
    early = sorted({name.split(".")[0] for name in sys.modules} & {"diffsynth", "fastvideo", "vllm_omni"})
    if early:
        raise AssertionError(f"{', '.join(early)} came with the server: the scenario would not be fresh")
    return scenario(*arguments)
