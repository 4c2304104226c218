"""Every kind of replacement goes in, counts, and goes out by identity; all seams of a feature, or none."""

from __future__ import annotations

import inspect
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.conftest import FakeFramework
from tests.unit.patching.places import LEAF, foreign, place, prefixing, state
from wanshim.errors import FeatureUnavailable, WanshimError
from wanshim.patching import Kind, Seam, SeamState
from wanshim.patching.transaction import MISSING, has_target, in_place, owner_of, put_in, take_out


def failing(original: Any, seam: SeamState) -> Callable[..., Any]:
    raise RuntimeError("the factory fails")


@pytest.fixture
def leaf(fake: FakeFramework) -> types.ModuleType:
    fake.write(leaf=LEAF)
    return fake.module("leaf")


REPLACING = [Kind.CLOSURE, Kind.WRAPT]
# what is replaced -> its name, a call of it, and what the original gives
PLACES: dict[str, tuple[str, Callable[[Any], Any], tuple[Any, ...]]] = {
    "function": ("plain", lambda m: m.plain(1), ("original", 1)),
    "method": ("Model.forward", lambda m: m.model.forward(1), ("original", 1)),
    "static": ("Model.static", lambda m: m.Model.static(1), ("original", 1)),
    "classmethod": ("Model.of_class", lambda m: m.Child.of_class(1), ("Child", "original", 1)),
}
KINDS = [
    pytest.param(name, kind, call, answer, id=f"{prefix}{what}")
    for prefix, kind in (("", Kind.CLOSURE), ("wrapt_", Kind.WRAPT))
    for what, (name, call, answer) in PLACES.items()
]


@pytest.mark.parametrize(("name", "kind", "call", "answer"), KINDS)
def test_replacement_runs_counts_and_leaves_the_original_by_identity(
    leaf: types.ModuleType,
    name: str,
    kind: Kind,
    call: Callable[[Any], Any],
    answer: tuple[Any, ...],
) -> None:
    owner, last = place(leaf, name)
    original = vars(owner)[last]
    one = state(name, prefixing, kind)
    assert call(leaf) == answer
    put_in([one])
    assert call(leaf) == ("ours", *answer)
    assert (one.calls, in_place(one), one.off) == (1, True, False)
    assert take_out(one) is True
    assert vars(owner)[last] is original
    assert call(leaf) == answer
    assert (one.calls, in_place(one), one.off) == (1, False, True)


def test_taking_out_twice_or_what_never_went_in_is_harmless(leaf: types.ModuleType) -> None:
    one = state("plain")
    assert take_out(one) is True
    put_in([one])
    assert take_out(one) is True
    assert take_out(one) is True


def test_seam_goes_in_again_after_it_was_taken_out(leaf: types.ModuleType) -> None:
    original = leaf.plain
    one = state("plain")
    for _ in range(3):
        put_in([one])
        assert leaf.plain(1) == ("ours", "original", 1)
        take_out(one)
    assert leaf.plain is original


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_static_and_class_methods_stay_what_they_are(leaf: types.ModuleType, kind: type) -> None:
    name = "static" if kind is staticmethod else "of_class"
    put_in([state(f"Model.{name}")])
    assert type(vars(leaf.Model)[name]) is kind
    assert leaf.model.static(2) == leaf.Model.static(2)
    assert leaf.model.of_class(2)[-2:] == ("original", 2)


def test_closure_looks_like_the_original(leaf: types.ModuleType) -> None:
    original = leaf.Model.forward
    put_in([state("Model.forward")])
    made = leaf.Model.forward
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        assert getattr(made, attribute) == getattr(original, attribute)
    assert made.__wanshim_state__.seam.target == "fakewan.leaf:Model.forward"
    assert inspect.signature(made) == inspect.signature(original)


