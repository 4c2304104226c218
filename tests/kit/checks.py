"""The checks themselves, each a function of its name. Each runs in a process in which wanshim did nothing yet and the
framework is not imported."""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import wanshim
from tests.kit import launching
from tests.kit.contract import Contract
from tests.kit.inspection import differences, feature, layers, namespaces, resolve, standing
from tests.kit.originals import Originals
from tests.kit.outcome import describe, outcome
from wanshim.patching import Kind, Seam
from wanshim.patching.hooks import ImportHook
from wanshim.patching.seam import State
from wanshim.patching.transaction import owner_of


class CheckFailed(Exception):
    """What was found instead of what the contract promises."""


def run_check(name: str, contract: Contract) -> None:
    """Run one check by name; raises CheckFailed, or whatever the adapter let through."""
    if name.startswith("order_"):
        _order(contract, name.removeprefix("order_"))
    else:
        globals()[name](contract)


def _demand(condition: bool, found: str) -> None:
    if not condition:
        raise CheckFailed(found)


def _under_test(contract: Contract) -> list[Seam]:
    seams = feature(contract.feature).seams
    return [seam for seam in seams if seam.required or contract.calls.get(seam.target)]


def _functions(contract: Contract) -> list[Seam]:
    return [seam for seam in _under_test(contract) if seam.kind is not Kind.VALUE]


def _methods(contract: Contract) -> list[Seam]:
    """The seams that an instance is asked for; a static or class method is called through its class, and Python looks
    a method such as `__call__` up there alone."""
    return [seam for seam in _functions(contract) if _is_method(seam)]


def _is_method(seam: Seam) -> bool:
    owner, name = owner_of(seam.target)
    return (
        isinstance(owner, type)
        and not name.startswith("__")
        and not isinstance(standing(seam.target), (staticmethod, classmethod))
    )


def import_framework(contract: Contract) -> None:
    """The one import that all checks speak of."""
    for module in contract.modules or dict.fromkeys(seam.module for seam in _under_test(contract)):
        importlib.import_module(module)


def _call(contract: Contract) -> Any:
    return resolve(contract.call)()


def _order(contract: Contract, order: str) -> None:
    originals = Originals(feature(contract.feature))
    on = False
    for step in order:
        if step == "I":
            import_framework(contract)
        elif step == "A":
            wanshim.activate(f"none,{contract.feature}")
            on = True
        else:
            wanshim.deactivate()
            on = False
    if on:
        _demand_in_place_and_counting(contract)
        wanshim.deactivate()
    _demand_out(contract)
    kept_none = {seam.module for seam in _under_test(contract)} - originals.kept.keys()
    _demand(not kept_none, f"the originals of these were not seen: {', '.join(sorted(kept_none))}")
    changed = _changed(contract, originals.kept)
    _demand(not changed, f"after deactivate these are not the objects of before: {', '.join(changed)}")


def _demand_in_place_and_counting(contract: Contract) -> None:
    for seam in _under_test(contract):
        count = layers(standing(seam.target)) if seam.kind is not Kind.VALUE else 1
        _demand(count == 1, f"{count} layers of wanshim at {seam.target}, not one; {_state(contract)}")
    _call(contract)
    row = wanshim.report().row(contract.feature)
    calls = {seam.target: seam.calls for seam in row.seams}
    expected = contract.calls or {seam.target: 1 for seam in _functions(contract)}
    for target, times in expected.items():
        found = calls.get(target)
        _demand(found == times, f"one call went {found} times through {target}, not {times}; {_state(contract)}")


def _changed(contract: Contract, before: dict[str, dict[str, Any]]) -> list[str]:
    """The names that are not the objects of before, but for those that the call itself binds anew."""
    after = namespaces(feature(contract.feature))
    return [name for name in differences(before, after) if name not in contract.rebinds]


def _demand_out(contract: Contract) -> None:
    for seam in feature(contract.feature).seams:
        left = layers(standing(seam.target))
        _demand(left == 0, f"{left} layers of wanshim are left at {seam.target} after deactivate")


