"""README's line for vLLM-Omni: the plugin patches the worker of a server that is started with the variable alone.

`vllm serve` would load a pipeline onto a GPU; in its place stands a server of vLLM-Omni's own executor and
worker process.
That `vllm serve` takes the options of the line is read from vLLM-Omni's own code.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.contract import readme
from tests.contract.vllm_omni.serving import PROGRAM
from tests.kit.pytest_tests import verdict_here
from wanshim.patching.verdict import Verdict

FEATURE = "vllm_omni.vae_decode"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(verdict_here(FEATURE) is not Verdict.PATCH, reason="this release has no distributed Wan VAE"),
]


def test_variable_of_the_command_patches_the_spawned_worker(tmp_path: Path) -> None:
    command = readme.commands()["vLLM-Omni"]
    (tmp_path / "answers").mkdir()
    (tmp_path / "serve.py").write_text(PROGRAM)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text(f'#!/bin/sh\nexec "{sys.executable}" serve.py\n')
    (tmp_path / "bin" / "vllm").chmod(0o755)
    readme.run(tmp_path, command)
    found = json.loads((tmp_path / "answers" / "parent.json").read_text())
    assert not found["active"]
    assert found["worker"]["state"] == "applied", found


def test_vllm_serve_takes_the_options_of_the_command() -> None:
    spec = find_spec("vllm_omni")
    assert spec is not None
    assert spec.origin is not None
    served = (Path(spec.origin).parent / "entrypoints" / "cli" / "serve.py").read_text(encoding="utf-8")
    options = [word for word in readme.commands()["vLLM-Omni"].split() if word.startswith("--")]
    assert options == ["--omni", "--vae-patch-parallel-size"]
    assert [option for option in options if f'"{option}"' not in served] == []