def test_closure_is_pickled_by_name_as_a_spawn_target_is(leaf: types.ModuleType) -> None:
    put_in([state("plain"), state("Model.static")])
    assert pickle.loads(pickle.dumps(leaf.plain)) is leaf.plain
    assert pickle.loads(pickle.dumps(leaf.Model.static)) is leaf.Model.static


def test_value_is_replaced_and_the_very_object_comes_back(leaf: types.ModuleType) -> None:
    original = leaf.ALLOWED
    one = state("ALLOWED", lambda value, seam: [*value, "b"], Kind.VALUE)
    put_in([one])
    assert leaf.ALLOWED == ["a", "b"]
    assert original == ["a"]
    take_out(one)
    assert leaf.ALLOWED is original


# -- all or none ---------------------------------------------------------------------------------------


def test_factory_that_fails_last_leaves_no_trace_of_the_first(leaf: types.ModuleType) -> None:
    original = leaf.plain
    states = [state("plain"), state("Model.forward", failing)]
    with pytest.raises(RuntimeError, match="the factory fails"):
        put_in(states)
    assert leaf.plain is original
    assert [s.undo for s in states] == [None, None]


def test_missing_target_leaves_no_trace_of_the_others(leaf: types.ModuleType) -> None:
    before = dict(vars(leaf))
    with pytest.raises(FeatureUnavailable) as caught:
        put_in([state("plain"), state("gone")])
    assert str(caught.value) == ("fakewan.leaf:gone is not there. Run `wanshim doctor` for the seams it looked for.")
    assert vars(leaf) == before