def _state(contract: Contract) -> str:
    row = wanshim.report().row(contract.feature)
    return f"{row.feature} is {row.state}: {row.reason}"


def _seam_state(contract: Contract, target: str) -> str:
    row = wanshim.report().row(contract.feature)
    return next((seam.state for seam in row.seams if seam.target == target), row.state)


def one_layer_after_repatching(contract: Contract) -> None:
    import_framework(contract)
    for _ in range(3):
        wanshim.activate(f"none,{contract.feature}")
        wanshim.activate(f"none,{contract.feature}")
        _demand_in_place_and_counting(contract)
        wanshim.deactivate()
    wanshim.activate(f"none,{contract.feature}")
    _demand_in_place_and_counting(contract)


def originals_back_by_identity(contract: Contract) -> None:
    import_framework(contract)
    before = namespaces(feature(contract.feature))
    wanshim.activate(f"none,{contract.feature}")
    _call(contract)
    wanshim.deactivate()
    changed = _changed(contract, before)
    _demand(not changed, f"after deactivate these are not the objects of before: {', '.join(changed)}")


def spawned_child_has_it(contract: Contract) -> None:
    with launching.environment_of(contract):
        _demand_ran(contract, launching.in_spawned_child(contract))


def launched_rank_has_it(contract: Contract) -> None:
    with launching.environment_of(contract):
        _demand_ran(contract, launching.in_launched_rank(contract))


def _demand_ran(contract: Contract, states: list[tuple[str, str]]) -> None:
    _demand(bool(states), "no process answered")
    for state, reason in states:
        called = state in (State.EXERCISED.value, State.INEFFECTIVE.value)  # a tiny call may be left to the framework
        _demand(called, f"{contract.feature} is {state} in that process, not called: {reason}")


def compiled_equals_eager(contract: Contract) -> None:
    import torch

    wanshim.activate(f"none,{contract.feature}")
    import_framework(contract)
    model, arguments = resolve(contract.graph or "")()
    with torch.no_grad():
        eager = describe(model(*arguments))
        reached = [seam for seam in wanshim.report().row(contract.feature).seams if seam.calls]
        compiled = outcome(lambda: torch.compile(model, backend="eager")(*arguments))
    _demand(compiled == eager, f"compiled gives {compiled}, eager gives {eager}: the compiled region skips the patch")
    kinds = {seam.target: seam.kind for seam in _under_test(contract)}
    wrapped = [seam.target for seam in reached if kinds.get(seam.target) is Kind.WRAPT]
    _demand(not wrapped, f"a wrapt wrapper stands where torch.compile can reach it: {', '.join(wrapped)}")


def off_is_untouched(contract: Contract) -> None:
    import_framework(contract)
    before, plain = namespaces(feature(contract.feature)), outcome(lambda: _call(contract))
    wanshim.activate("none")
    hooks = [finder for finder in sys.meta_path if isinstance(finder, ImportHook)]
    _demand(not hooks, "an import hook is installed although nothing is selected")
    changed = _changed(contract, before)
    _demand(not changed, f"with nothing selected these changed: {', '.join(changed)}")
    wanshim.activate(f"none,{contract.feature}")
    wanshim.deactivate()
    again = outcome(lambda: _call(contract))
    _demand(again == plain, f"switched off it gives {again}, untouched it gave {plain}")


def shadowing_module_does_no_harm(contract: Contract) -> None:
    package = contract.feature.split(".")[0]
    if package in sys.modules:
        return  # a framework that is preloaded, as torch is, cannot be shadowed any more
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{package}.py").write_text("MINE = 1\n")
        sys.path.insert(0, folder)
        wanshim.activate(f"none,{contract.feature}")
        module = importlib.import_module(package)
        _demand(getattr(module, "MINE", 0) == 1, f"a user's own {package}.py was not imported as it is")
        state = wanshim.report().row(contract.feature).state
        _demand(state not in ("applied", "exercised", "failed"), f"with a user's own {package}.py: {_state(contract)}")
        sys.path.remove(folder)


