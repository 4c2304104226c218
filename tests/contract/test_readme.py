"""Every command of README has a test that runs it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import readme
from wanshim.core.shared.files import prompt_cache

RUN_BY = {
    "DiffSynth-Studio": "tests/contract/diffsynth/test_readme.py",
    "diffusers": "tests/contract/diffusers/test_readme.py",
    "FastVideo": "tests/contract/fastvideo/test_readme.py",
    "vLLM-Omni": "tests/contract/vllm_omni/test_readme.py",
    "pip install .": "tests/contract/test_wheel.py",  # of the sdist, which is the checkout
    "wanshim doctor": "tests/contract/test_wheel.py",
    "make demo": "tests/contract/test_readme.py",
    "make test": ".github/workflows/checks.yml",
    "pip uninstall wanshim": "tests/contract/test_wheel.py",
    "rm -rf ~/.cache/wanshim": "tests/contract/test_readme.py",
}


def test_every_command_is_named_with_the_file_that_runs_it() -> None:
    assert [*readme.commands(), *readme.blocks()] == list(RUN_BY)
    for command, name in RUN_BY.items():
        text = (readme.ROOT / name).read_text(encoding="utf-8")
        looked_up = f'readme.commands()["{command}"]'
        assert looked_up in text or command.split()[-1] in text or "dist.use(" in text, command


def test_folder_that_the_removal_takes_away_is_that_of_the_prompts() -> None:
    (command,) = (line for line in readme.blocks() if line.startswith("rm -rf "))
    assert prompt_cache().is_relative_to(Path(command.split()[-1]).expanduser())


def test_make_demo_runs_the_demo_in_an_environment_of_its_own() -> None:
    """What the demo does is tested with each framework; here, that the command comes to it."""
    said = subprocess.run(["make", "-n", "demo"], cwd=readme.ROOT, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == ".venv/demo/bin/wanshim demo"


@pytest.mark.slow
def test_python_of_readme_runs_as_it_stands() -> None:
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = (part.partition("```")[0] for part in text.split("```python\n")[1:])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=False)
    assert done.returncode == 0, done.stderr
    assert "diffsynth.progress" in done.stdout


def test_names_of_the_python_api_exist() -> None:
    import wanshim

    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    named = {part.split("(")[0] for part in text.split("`wanshim.")[1:]}
    assert {"shard_sequence", "split_model"} <= named
    assert [name for name in named if not hasattr(wanshim, name)] == []
    page = (readme.ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    targets = [line.removeprefix("::: ") for line in page.splitlines() if line.startswith("::: ")]
    for target in targets:
        module, _, name = target.rpartition(".")
        assert hasattr(importlib.import_module(module), name), target
    assert set(wanshim.__all__) == {target.rpartition(".")[2] for target in targets}
