"""What a process that nobody activated does: nothing, unless its parent or a variable asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

import wanshim
from wanshim.launch import start

PLUGIN = """
from wanshim.launch.boot.plugin import activate_in_worker
activate_in_worker()
import wanshim
print(*(f"{row.feature}:{row.selected_by}" for row in wanshim.report().selected))
"""
LOOK = "import wanshim; print(*(f'{row.feature}:{row.selected_by}' for row in wanshim.report().selected))"
FIX = "diffsynth.patchify"
WITH_DIFFSYNTH = pytest.mark.skipif(find_spec("diffsynth") is None, reason="diffsynth is not installed")


def selected(program: str = PLUGIN, **variables: str) -> list[str]:
    """Of a child that inherits this process's environment."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_plugin_that_nobody_asked_for_selects_nothing() -> None:
    assert selected() == []
    assert selected(WANSHIM_STRICT="1", LOCAL_RANK="0") == []


@pytest.mark.parametrize("name", ["WANSHIM_FEATURES", "WANSHIM_RUN_PREFIX"])
def test_plugin_acts_where_the_features_variable_or_wanshim_run_asks_for_it(name: str) -> None:
    assert f"{FIX}:auto" in selected(**{name: "auto"})


@WITH_DIFFSYNTH
def test_plugin_acts_where_a_variable_switches_a_feature_on() -> None:
    found = selected(WANSHIM_VAE_MODE="tile")
    assert {f"{FIX}:auto", "diffsynth.vae_decode:WANSHIM_VAE_MODE"} <= set(found)


def test_plugin_is_off_under_disable_whoever_asks_for_it() -> None:
    wanshim.activate()
    assert selected(WANSHIM_DISABLE="1") == []


@WITH_DIFFSYNTH
def test_worker_of_an_activated_parent_carries_what_the_parent_carries() -> None:
    wanshim.activate(f"none,{FIX}")
    assert selected(WANSHIM_FEATURES="all") == [f"{FIX}:{FIX}"]  # the argument beats the variable in both
    wanshim.activate("none")
    assert selected() == []


@WITH_DIFFSYNTH
def test_worker_of_a_parent_activated_by_the_environment_reads_its_own_environment() -> None:
    wanshim.activate()
    assert f"{FIX}:auto" in selected()
    assert selected(WANSHIM_FEATURES=f"none,{FIX}") == [f"{FIX}:{FIX}"]


def test_worker_started_after_deactivate_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wanshim.activate()
    wanshim.deactivate()
    assert selected() == []
    wanshim.activate()
    monkeypatch.setenv("WANSHIM_DISABLE", "1")
    wanshim.activate()
    monkeypatch.delenv("WANSHIM_DISABLE")
    assert selected() == []


@WITH_DIFFSYNTH
def test_child_under_wanshim_run_carries_what_its_parent_was_activated_with() -> None:
    """And a `wanshim run` in between is a new start."""
    variables = start.environment("all")
    wanshim.activate(f"none,{FIX}")
    assert selected(LOOK, **variables) == [f"{FIX}:{FIX}"]
    assert "WANSHIM_INHERITED" not in start.environment("all")
