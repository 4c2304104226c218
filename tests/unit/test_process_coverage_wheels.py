"""Which releases of vLLM-Omni have a stage process that loads no plugins, read from the wheels that users install.

The wheels come as those of `tools/matrix.py verify` do, through the user's own index settings; nothing is installed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.drift.library import Library
from wanshim.doctor.process_coverage import STAGE_PROCESS as MODULE
from wanshim.doctor.process_coverage import Environment, findings, stage_process_of
from wanshim.patching import Framework

# It came with 0.20.0, and has called vLLM-Omni's plugin loader since 0.28.0, whose first candidate did not yet.
STAGE_PROCESS = {
    "0.18.0": "none",
    "0.20.0": "loads no plugins",
    "0.24.0": "loads no plugins",
    "0.26.0": "loads no plugins",
    "0.28.0rc1": "loads no plugins",
    "0.28.0": "loads plugins",
    "0.30.0": "loads plugins",
}
pytestmark = [pytest.mark.slow, pytest.mark.sweep]  # seven wheels of the index


@pytest.fixture(scope="module")
def stage_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str | None]:
    frameworks = {"vllm_omni": Framework("vllm_omni", "vllm-omni")}
    library = Library(frameworks, tmp_path_factory.mktemp("wheels"), online=True)
    return lambda version: stage_process_of(library.find(f"vllm-omni=={version}").source)


@pytest.mark.parametrize(("version", "known"), STAGE_PROCESS.items())
def test_stage_process_is_named_in_just_the_wheels_that_load_no_plugins_there(
    stage_process: Callable[[str], str | None], version: str, known: str
) -> None:
    text = stage_process(version)
    assert (text is None) == (known == "none")
    assert text is None or "def run_" in text or "class " in text  # the module itself, not an empty file
    seen = Environment(versions={"vllm": version, "vllm_omni": version}, stage_process=text)
    named = [finding.found for finding in findings(seen) if finding.name == "stage_process_loads_no_plugins"]
    assert named == [f"{MODULE} of vllm-omni {version} loads no plugins"] * (known == "loads no plugins")
