"""What `import wanshim` and `activate()` do not import. How long they take is measured in benchmarks/."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    "typer",
)


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
        "from wanshim.boot.plugin import activate_in_worker; activate_in_worker()",
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


def test_without_a_selection_nothing_is_put_on_the_meta_path() -> None:
    program = (
        "import sys; before = list(sys.meta_path)\nimport wanshim\nassert sys.meta_path == before\n"
        "wanshim.activate('none')\nassert sys.meta_path == before"
    )
    assert heavy_after(program) == []
