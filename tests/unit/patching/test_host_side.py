"""A host-side seam is a wrapt wrapper: like the original to look at, pickled by name, in order with other patchers."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import wrapt

from tests.unit.conftest import FakeFramework
from tests.unit.patching.places import LEAF, place, prefixing, state
from wanshim.patching import Kind, SeamState
from wanshim.patching.transaction import covered_on_an_instance, in_place, put_in, take_out

NAMES = ["plain", "Model.forward", "Model.static", "Model.of_class"]


@pytest.fixture
def leaf(fake: FakeFramework) -> types.ModuleType:
    fake.write(leaf=LEAF)
    return fake.module("leaf")


def host_side(name: str, **options: Any) -> SeamState:
    return state(name, prefixing, Kind.WRAPT, **options)


def call(leaf: types.ModuleType, name: str) -> tuple[Any, ...]:
    owner = leaf if name == "plain" else leaf.Child()
    answer: tuple[Any, ...] = getattr(owner, name.split(".")[-1])(1)
    return tuple(part for part in answer if part != "Child")


def theirs(mark: str) -> Callable[..., Any]:
    """The wrapper function of a patcher that uses wrapt too."""

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return (mark, *wrapped(*args, **kwargs))

    return wrapper


# -- it looks like the original ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_signature_and_introspection_are_the_originals(leaf: types.ModuleType, name: str) -> None:
    owner, last = place(leaf, name)
    original, before = vars(owner)[last], getattr(owner, last)
    expected = (inspect.signature(before), before.__name__, before.__qualname__, before.__module__, before.__doc__)
    put_in([host_side(name)])
    after = getattr(owner, last)
    found = (inspect.signature(after), after.__name__, after.__qualname__, after.__module__, after.__doc__)
    assert found == expected
    assert after.__code__ is before.__code__
    assert isinstance(after, type(before))
    assert inspect.isfunction(after) == inspect.isfunction(before)
    assert vars(owner)[last].__wrapped__ is original
    assert isinstance(vars(owner)[last], type(original))


def test_factory_is_given_the_plain_function_and_its_replacement_what_python_binds(leaf: types.ModuleType) -> None:
    given: dict[str, Any] = {}
    received: dict[str, tuple[Any, ...]] = {}

    def factory(original: Any, seam: SeamState) -> Any:
        given[seam.seam.qualname] = original

        def replacement(*args: Any) -> Any:
            received[seam.seam.qualname] = args
            return original(*args)

        return replacement

    originals = {name: getattr(*place(leaf, name)) for name in NAMES}
    put_in([state(name, factory, Kind.WRAPT) for name in NAMES])
    child = leaf.Child()
    leaf.plain(1), child.forward(1), child.static(1), child.of_class(1)
    assert received == {
        "plain": (1,),
        "Model.forward": (child, 1),
        "Model.static": (1,),
        "Model.of_class": (leaf.Child, 1),
    }
    leaf.Model.forward(child, 2)
    assert received["Model.forward"] == (child, 2)
    for name in NAMES:
        assert type(given[name]) is types.FunctionType
        assert given[name] is getattr(originals[name], "__func__", originals[name])


@pytest.mark.parametrize(
    "reach",
    [lambda m: m.plain, lambda m: m.Model.forward, lambda m: m.Model.static, lambda m: m.Child.of_class],
    ids=NAMES,
)
def test_wrapper_is_pickled_and_copied_by_name_where_wrapts_own_cannot_be(leaf: types.ModuleType, reach: Any) -> None:
    put_in([host_side(name) for name in NAMES])
    wrapper = reach(leaf)
    arguments = (leaf.model, 1) if wrapper.__name__ == "forward" else (1,)
    for again in (pickle.loads(pickle.dumps(wrapper)), copy.copy(wrapper), copy.deepcopy(wrapper)):
        assert again(*arguments) == wrapper(*arguments)
        assert again.__wanshim_state__ is wrapper.__wanshim_state__
    with pytest.raises(NotImplementedError):
        pickle.dumps(wrapt.FunctionWrapper(leaf.plain, theirs("theirs")))


def test_method_of_an_object_is_pickled_and_copied_with_its_object(leaf: types.ModuleType) -> None:
    put_in([host_side("Model.forward")])
    leaf.model.number = 7
    for again in (pickle.loads(pickle.dumps(leaf.model.forward)), copy.deepcopy(leaf.model.forward)):
        assert again.__self__ is not leaf.model
        assert again.__self__.number == 7
        assert again(1) == ("ours", "original", 1)


def test_fork_keeps_the_wrapper_and_counts_for_itself(leaf: types.ModuleType) -> None:
    one = host_side("Model.static")
    put_in([one])
    child = os.fork()
    if not child:
        right = leaf.Model.static(1) == ("ours", "original", 1) and one.calls == 1 and take_out(one)
        os._exit(0 if right and leaf.Model.static(1) == ("original", 1) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (one.calls, in_place(one)) == (0, True)


def test_wrapt_is_imported_when_a_host_side_seam_goes_in_and_no_sooner() -> None:
    program = """
