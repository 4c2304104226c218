"""The one fork server of the tests: it holds what the frameworks depend on, the command line and what ranks run
of wanshim's core, and nothing of a framework. A module that an environment lacks is left out."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

import pytest

PRELOAD = [
    "torch._inductor.compile_fx",
    "transformers.modeling_utils",
    "accelerate",
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "einops._torch_specific",
    "ftfy",
    "imageio",
    "modelscope",
    "pandas",
    "peft",
    "pytest",
    "safetensors",
    "torchvision",
    "wanshim.cli.main",
    "wanshim.core.decoding",
    "wanshim.core.encoding",
    "wanshim.core.sequence",
    "wrapt",
    "tests.frozen",
]


def start() -> str:
    """The address of the server, which is started unless it runs, and ends with this process."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:  # a server keeps the environment that it starts in
        for name in [name for name in os.environ if name.startswith(("WANSHIM_", "DIFFSYNTH_"))]:
            patch.delenv(name)
        server.set_forkserver_preload(PRELOAD)
        server.ensure_running()
    return str(server._forkserver_address)


def share(address: str) -> None:
    """Let this process take its forks from the server of another: pytest-xdist's workers take theirs from the one of
    the process that started them, for each server imports for ten seconds."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # forks hold it; the server waits for its starter
    server.ensure_running = resource_tracker.ensure_running


def forking() -> ForkServerContext:
    """A context whose processes are forks of that server, the same for all tests: it takes ten seconds to start."""
    start()
    return multiprocessing.get_context("forkserver")
