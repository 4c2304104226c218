"""What `import wanshim` and `activate()` do not import. How long they take is measured in benchmarks/."""

from __future__ import annotations

import subprocess
import sys

import pytest

from wanshim.select import catalog

HEAVY = (
    "torch",
    "numpy",
    "diffsynth",
    "fastvideo",
    "vllm",
    "vllm_omni",
    "diffusers",
    "accelerate",
    "rich",
    "click",
)


# What `activate()` may import of Python's own modules by name; the rest of them come along with these.
ASKED_FOR = {"ast", "atexit", "copy", "contextvars", "dataclasses", "inspect", "threading", "weakref"}
# A decision, a warning or a report needs these, and a program may never come to one.
DEFERRED = {"hashlib", "socket", "json", "logging", "traceback", "datetime", "yaml", "wrapt", "packaging"}
# wanshim's own, beside the packages of adapters and the files in them that hold a feature.
OWN = {
    "wanshim",
    "wanshim.activation",
    "wanshim.advice",
    "wanshim.select.catalog",
    "wanshim.core",
    "wanshim.core.ranks",
    "wanshim.core.ranks.agreement",
    "wanshim.core.shared",
    "wanshim.core.shared.fallback",
    "wanshim.core.shared.forks",
    "wanshim.core.shared.text",
    "wanshim.errors",
    "wanshim.hand_over",
    "wanshim.select.features",
    "wanshim.launch",
    "wanshim.patching",
    "wanshim.patching.feature",
    "wanshim.patching.hooks",
    "wanshim.undo",
    "wanshim.patching.pipeline_call",
    "wanshim.patching.fast_forward",
    "wanshim.patching.strict_steps",
    "wanshim.patching.vae_method",
    "wanshim.patching.probe",
    "wanshim.patching.seam",
    "wanshim.patching.transaction",
    "wanshim.reporting",
    "wanshim.settings",
    "wanshim.values",
    "wanshim.patching.verdict",
    "wanshim.select",
    "wanshim.adapters",
    "wanshim.adapters.diffusers.placement",
    "wanshim.adapters.diffsynth.kept_blocks",
    "wanshim.adapters.diffsynth.training_road",
    "wanshim.adapters.fastvideo.conditioning",
    "wanshim.adapters.fastvideo.text_encoding",
    "wanshim.adapters.fastvideo.wan_forks",
    *(f"wanshim.adapters.{name}.vae" for name in ("diffsynth", "diffusers", "fastvideo", "vllm_omni")),
}


def imported_by(program: str) -> set[str]:
    """What a fresh Python holds after `program` and did not before, the start of a virtual environment left out."""
    look = f"import sys; before = set(sys.modules)\n{program}\nprint(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def heavy_after(program: str) -> list[str]:
    """Which of HEAVY a fresh Python holds after `program`."""
    look = f"\nimport sys\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program + look], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "program",
    [
        "import wanshim",
        "import wanshim; assert wanshim.activate().active",
        "import wanshim; wanshim.activate('all'); wanshim.deactivate()",
        "import wanshim; wanshim.activate('all'); assert wanshim.report().rows",
        "import wanshim; wanshim.activate(strict=True)",
        "from wanshim.launch.boot.plugin import activate_in_worker; activate_in_worker()",
    ],
)
def test_nothing_heavy_is_imported(program: str) -> None:
    assert heavy_after(program) == []


def test_activating_does_not_ask_pips_metadata() -> None:
    """It costs as much as all the rest of `activate`; an adapter asks it when it runs."""
    program = "import sys, wanshim; wanshim.activate('all'); print('importlib.metadata' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_the_proof_can_fail() -> None:
    assert heavy_after("import wanshim, rich") == ["rich"]


def test_importing_wanshim_imports_nothing_but_itself() -> None:
    program = "import sys; before = set(sys.modules)\nimport wanshim\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    own = {"wanshim", "__future__", "typing", "collections", "collections.abc"}
    assert "wanshim" in done.stdout.split()
    assert {name.split(".")[0] for name in done.stdout.split()} - own <= set(sys.stdlib_module_names)


@pytest.mark.slow
def test_public_names_are_those_of_core_and_are_looked_up_when_they_are_used() -> None:
    pytest.importorskip("torch")
    program = """
import sys, wanshim
assert set(wanshim.__all__) <= set(dir(wanshim)) and not hasattr(wanshim, "no_such_name")
assert "torch" not in sys.modules and "wanshim.core" not in sys.modules
from wanshim import *
from wanshim.core import decoding, encoding, model_split, training
print(wanshim.split_model is model_split.split_model, wanshim.encode_once is encoding.encode_once)
print(parallelize_decode is decoding.parallelize_decode, StepAccounting is training.StepAccounting)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True"] * 4, done.stderr


@pytest.mark.parametrize("selected", ["auto", "all"])
def test_activating_imports_its_own_budget_of_modules_and_no_third_party(selected: str) -> None:
    found = imported_by(f"import wanshim; wanshim.activate({selected!r})")
    own = {name for name in found if name.split(".")[0] == "wanshim"}
    known = catalog.discover()
    features = {f"wanshim.adapters.{name}" for name in (*known.frameworks, *known.features)}
    assert own <= OWN | features
    assert {name.split(".")[0] for name in found - own} <= set(sys.stdlib_module_names)
    assert found & DEFERRED == set()


def test_activating_imports_no_more_of_the_standard_library_than_it_asks_for() -> None:
    found = imported_by("import wanshim; wanshim.activate()")
    asked = imported_by("import " + ", ".join(sorted(ASKED_FOR | {"typing", "functools", "pathlib", "importlib.util"})))
    extra = {name for name in found - asked if name.split(".")[0] != "wanshim"}
    assert {name for name in extra if not name.startswith("_")} <= {"collections.abc", "re", "gc"}


def test_a_feature_that_is_put_in_imports_what_was_deferred() -> None:
    """So that the budget above is kept by waiting, not by a double that never decides."""
    found = imported_by("import wanshim; wanshim.activate('all'); str(wanshim.report())")
    assert {"wanshim.select.decision", "wanshim.select.matrix", "yaml"} <= found


def test_without_a_selection_nothing_is_put_on_the_meta_path() -> None:
    program = (
        "import sys; before = list(sys.meta_path)\nimport wanshim\nassert sys.meta_path == before\n"
        "wanshim.activate('none')\nassert sys.meta_path == before"
    )
    assert heavy_after(program) == []
