"""The wrapper of a host-side seam. It is imported when the first one goes in, because it imports wrapt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from wanshim.patching.seam import SeamState


class BoundSeamWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg, misc, unused-ignore]
    """The result of attribute access where a SeamWrapper stands in a class."""

    @property
    def __wanshim_state__(self) -> SeamState:
        state: SeamState = self._self_parent.__wanshim_state__
        return state

    if wrapt.BoundFunctionWrapper.__module__ == "_wrappers":  # of C: written in Python, wrapt reads it to call

        @property
        def __wrapped__(self) -> Any:  # type: ignore[override]
            """As without this wrapper: a program takes `torch.no_grad` off a method by `__wrapped__`."""
            return super().__wrapped__.__wrapped__  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """By the name of the method, as Python pickles and copies a bound method."""
        bound_to = getattr(self, "__self__", None)
        return getattr, (self._self_owner if bound_to is None else bound_to, self.__name__)

    def __copy__(self) -> BoundSeamWrapper:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        function, (owner, name) = self.__reduce_ex__(4)
        return function(copy.deepcopy(owner, memo), name)


class SeamWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg, misc, unused-ignore]
    """Runs a replacement that is written as a function in the place of the original.

    wrapt splits what a caller passes into `instance` and `args`; the replacement receives them joined again, so that
    one factory serves every kind of function. Like a function, and unlike wrapt's own wrapper, this one is pickled by
    name and is its own copy.

    Args:
        original: what stood in the place, descriptors included.
        make: makes the replacement of what it is to call. It is called again if another patcher takes its wrapt
            wrapper out from beneath this one.
        state: of the seam. While it is off, calls go to what stands beneath.
    """

    __bound_function_wrapper__ = BoundSeamWrapper

    def __init__(self, original: Any, make: Callable[[Any], Callable[..., Any]], state: SeamState) -> None:
        beneath, replacement = original, make(original)

        def run(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal beneath, replacement
            if state.off:
                return wrapped(*args, **kwargs)
            if self.__wrapped__ is not beneath:
                beneath, replacement = self.__wrapped__, make(self.__wrapped__)
            return replacement(*args, **kwargs) if instance is None else replacement(instance, *args, **kwargs)

        super().__init__(original, run)
        self._self_wanshim_state = state

    @property
    def __wanshim_state__(self) -> SeamState:
        state: SeamState = self._self_wanshim_state
        return state

    def __reduce_ex__(self, protocol: object) -> str:
        return str(self.__qualname__)

    def __copy__(self) -> SeamWrapper:
        return self

    def __deepcopy__(self, memo: object) -> SeamWrapper:
        return self


def take_from_beneath(owner: Any, name: str, wrapper: Any) -> bool:
    """Take `wrapper` out from beneath the wrapt wrappers of other patchers, which stay. False where a wrapper of
    another kind, or another object, stands in the place."""
    try:
        return wrapt.unwrap_object(owner, name, wrapper, missing_ok=True) is not None
    except wrapt.WrapperNotOutermostError:
        return False
