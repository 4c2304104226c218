"""The one fork server of the test process: it holds what the frameworks depend on, the command line and what ranks run
of wanshim's core, and nothing of a framework. A module that an environment lacks is left out."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
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
    "typer._adapters",
    "wanshim.cli.main",
    "wanshim.core.decoding",
    "wanshim.core.encoding",
    "wanshim.core.sequence",
    "wrapt",
    "tests.frozen",
]


def forking() -> ForkServerContext:
    """A context whose processes are forks of that server, the same for all tests: it takes ten seconds to start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:  # a server keeps the environment that it starts in
        for name in [name for name in os.environ if name.startswith(("WANSHIM_", "DIFFSYNTH_"))]:
            patch.delenv(name)
        forkserver.ensure_running()
    return context
