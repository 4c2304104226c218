"""The contract kit passes a sound adapter and catches planted faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit import Contract, Failed, check, contract_tests, pytest_tests
from tests.kit.contract import FRESH
from tests.unit.testing.toy import site
from wanshim.errors import WanshimError
from wanshim.patching.verdict import Verdict

pytestmark = pytest.mark.slow  # each check is a fresh process

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
# Its factory writes into the framework on the side: what comes back after deactivate is a copy.
COPIES = """
def copies(original, seam):
    import types
    from toyframe import blocks

    blocks.unused = types.FunctionType(blocks.unused.__code__, blocks.unused.__globals__)
    return plus_ten(original, seam)

"""
# Its factory gives the original other code: the same object comes back, and does something else.
ALTERS = """
def alters(original, seam):
    replacement = plus_ten(lambda *args: 0, seam)
    original.__code__ = (lambda self, x: x + 2).__code__
    return replacement

"""
# Engines with a fault, as a module that `prepare` imports before the check.
TAKES_STRANGERS_OFF = """
from wanshim.patching import transaction


def restore(self):
    setattr(self.owner, self.name, self.original)
    return True


transaction._Place.restore = restore
"""
SEES_NO_STRANGER = """
from wanshim.patching import transaction

transaction.in_place = lambda state: True
"""
SEES_NO_INSTANCE = """
from wanshim.patching import transaction

transaction.covered_on_an_instance = lambda state: None
"""
WATCHES_UNASKED = """
from wanshim import activation

activation.Activation._watched = lambda self: ["toyframe.blocks"]
"""
# An adapter that imports its framework at the top takes whatever has the name.
IMPORTS = """
import toyframe.blocks

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


@pytest.mark.sweep
@pytest.mark.parametrize(
    "names",
    [
        ("instance_attribute_is_detected", "compiled_equals_eager", "order_AI"),  # what a function seam has not
        (),
    ],
    ids=["own", "all"],
)
def test_sound_method_seam_passes_every_check(place: Path, names: tuple[str, ...]) -> None:
    site.write(place, {"sound": site.feature("sound", TENSOR_BLOCK, extra="in_graph=True,")})
    sound = contract("sound", **IN_GRAPH, preload=("torch",))
    few_orders = [name for name in sound.checks() if not name.startswith("order_") or name.endswith(("_AI", "_IADA"))]
    assert set(names) < set(few_orders)
    assert faults(sound, *(names or few_orders)) == {}  # the function seam below goes through all orders, without torch


def test_sound_function_seam_passes_every_check_that_it_gets(place: Path) -> None:
    site.write(place, {"sound": site.feature("sound", SCALE)})
    sound = contract("sound", call="toycalls:scaled", instance=None)
    checks = list(sound.checks())
    assert not {"instance_attribute_is_detected", "compiled_equals_eager"} & set(checks)
    assert {"no_instance_is_needed", "no_graph_is_needed"} <= set(checks)
    checks.remove("launched_rank_has_it")  # the method seam above has it, and a rank costs seconds
    assert faults(sound, *checks) == {}


@pytest.mark.sweep
def test_seam_that_patches_a_name_nobody_calls_is_caught(place: Path) -> None:
    site.write(place, {"wrong": site.feature("wrong", "toyframe.blocks:unused")})
    found = faults(contract("wrong"), "order_IA", "spawned_child_has_it")
    assert "one call went 0 times through toyframe.blocks:unused, not 1" in found["order_IA"]
    assert "applied in that process, not called" in found["spawned_child_has_it"]


def test_seam_that_patches_a_name_which_is_not_there_is_caught(place: Path) -> None:
    site.write(place, {"wrong": site.feature("wrong", "toyframe.blocks:Block.foward")})
    found = faults(contract("wrong"), "order_AI")
    assert "0 layers of wanshim at toyframe.blocks:Block.foward" in found["order_AI"]