import sys, types
from wanshim.patching import Kind, Seam, SeamState
from wanshim.patching.transaction import put_in
module = sys.modules["toy"] = types.ModuleType("toy")
module.__file__ = "toy.py"
exec(compile("def f(): pass\\ndef g(): pass\\n", "toy.py", "exec"), vars(module))
for target, kind in (("toy:f", Kind.CLOSURE), ("toy:g", Kind.WRAPT)):
    put_in([SeamState(Seam(target, lambda original, seam: lambda: None, "w", "u", "r", kind))])
    print("wrapt" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


# -- several of ours in one place ----------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("kinds", [(Kind.WRAPT,) * 3, (Kind.WRAPT, Kind.CLOSURE, Kind.WRAPT)], ids=["wrapt", "mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_features_that_stack_come_off_in_any_order(
    leaf: types.ModuleType, name: str, kinds: tuple[Kind, ...], order: tuple[int, ...]
) -> None:
    owner, last = place(leaf, name)
    original = vars(owner)[last]
    states = [state(name, prefixing, kind, stacks=True) for kind in kinds]
    for one in states:
        put_in([one])
    assert call(leaf, name) == ("ours", "ours", "ours", "original", 1)
    assert [one.calls for one in states] == [1, 1, 1]
    for left, index in enumerate(order, start=1):
        assert all(in_place(one) for one in states if not one.off)
        assert take_out(states[index]) is True
        assert call(leaf, name) == (*("ours",) * (3 - left), "original", 1)
    assert vars(owner)[last] is original


# -- other patchers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_wrapt_wrapper_of_another_patcher_on_top_stays_and_ours_leaves_from_beneath(
    leaf: types.ModuleType, name: str
) -> None:
    owner, last = place(leaf, name)
    original = vars(owner)[last]
    one = host_side(name)
    put_in([one])
    wrapt.wrap_function_wrapper(owner, last, theirs("theirs"))
    on_top = vars(owner)[last]
    assert call(leaf, name) == ("theirs", "ours", "original", 1)
    assert not in_place(one)
    assert take_out(one) is True
    assert vars(owner)[last] is on_top
    assert on_top.__wrapped__ is original
    assert call(leaf, name) == ("theirs", "original", 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("leaves_first", ["theirs", "ours"])
def test_wrapt_wrapper_of_another_patcher_beneath_keeps_its_place(
    leaf: types.ModuleType, name: str, leaves_first: str
) -> None:
    owner, last = place(leaf, name)
    original = vars(owner)[last]
    wrapt.wrap_function_wrapper(owner, last, theirs("theirs"))
    beneath = vars(owner)[last]
    one = host_side(name)
    put_in([one])
    assert call(leaf, name) == ("ours", "theirs", "original", 1)
    if leaves_first == "theirs":
        wrapt.unwrap_object(owner, last, beneath)
        assert call(leaf, name) == ("ours", "original", 1)
        assert take_out(one) is True
    else:
        assert take_out(one) is True
        assert vars(owner)[last] is beneath
        assert call(leaf, name) == ("theirs", "original", 1)
        wrapt.unwrap_object(owner, last, beneath)
    assert vars(owner)[last] is original
    assert call(leaf, name) == ("original", 1)


def test_hook_on_an_instance_is_seen_and_ours_is_none(leaf: types.ModuleType) -> None:
    one = host_side("Model.forward")
    put_in([one])
    assert covered_on_an_instance(one) is None
    leaf.model.forward = leaf.model.forward  # ours, kept on the object
    assert covered_on_an_instance(one) is None
    old = leaf.model.forward
    hook = functools.partial(lambda self, x: old(x), leaf.model)
    leaf.model.forward = hook
    assert covered_on_an_instance(one) == "Model"
    leaf.model.forward = functools.update_wrapper(hook, old)  # as accelerate and diffusers do: it leads to ours
    assert covered_on_an_instance(one) is None
    assert leaf.model.forward(1) == ("ours", "original", 1)


def test_object_that_nothing_reaches_any_more_covers_nothing(leaf: types.ModuleType) -> None:
    one = host_side("Model.forward")
    put_in([one])
    gone = leaf.Model()
    gone.forward = functools.partial(lambda self, x: x, gone)  # refers to itself: freed by the collector alone
    assert covered_on_an_instance(one) == "Model"
    del gone
    assert covered_on_an_instance(one) is None
