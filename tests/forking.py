"""The one fork server of the test process, holding just the modules that a test wants to find imported."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


def context_with(preload: list[str]) -> ForkServerContext:
    """A context whose processes fork from a server with `preload` in it, and nothing of an earlier test's."""
    preload = [*preload, "tests.frozen"]
    server = forkserver._forkserver
    if server._preload_modules != preload:
        server._stop()  # private, and the only way to have a server anew: a fork cannot forget an import
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    return context