def applied_but_never_called_is_reported(contract: Contract) -> None:
    wanshim.activate(f"none,{contract.feature}")
    import_framework(contract)
    row = wanshim.report().row(contract.feature)
    _demand(row.state == "applied", f"in place and never called, and yet {_state(contract)}")
    _demand(row.calls == 0, f"{row.calls} calls are counted before any call")
    try:
        wanshim.report(strict=True)
    except wanshim.errors.FeatureUnavailable:
        return
    raise CheckFailed("report(strict=True) is content with a feature that never ran")


def steps_aside(contract: Contract) -> None:
    wanshim.activate(f"none,{contract.feature}")
    for module in dict.fromkeys(seam.module for seam in feature(contract.feature).seams):
        with contextlib.suppress(ImportError):  # a version that lacks the feature may lack its modules
            importlib.import_module(module)
    row = wanshim.report().row(contract.feature)
    _demand(
        row.state in ("native", "refused", "absent"), f"the matrix gives it no patch here, and yet {_state(contract)}"
    )
    _demand(bool(row.reason), f"{row.feature} is {row.state} and no reason is given")
    _demand_out(contract)


def foreign_wrapper_is_left_alone(contract: Contract) -> None:
    import_framework(contract)
    plain = outcome(lambda: _call(contract))
    wanshim.activate(f"none,{contract.feature}")
    places = {seam.target: owner_of(seam.target) for seam in _functions(contract)}
    foreign = {target: _foreign(vars(owner)[name], owner) for target, (owner, name) in places.items()}
    for target, (owner, name) in places.items():
        setattr(owner, name, foreign[target])
        state = _seam_state(contract, target)
        _demand(state == "displaced", f"a stranger's wrapper lies on {target}, and yet it is {state}")
    wanshim.deactivate()
    for target, (owner, name) in places.items():
        _demand(vars(owner)[name] is foreign[target], f"deactivate took a stranger's wrapper off {target}")
    again = outcome(lambda: _call(contract))
    _demand(again == plain, f"below a stranger's wrapper, switched off, it gives {again}, untouched it gave {plain}")


def _foreign(ours: Any, owner: Any) -> Any:
    """A stranger's closure that calls `ours` as Python would have."""
    if isinstance(ours, staticmethod):
        return staticmethod(lambda *args, **kwargs: ours.__get__(None, owner)(*args, **kwargs))
    if isinstance(ours, classmethod):
        return classmethod(lambda cls, *args, **kwargs: ours.__get__(None, cls)(*args, **kwargs))
    return lambda *args, **kwargs: ours(*args, **kwargs)


def instance_attribute_is_detected(contract: Contract) -> None:
    wanshim.activate(f"none,{contract.feature}")
    import_framework(contract)
    given = resolve(contract.instance or "")()
    instances = given if isinstance(given, tuple) else (given,)
    kinds = ", ".join(type(instance).__name__ for instance in instances)
    for seam in _methods(contract):
        owner, name = owner_of(seam.target)
        instance = next((found for found in instances if isinstance(found, owner)), None)
        _demand(instance is not None, f"{contract.instance} gives {kinds}: none is a {owner.__name__} of {seam.target}")
        vars(instance)[name] = lambda *args, **kwargs: None
        state = _seam_state(contract, seam.target)
        _demand(
            state == "displaced", f"an attribute {name!r} on an instance covers {seam.target}, and yet it is {state}"
        )
        del vars(instance)[name]


def no_instance_is_needed(contract: Contract) -> None:
    import_framework(contract)
    methods = [seam.target for seam in _methods(contract)]
    _demand(not methods, f"give `instance`, an object whose attribute may cover a patched method: {', '.join(methods)}")


def no_graph_is_needed(contract: Contract) -> None:
    inside = [seam.target for seam in _under_test(contract) if seam.in_graph]
    _demand(not inside, f"give `graph`, for torch.compile reaches these (in_graph=True): {', '.join(inside)}")
