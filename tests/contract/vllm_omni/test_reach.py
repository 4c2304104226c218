"""Whether the installed vLLM-Omni's stage process loads plugins, read from its real source."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

from wanshim.doctor.process_coverage import findings, here


def test_stage_process_is_named_in_just_the_releases_that_load_no_plugins_there() -> None:
    release = Version(version("vllm-omni")).release[:2]
    named = "stage_process_loads_no_plugins" in [finding.name for finding in findings(here())]
    assert named == ((0, 20) <= release < (0, 28))