@pytest.mark.sweep
def test_wrapt_wrapper_in_a_compiled_region_is_caught(place: Path) -> None:
    site.write(
        place,
        {"skipped": site.feature("skipped", TENSOR_BLOCK, extra="kind=Kind.WRAPT,")},
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


@pytest.mark.sweep
def test_name_that_one_patched_module_takes_from_another_is_no_copy(place: Path) -> None:
    """Under order_AID the second module is given the first one's replacement, which is not its original."""
    site.write(place, {"sound": site.feature("sound", SCALE, "toyframe.uses:twice")})
    calls = {SCALE: 2, "toyframe.uses:twice": 1}
    sound = contract("sound", call="toycalls:scaled_twice", calls=calls, instance=None)
    assert faults(sound, "order_AI", "order_AID", "order_AIDA", "order_IAD") == {}


@pytest.mark.sweep
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
    found = faults(contract("sound", prepare=("plant",)), *caught_by)
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


def planted(place: Path, engine: str) -> Contract:
    site.write(place, {"sound": site.feature("sound", BLOCK)})
    (place / "plant.py").write_text(engine)
    return contract("sound", prepare=("plant",))


def test_original_that_comes_back_with_other_code_is_caught(place: Path) -> None:
    site.write(place, {"alters": ALTERS + site.feature("alters", BLOCK, replace="alters")})
    found = faults(contract("alters"), "off_is_untouched", "originals_back_by_identity")
    assert found == {"off_is_untouched": "switched off it gives 3, untouched it gave 2"}


def test_hook_that_stands_although_nothing_is_selected_is_caught(place: Path) -> None:
    found = faults(planted(place, WATCHES_UNASKED), "off_is_untouched")
    assert "an import hook is installed although nothing is selected" in found["off_is_untouched"]


def test_adapter_that_imports_its_framework_breaks_a_user_s_module_and_is_caught(place: Path) -> None:
    site.write(place, {"eager": IMPORTS + site.feature("eager", BLOCK)})
    found = faults(contract("eager"), "shadowing_module_does_no_harm", "order_IA")
    assert list(found) == ["shadowing_module_does_no_harm"]
    # the adapter cannot be imported then, so that its package is left out
    assert "'toyframe.eager', which is no feature" in found["shadowing_module_does_no_harm"]


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        (TAKES_STRANGERS_OFF, f"deactivate took a stranger's wrapper off {BLOCK}"),
        (SEES_NO_STRANGER, f"a stranger's wrapper lies on {BLOCK}, and yet it is applied"),
    ],
    ids=["taken_off", "not_seen"],
)
def test_stranger_s_wrapper_that_is_taken_off_or_not_seen_is_caught(place: Path, engine: str, what: str) -> None:
    assert faults(planted(place, engine), "foreign_wrapper_is_left_alone") == {"foreign_wrapper_is_left_alone": what}


def test_attribute_of_an_instance_that_is_not_seen_is_caught(place: Path) -> None:
    found = faults(planted(place, SEES_NO_INSTANCE), "instance_attribute_is_detected")
    assert f"'forward' on an instance covers {BLOCK}, and yet it is applied" in found["instance_attribute_is_detected"]


def test_every_seam_is_looked_at_not_the_first_alone(place: Path) -> None:
    """The engine is blind for the second seam."""
    second = "toyframe.blocks:Other.forward"
    site.write(place, {"two": site.feature("two", BLOCK, second)})
    (place / "plant.py").write_text(
        "from wanshim.patching import transaction as t\n"
        "seen, covered = t.in_place, t.covered_on_an_instance\n"
        f"t.in_place = lambda state: state.seam.target == {second!r} or seen(state)\n"
        f"t.covered_on_an_instance = lambda state: None if state.seam.target == {second!r} else covered(state)\n"
    )
    two = contract("two", call="toycalls:both", instance="toycalls:both_objects", prepare=("plant",))
    found = faults(two, "foreign_wrapper_is_left_alone", "instance_attribute_is_detected", "order_IA")
    assert sorted(found) == ["foreign_wrapper_is_left_alone", "instance_attribute_is_detected"]
    assert all(second in text for text in found.values())


