"""The contract kit passes a sound adapter and catches planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.testing.toy import site
from wanshim.testing import Contract, Failed, check

BLOCK = "toyframe.blocks:Block.forward"
SCALE = "toyframe.blocks:scale"
TENSOR_BLOCK = "toyframe.tensors:Block.forward"
IN_GRAPH = {"call": "toycalls:tensor_call", "graph": "toycalls:to_compile", "instance": "toycalls:tensor_block"}

TWICE = """
def twice(original, seam):
    return plus_ten(plus_ten(original, seam), seam)

"""
RAISES = """
def raises(original, seam):
    raise RuntimeError("no replacement today")

"""
WRAPT = """
def through_wrapt(original, seam):
    def wrapper(wrapped, instance, args, kwargs):
        if not seam.enter():
            return wrapped(*args, **kwargs)
        return wrapped(*args, **kwargs) + 10

    return wrapper

"""
# Its factory writes into the framework on the side: what comes back after deactivate is a copy.
COPIES = """
def copies(original, seam):
    import types
    from toyframe import blocks

    blocks.unused = types.FunctionType(blocks.unused.__code__, blocks.unused.__globals__)
    return plus_ten(original, seam)

"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


def contract(ability: str, **more: Any) -> Contract:
    given = {"call": "toycalls:call", "instance": "toycalls:block", "preload": (), **more}
    return Contract(feature=f"toyframe.{ability}", **given)


def faults(checked: Contract, *names: str) -> dict[str, str]:
    results = check(checked, names or None)
    return {result.check: result.found for result in results if isinstance(result, Failed)}


def test_sound_method_seam_passes_every_check(place: Path) -> None:
    site.write(place, {"sound": site.feature("sound", TENSOR_BLOCK, extra="in_graph=True,")})
    sound = contract("sound", **IN_GRAPH, preload=("torch",))
    few_orders = [name for name in sound.checks() if not name.startswith("order_") or name.endswith(("_AI", "_IADA"))]
    assert faults(sound, *few_orders) == {}  # the function seam below goes through all orders, without torch


def test_sound_function_seam_passes_every_check_that_it_gets(place: Path) -> None:
    site.write(place, {"sound": site.feature("sound", SCALE)})
    sound = contract("sound", call="toycalls:scaled", instance=None)
    checks = list(sound.checks())
    assert not {"instance_attribute_is_detected", "compiled_equals_eager"} & set(checks)
    checks.remove("launched_rank_has_it")  # the method seam above has it, and two ranks cost seconds
    assert faults(sound, *checks) == {}


def test_seam_that_patches_a_name_nobody_calls_is_caught(place: Path) -> None:
    site.write(place, {"wrong": site.feature("wrong", "toyframe.blocks:unused")})
    found = faults(contract("wrong"), "order_IA", "spawned_child_has_it")
    assert "one call went 0 times through toyframe.blocks:unused, not 1" in found["order_IA"]
    assert "applied in that process, not exercised" in found["spawned_child_has_it"]


def test_seam_that_patches_a_name_which_is_not_there_is_caught(place: Path) -> None:
    site.write(place, {"wrong": site.feature("wrong", "toyframe.blocks:Block.foward")})
    found = faults(contract("wrong"), "order_AI")
    assert "0 layers of wanshim at toyframe.blocks:Block.foward" in found["order_AI"]


def test_wrapt_wrapper_in_a_compiled_region_is_caught(place: Path) -> None:
    site.write(
        place,
        {"skipped": WRAPT + site.feature("skipped", TENSOR_BLOCK, replace="through_wrapt", extra="kind=Kind.WRAPT,")},
    )
    found = faults(contract("skipped", **IN_GRAPH, preload=("torch",)), "compiled_equals_eager", "order_AI")
    assert list(found) == ["compiled_equals_eager"]
    assert "the compiled region skips the patch" in found["compiled_equals_eager"]


def test_patch_that_unpatches_to_a_copy_is_caught(place: Path) -> None:
    site.write(place, {"copies": COPIES + site.feature("copies", BLOCK, replace="copies")})
    orders = ("order_IAD", "order_AID", "order_AIDA")
    found = faults(contract("copies"), "originals_back_by_identity", *orders)
    assert "these are not the objects of before: toyframe.blocks.unused" in found["originals_back_by_identity"]
    for order in orders:
        assert "toyframe.blocks.unused" in found[order]


def test_name_that_one_patched_module_takes_from_another_is_no_copy(place: Path) -> None:
    """Under order_AID the second module is given the first one's replacement, which is not its original."""
    site.write(place, {"sound": site.feature("sound", SCALE, "toyframe.uses:twice")})
    calls = {SCALE: 2, "toyframe.uses:twice": 1}
    sound = contract("sound", call="toycalls:scaled_twice", calls=calls, instance=None)
    assert faults(sound, "order_AI", "order_AID", "order_AIDA", "order_IAD") == {}


def test_machinery_that_restores_a_copy_is_caught(place: Path) -> None:
    """The same fault in the engine instead of the adapter: `plant` runs before the check."""
    site.write(place, {"sound": site.feature("sound", BLOCK)})
    (place / "plant.py").write_text(
        "import types\n"
        "from wanshim.patching import transaction\n"
        "def restore(self):\n"
        "    copy = types.FunctionType(self.original.__code__, self.original.__globals__)\n"
        "    setattr(self.owner, self.name, copy)\n"
        "    return True\n"
        "transaction._Place.restore = restore\n"
    )
    caught_by = ("originals_back_by_identity", "order_IAD", "order_AID", "order_AIDA")
    found = faults(contract("sound", preload=("plant",)), *caught_by)
    for check_name in caught_by:
        assert "toyframe.blocks:Block.forward" in found[check_name]


def test_hook_that_raises_is_caught_and_does_not_break_the_import(place: Path) -> None:
    site.write(place, {"raising": RAISES + site.feature("raising", BLOCK, replace="raises")})
    found = faults(contract("raising"), "order_AI", "applied_but_never_called_is_reported")
    assert "toyframe.raising is failed: RuntimeError: no replacement today" in found["order_AI"]
    assert "Traceback" not in found["order_AI"]
    assert "failed" in found["applied_but_never_called_is_reported"]


def test_double_wrap_is_caught(place: Path) -> None:
    site.write(place, {"twice": TWICE + site.feature("twice", BLOCK, replace="twice")})
    found = faults(contract("twice"), "order_IA")
    assert f"one call went 2 times through {BLOCK}, not 1" in found["order_IA"]


def test_check_that_gives_no_answer_has_failed(place: Path) -> None:
    site.write(place, {"sound": site.feature("sound", BLOCK)})
    (place / "toycalls.py").write_text("import os\n\ndef call():\n    os._exit(3)\n")
    found = faults(contract("sound", graph=None, instance=None), "order_IA")
    assert "no answer" in found["order_IA"] or "died" in found["order_IA"]
