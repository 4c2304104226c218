"""Put seams in and take them out: everything is resolved and built before the first write, undone in reverse."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from wanshim.errors import FeatureUnavailable, WanshimError
from wanshim.patching.seam import Kind, Seam, SeamState, look_for_torch

MISSING = object()
# Interned or tiny values: another name with the identical object is not a capture of this one.
SHARED_BY_VALUE = (bool, int, float, str, bytes, tuple, frozenset, type(None))
DESCRIPTORS = (staticmethod, classmethod)


def put_in(states: Sequence[SeamState]) -> None:
    """Install all of `states`, whose modules are in sys.modules, or none.

    Raises:
        FeatureUnavailable: a target is gone, or is not the object that its file defines.
        WanshimError: a target already carries a replacement of ours, or its kind does not fit.
        Exception: whatever a replacement factory raised. Nothing stays behind in any of these cases.
    """
    places = [_Place(state) for state in states]
    for place in places:
        place.build()
    done: list[_Place] = []
    try:
        for place in places:
            done.append(place)
            place.write()
    except BaseException:
        for place in reversed(done):
            place.state.undo = place.state.undo or place.restore
            take_out(place.state)
        raise


def take_out(state: SeamState) -> bool:
    """Put the original back by identity. False where a stranger's object now stands in the place: that one
    stays, and our replacement behind it only passes calls through."""
    state.off = True
    restored = state.undo is None or bool(state.undo())
    state.undo = None
    while state.earlier:
        state.earlier.pop()()
    return restored


def retire_after_reload(state: SeamState) -> None:
    """The target's module has been run again and has new objects. Ours stays on the old ones, which names captured
    before the reload and living objects of an old class still lead to, until `take_out`."""
    if state.undo is not None:
        state.earlier.append(state.undo)
        state.undo = None


def in_place(state: SeamState) -> bool:
    """Whether our replacement still stands where it was put, or under one of ours that only watches."""
    owner, name = owner_of(state.seam.target)
    found = MISSING if owner is None else vars(owner).get(name, MISSING)
    while found is not state.installed:
        upper = state_of(found)
        if upper is None:
            return False
        found = upper.original
    return True


def state_of(value: Any) -> SeamState | None:
    """The state of the seam whose replacement `value` is. A wrapt wrapper of another patcher answers every question
    for what it wraps, and so the mark counts only where it is a function's own or its class defines it."""
    plain = _unwrapped(value)
    marks = vars(plain) if type(plain) is types.FunctionType else vars(type(plain))
    return plain.__wanshim_state__ if "__wanshim_state__" in marks else None


def _still_on(value: Any) -> Any:
    """The object below those replacements of ours that were taken out while another one covered them."""
    state = state_of(value)
    while state is not None and state.off:
        value = state.original
        state = state_of(value)
    return value


def covered_on_an_instance(state: SeamState) -> str | None:
    """The class of a living object on which the patched method's name was set, which hides the class's own.

    DiffSynth's `enable_usp` does that. An object that carries a replacement of ours does not count, nor one whose
    hooks, as those of accelerate and diffusers, wrap it and say so by `__wrapped__`.
    """
    owner, name = owner_of(state.seam.target)
    if not isinstance(owner, type) or state.seam.kind is Kind.VALUE or _covering(owner, name) is None:
        return None
    gc.collect()  # an object that nothing reaches any more, but that is still in memory, hides no call
    return _covering(owner, name)


def _covering(owner: type, name: str) -> str | None:
    for found in _instances(owner):
        value = getattr(found, "__dict__", {}).get(name)
        while value is not None and state_of(value) is None:
            inside = getattr(value, "__wrapped__", None)
            if inside is None:
                return type(found).__name__
            value = inside
    return None


def _instances(owner: type) -> Iterator[Any]:
    """Living objects of a class and of those derived from it: each refers to its class."""
    subclasses: list[type] = type.__subclasses__(owner)
    for derived in subclasses:
        yield from _instances(derived)
    yield from (found for found in gc.get_referrers(owner) if isinstance(found, owner))


def has_target(state: SeamState) -> bool:
    """Whether there is something to replace."""
    owner, name = owner_of(state.seam.target)
    return owner is not None and (name in vars(owner) or _is_inherited(state.seam, owner, name))


def _is_inherited(seam: Seam, owner: Any, name: str) -> bool:
    """Whether the class has the method from a parent alone, and the seam admits that."""
    return seam.inherited and isinstance(owner, type) and name not in vars(owner) and hasattr(owner, name)


def owner_of(target: str) -> tuple[Any, str]:
    """The object that holds the target's name, and the name. The owner is None where the path breaks."""
    module, qualname = target.split(":")
    owner: Any = sys.modules.get(module)
    *path, name = qualname.split(".")
    for part in path:
        owner = vars(owner).get(part) if owner is not None else None
    return owner, name