def test_write_that_fails_last_is_undone_in_reverse(leaf: types.ModuleType) -> None:
    log: list[str] = []

    class Watched(types.ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "COUNT" and value == 2:
                raise PermissionError("read-only")
            log.append(name)
            super().__setattr__(name, value)

    before = dict(vars(leaf))
    leaf.__class__ = Watched
    states = [
        state("plain"),
        state("ALLOWED", lambda value, seam: ["b"], Kind.VALUE),
        state("COUNT", lambda value, seam: 2, Kind.VALUE),
    ]
    with pytest.raises(PermissionError, match="read-only"):
        put_in(states)
    assert log == ["plain", "ALLOWED", "ALLOWED", "plain"]
    assert vars(leaf) == before
    assert all(s.off and s.undo is None for s in states)


# -- other people's objects ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REPLACING)
def test_foreign_wrapper_on_top_stays_and_ours_is_off(leaf: types.ModuleType, kind: Kind) -> None:
    one = state("plain", kind=kind)
    put_in([one])
    on_top = leaf.plain = foreign(leaf.plain)
    assert not in_place(one)
    assert leaf.plain(1) == ("foreign", "ours", "original", 1)
    assert take_out(one) is False
    assert leaf.plain is on_top
    assert leaf.plain(1) == ("foreign", "original", 1)
    assert one.calls == 1


def test_wrapper_beneath_ours_is_given_back(leaf: types.ModuleType) -> None:
    beneath = leaf.plain = foreign(leaf.plain)
    one = state("plain")
    put_in([one])
    assert leaf.plain(1) == ("ours", "foreign", "original", 1)
    take_out(one)
    assert leaf.plain is beneath


def test_function_of_another_file_in_the_place_is_refused(leaf: types.ModuleType) -> None:
    stranger = leaf.plain = lambda x: ("stranger", x)
    with pytest.raises(FeatureUnavailable) as caught:
        put_in([state("plain")])
    text = str(caught.value)
    assert text.startswith("fakewan.leaf:plain has been replaced by tests.unit.patching.test_transaction:")
    assert text.endswith(
        "Expected the framework's own function. Activate wanshim first, or switch the other patch off."
    )
    assert leaf.plain is stranger


@pytest.mark.parametrize("name", ["Model.size", "ALLOWED", "Model"])
def test_place_that_holds_no_function_is_refused_for_a_closure(leaf: types.ModuleType, name: str) -> None:
    with pytest.raises(FeatureUnavailable, match="Expected a plain function"):
        put_in([state(name)])


def test_method_that_a_class_only_inherits_is_not_there(leaf: types.ModuleType) -> None:
    with pytest.raises(FeatureUnavailable, match="is not there"):
        put_in([state("Child.forward")])


def test_inherited_method_is_replaced_on_the_class_alone(leaf: types.ModuleType) -> None:
    original = vars(leaf.Model)["forward"]
    one = state("Child.forward", inherited=True)
    assert has_target(one)
    put_in([one])
    assert leaf.Child().forward(1) == ("ours", "original", 1)
    assert leaf.Child().forward(x=1) == ("ours", "original", 1)
    assert leaf.model.forward(1) == ("original", 1)
    assert vars(leaf.Model)["forward"] is original
    assert (one.calls, in_place(one)) == (2, True)
    assert take_out(one) is True
    assert "forward" not in vars(leaf.Child)
    assert leaf.Child().forward(1) == ("original", 1)


def test_inherited_method_is_the_one_that_the_parent_has_when_it_is_called(leaf: types.ModuleType) -> None:
    """A replacement of another feature on the parent too: each counts, and goes out in any order."""
    child, parent = state("Child.forward", inherited=True), state("Model.forward")
    put_in([child])
    put_in([parent])
    assert leaf.Child().forward(1) == ("ours", "ours", "original", 1)
    assert (child.calls, parent.calls) == (1, 1)
    assert take_out(child) is True
    put_in([child])  # over the one on the parent, which is no conflict
    assert take_out(parent) is True
    assert leaf.Child().forward(1) == ("ours", "original", 1)
    assert take_out(child) is True
    assert "forward" not in vars(leaf.Child)


def test_seam_that_admits_inheritance_takes_the_class_s_own_method_first(leaf: types.ModuleType) -> None:
    original = vars(leaf.Model)["forward"]
    one = state("Model.forward", inherited=True)
    put_in([one])
    assert leaf.Child().forward(1) == ("ours", "original", 1)
    assert take_out(one) is True
    assert vars(leaf.Model)["forward"] is original


def test_inherited_target_that_no_parent_has_is_not_there(leaf: types.ModuleType) -> None:
    one = state("Child.backward", inherited=True)
    assert not has_target(one)
    with pytest.raises(FeatureUnavailable, match="is not there"):
        put_in([one])


def test_only_a_closure_takes_the_place_of_an_inherited_method() -> None:
    with pytest.raises(WanshimError, match="Expected a plain closure"):
        state("Child.forward", kind=Kind.WRAPT, inherited=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((prefixing, Kind.CLOSURE), (prefixing, Kind.CLOSURE)),
        ((prefixing, Kind.CLOSURE), (prefixing, Kind.WRAPT)),
        ((prefixing, Kind.WRAPT), (prefixing, Kind.CLOSURE)),
        ((prefixing, Kind.WRAPT), (prefixing, Kind.WRAPT)),
    ],
)
def test_two_patches_of_ours_in_one_place_are_a_conflict(leaf: types.ModuleType, first: Any, second: Any) -> None:
    one = state("plain", *first)
    put_in([one])
    with pytest.raises(WanshimError) as caught:
        put_in([state("plain", *second)])
    assert str(caught.value) == "fakewan.leaf:plain already carries a replacement of wanshim."
    assert leaf.plain(1) == ("ours", "original", 1)
    take_out(one)
    assert leaf.plain(1) == ("original", 1)


# -- captured names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REPLACING)
def test_captured_names_of_the_package_are_rebound_and_put_back(
    leaf: types.ModuleType, fake: FakeFramework, kind: Kind
) -> None:
    fake.write(
        leaf=LEAF,
        user="from fakewan.leaf import plain, plain as other\nfrom fakewan import leaf as plainly\n",
    )
    user = fake.module("user")
    original = leaf.plain
    one = state("plain", kind=kind)
    put_in([one])
    assert user.plain is user.other is leaf.plain
    assert sorted(one.rebound) == ["fakewan.user:other", "fakewan.user:plain"]
    user.other = stranger = foreign(user.other)
    take_out(one)
    assert user.plain is leaf.plain is original
    assert user.other is stranger
    assert one.rebound == []


