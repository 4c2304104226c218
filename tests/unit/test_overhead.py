"""benchmarks/overhead.py sees what it says it measures, and measures every kind of seam that an adapter has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from wanshim.select import catalog

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"


@pytest.fixture(scope="module")
def overhead() -> ModuleType:
    spec = importlib.util.spec_from_file_location("overhead", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))  # it is run as a script, which finds what lies beside it
        spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_memory_is_that_of_the_fresh_process_whatever_its_parent_held(overhead: ModuleType) -> None:
    own = bytearray(b"x") * (64 << 20)  # a peak that a child's ru_maxrss would inherit
    nothing = overhead.in_fresh_interpreters("pass", "", repeats=1)
    held = overhead.in_fresh_interpreters("held = b'x' * (16 << 20)", "", repeats=1)
    dropped = overhead.in_fresh_interpreters("held = b'x' * (16 << 20); del held", "", repeats=1)
    assert len(own) == 64 << 20
    assert nothing["resident_KiB"] < 512
    assert 16 << 10 <= held["resident_KiB"] < 17 << 10
    assert dropped["resident_KiB"] < 1024
    assert 15 << 10 <= dropped["peak_KiB"] < 17 << 10


def test_every_kind_of_seam_that_an_adapter_has_is_measured(overhead: ModuleType) -> None:
    measured = {kind for _, _, kind in overhead.CALLS.values()}
    features = catalog.discover().features.values()
    assert {kind for feature in features for kind in overhead.kinds_of(feature.seams)} <= measured


def test_each_measured_call_goes_through_its_seams(overhead: ModuleType) -> None:
    pytest.importorskip("torch", reason="a seam in a graph asks torch whether it is compiled")
    names = vars(overhead.make_target())
    for name, (statement, seams, _) in overhead.CALLS.items():
        states = [overhead.SeamState(seam) for seam in seams]
        for state in states:
            overhead.transaction.put_in([state])
        plain = eval(statement, {**names})
        for state in reversed(states):
            overhead.transaction.take_out(state)
        assert plain in (1, True)
        assert [state.calls for state in states] == ([0] if name == "value" else [1] * len(states)), name