class _Place:
    """One seam on its way in."""

    def __init__(self, state: SeamState) -> None:
        self.state = state
        self.seam = state.seam
        self.owner, self.name = owner_of(self.seam.target)
        self.original = MISSING if self.owner is None else vars(self.owner).get(self.name, MISSING)
        self.installed: Any = None
        self.rebound: list[tuple[types.ModuleType, str]] = []

    def build(self) -> None:
        """Check the target and make the replacement; writes nothing into foreign code."""
        seam, state = self.seam, self.state
        found = self.original
        of_parent = _is_inherited(seam, self.owner, self.name)
        if of_parent:
            found = _from_parent(self.owner, self.name)
        if found is MISSING:
            raise FeatureUnavailable(
                f"{seam.target} is not there", hint="Run `wanshim doctor` for the seams it looked for"
            )
        below = state_of(found)
        if below is not None and not (seam.stacks or below.seam.stacks):
            raise WanshimError(f"{seam.target} already carries a replacement of wanshim")
        if seam.kind in (Kind.CLOSURE, Kind.WRAPT) and not of_parent:  # no file of the target's defines it
            self._check_origin(_function_in(found, self.owner))
        state.original = self.original
        state.installed = self.installed = self._make(found)

    def _check_origin(self, plain: Any) -> None:
        """The object must be the function its file defines: the fingerprint speaks of the file."""
        code = getattr(plain, "__code__", None)
        module = sys.modules[self.seam.module]
        if code is None:
            raise FeatureUnavailable(f"{self.seam.target} is a {type(plain).__name__}", expected="a plain function")
        found = f"{getattr(plain, '__module__', '?')}:{getattr(plain, '__qualname__', '?')}"
        if code.co_filename != getattr(module, "__file__", None) and found != self.seam.target:
            raise FeatureUnavailable(
                f"{self.seam.target} has been replaced by {found} ({code.co_filename})",
                expected="the framework's own function",
                hint="Activate wanshim first, or switch the other patch off",
            )

    def _make(self, found: Any) -> Any:
        seam, state = self.seam, self.state
        if seam.kind is Kind.VALUE:
            return state.replace(found, state)
        if seam.kind is Kind.WRAPT:
            from wanshim.patching.host_side import SeamWrapper

            return SeamWrapper(found, lambda beneath: state.replace(_function_in(beneath, self.owner), state), state)
        plain = _function_in(found, self.owner)
        made = state.replace(plain, state)
        functools.update_wrapper(
            made, plain, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=()
        )
        made.__wanshim_state__ = state
        descriptor = next((kind for kind in DESCRIPTORS if isinstance(found, kind)), None)
        return made if descriptor is None else descriptor(made)

    def write(self) -> None:
        state = self.state
        if self.seam.in_graph:
            look_for_torch()
        setattr(self.owner, self.name, state.installed)
        state.undo = self.restore
        self._rebind()
        state.off = False

    def _rebind(self) -> None:
        """Names captured by `from leaf import f` before we came."""
        for module, key in list(self._captures_of(self.original)):
            setattr(module, key, self.state.installed)
            self.rebound.append((module, key))
            self.state.rebound.append(f"{module.__name__}:{key}")

    def _captures_of(self, value: Any) -> Iterator[tuple[types.ModuleType, str]]:
        """Other names for a module-level object, inside the target's own package only."""
        if not isinstance(self.owner, types.ModuleType) or isinstance(value, SHARED_BY_VALUE):
            return
        package = self.seam.module.split(".")[0]
        for name, module in list(sys.modules.items()):
            inside = name == package or name.startswith(package + ".")
            if inside and module is not self.owner and isinstance(module, types.ModuleType):
                yield from ((module, key) for key, found in list(vars(module).items()) if found is value)

    def restore(self) -> bool:
        """Names captured while we were in place hold our object too: they get the original like the others."""
        original = self._beneath()
        for module, key in {*self.rebound, *self._captures_of(self.installed)}:
            if vars(module).get(key) is self.installed:
                setattr(module, key, original)
        self.rebound.clear()
        self.state.rebound.clear()
        if vars(self.owner).get(self.name, MISSING) is not self.installed:
            # One of ours on top lets calls through, and will restore past this one.
            return in_place(self.state) or self._taken_from_beneath()
        if original is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, original)
        return True

    def _beneath(self) -> Any:
        """The object that is to stand in the place without ours. Another patcher may have taken its wrapper out of
        wrapt's chain below ours since."""
        return _still_on(self.installed.__wrapped__ if self.seam.kind is Kind.WRAPT else self.original)

    def _taken_from_beneath(self) -> bool:
        if self.seam.kind is not Kind.WRAPT:
            return False
        from wanshim.patching.host_side import take_from_beneath

        return take_from_beneath(self.owner, self.name, self.installed)


def _from_parent(owner: type, name: str) -> Any:
    """The method that Python would call if the class had none of this name."""

    @functools.wraps(getattr(owner, name), updated=())  # a replacement of ours on the parent lends no mark
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, self), name)(*args, **kwargs)

    return method


def _unwrapped(value: Any) -> Any:
    """The function in a descriptor or a bound method. By its type: a wrapt wrapper around one claims its class."""
    return value.__func__ if type(value) in (*DESCRIPTORS, types.MethodType) else value


def _function_in(found: Any, owner: Any) -> Any:
    """The function to call with what Python binds in a place of `owner` that holds `found`."""
    plain = _unwrapped(found)
    if plain is not found or not isinstance(found, DESCRIPTORS):
        return plain
    if isinstance(found, staticmethod):  # in a wrapt wrapper
        return found.__get__(None, owner)

    @functools.wraps(found.__func__, updated=())
    def of_class(cls: type, *args: Any, **kwargs: Any) -> Any:
        return found.__get__(None, cls)(*args, **kwargs)

    return of_class