def test_constructor_that_comes_back_as_a_copy_is_caught(place: Path) -> None:
    copies = COPIES.replace("blocks.unused =", "blocks.Block.__init__ =").replace(
        "blocks.unused", "blocks.Block.__init__"
    )
    site.write(place, {"copies": copies + site.feature("copies", BLOCK, replace="copies")})
    found = faults(contract("copies"), "order_AID", "originals_back_by_identity")
    assert sorted(found) == ["order_AID", "originals_back_by_identity"]
    assert all("toyframe.blocks:Block.__init__" in text for text in found.values())


def test_case_without_the_graph_or_instance_that_its_seams_want_has_failed(place: Path) -> None:
    site.write(place, {"sound": site.feature("sound", BLOCK, extra="in_graph=True,")})
    bare = contract("sound", instance=None)
    found = faults(bare, *(name for name in bare.checks() if "needed" in name))
    assert f"give `graph`, for torch.compile reaches these (in_graph=True): {BLOCK}" in found["no_graph_is_needed"]
    assert f"a patched method: {BLOCK}" in found["no_instance_is_needed"]


def test_feature_that_the_matrix_says_is_absent_steps_aside(place: Path) -> None:
    site.write(place, {"gone": site.feature("gone", BLOCK)})
    table = place / "toy_adapters" / "compat_matrix.yaml"
    absent = "verdict: absent\n            reason: no such ability yet"
    table.write_text(table.read_text().replace("verdict: patch", absent))
    gone = contract("gone")
    assert list(gone.checks(Verdict.ABSENT)) == ["steps_aside"]
    assert faults(gone, *gone.checks(Verdict.ABSENT)) == {}


def test_first_order_runs_in_an_interpreter_that_has_imported_nothing(place: Path) -> None:
    """A preloaded module is in the forks, and not in a fresh interpreter; what prepares one is in both."""
    site.write(place, {"sound": site.feature("sound", BLOCK)})
    for name in ("preloaded", "prepared"):
        (place / f"{name}.py").touch()
    text = "import os\nimport sys\nfrom pathlib import Path\n\nFIRST = os.getpid()\n"
    (place / "toycalls.py").write_text(
        f"{text}\n\ndef call():\n    from toyframe import blocks\n"
        "    there = [name for name in ('preloaded', 'prepared') if name in sys.modules]\n"
        f"    with open({str(place / 'seen')!r}, 'a') as file:\n        print(*there, file=file)\n"
        "    return blocks.Block().forward(1)\n"
    )
    sound = contract("sound", preload=("preloaded",), prepare=("prepared",))
    assert faults(sound, *FRESH, "order_AIDA") == {}
    plain, *seen = (place / "seen").read_text().splitlines()
    assert plain == "preloaded prepared"
    assert sorted(seen) == ["preloaded prepared", "prepared"]


def test_two_contracts_of_one_feature_are_told_apart_or_refused() -> None:
    first, second = contract("sound"), contract("sound", call="toycalls:scaled")
    with pytest.raises(WanshimError, match=r"several contracts are called toyframe\.sound"):
        contract_tests(first, second)
    (mark,) = contract_tests(first, replace(second, case="scaled")).pytestmark  # type: ignore[attr-defined]
    ids = [parameters.id for parameters in mark.args[1]]
    assert len(ids) == len(set(ids))
    assert {"toyframe.sound-order_AI", "toyframe.sound-scaled-order_AI"} <= set(ids)


def test_second_contract_of_a_feature_runs_and_has_results_of_its_own(place: Path) -> None:
    site.write(place, {"sound": site.feature("sound", BLOCK)})
    right, wrong = contract("sound"), contract("sound", case="wrong", call="toycalls:scaled")
    run = contract_tests(right, wrong)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest_tests, "check", lambda one, names: check(one, ["order_IA"]))
        run(right, "order_IA")
        with pytest.raises(AssertionError, match="one call went 0 times"):
            run(wrong, "order_IA")


def test_check_that_is_left_out_is_skipped_with_its_reason(place: Path) -> None:
    site.write(place, {"sound": site.feature("sound", BLOCK)})
    reason = "its region needs a GPU"
    partial = contract("sound", left_out={"compiled_equals_eager": reason})
    assert not {"compiled_equals_eager", "no_graph_is_needed"} & set(partial.checks())
    with pytest.raises(pytest.skip.Exception, match=reason):
        contract_tests(partial)(partial, "compiled_equals_eager")