@pytest.mark.parametrize("kind", REPLACING)
def test_names_captured_while_ours_was_in_place_get_the_original_too(
    leaf: types.ModuleType, fake: FakeFramework, kind: Kind
) -> None:
    original = leaf.plain
    one = state("plain", kind=kind)
    put_in([one])
    fake.write(leaf=LEAF, user="from fakewan.leaf import plain\n")
    user = fake.module("user")
    assert user.plain(1) == ("ours", "original", 1)
    assert take_out(one) is True
    assert user.plain is leaf.plain is original
    put_in([state("plain", kind=kind)])
    assert user.plain(1) == ("ours", "original", 1)


def test_names_outside_the_package_are_left_alone(leaf: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    original = leaf.plain
    for name in ("fakewanderer", "tests_of_fakewan.user"):
        module = types.ModuleType(name)
        module.plain = original  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    one = state("plain")
    put_in([one])
    assert one.rebound == []
    assert sys.modules["fakewanderer"].plain is original


def test_equal_small_values_elsewhere_are_no_captures(leaf: types.ModuleType, fake: FakeFramework) -> None:
    fake.write(leaf=LEAF, user="ANOTHER_COUNT = 1\n")
    user = fake.module("user")
    put_in([state("COUNT", lambda value, seam: 2, Kind.VALUE)])
    assert (leaf.COUNT, user.ANOTHER_COUNT) == (2, 1)


def test_captured_list_is_rebound_with_the_value(leaf: types.ModuleType, fake: FakeFramework) -> None:
    fake.write(leaf=LEAF, user="from fakewan.leaf import ALLOWED\n")
    user = fake.module("user")
    original = user.ALLOWED
    one = state("ALLOWED", lambda value, seam: [*value, "b"], Kind.VALUE)
    put_in([one])
    assert user.ALLOWED == ["a", "b"]
    take_out(one)
    assert user.ALLOWED is leaf.ALLOWED is original


# -- declarations --------------------------------------------------------------------------------------


def test_wrapt_is_refused_for_a_seam_in_a_graph() -> None:
    with pytest.raises(WanshimError) as caught:
        state("plain", prefixing, Kind.WRAPT, in_graph=True)
    assert str(caught.value) == (
        "seam fakewan.leaf:plain is reached by torch.compile and asks for a wrapt wrapper. Expected a plain "
        "closure: a compiled caller skips a wrapt wrapper silently."
    )


@pytest.mark.parametrize("target", ["fakewan.leaf", "fakewan.leaf:", ":f", "a:b:c"])
def test_target_that_is_no_target_is_refused(target: str) -> None:
    with pytest.raises(WanshimError, match=r"Expected 'package\.module:Qualified\.name'"):
        Seam(target, prefixing, why="w", upstream="u", remove_when="r")


def test_note_is_kept_and_reaches_whoever_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    one, heard = state("plain"), []
    one.notes.append("first")
    monkeypatch.setattr("wanshim.patching.seam.on_note", lambda seam, text: heard.append((seam, text)))
    one.notes.append("second")
    assert one.notes == ["first", "second"]
    assert heard == [(one, "second")]


def test_owner_is_none_where_the_path_breaks(leaf: types.ModuleType) -> None:
    assert owner_of("fakewan.leaf:Model.forward") == (leaf.Model, "forward")
    assert owner_of("fakewan.leaf:Gone.forward") == (None, "forward")
    assert owner_of("fakewan.gone:f") == (None, "f")
    assert has_target(state("Model.forward"))
    assert not has_target(state("Model.gone"))
    assert not has_target(state("Gone.forward"))
    assert vars(leaf).get("gone", MISSING) is MISSING
