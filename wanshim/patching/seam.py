"""A seam: one place in foreign code that a feature changes, as data, with its ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from wanshim.errors import SeamConflict

if TYPE_CHECKING:
    from wanshim.patching.state import SeamState


class Kind(Enum):
    """How the replacement sits in its place."""

    CLOSURE = "closure"  # a plain function; in a class it keeps the staticmethod or classmethod around it
    BOUND = "bound"  # a method bound to one living object, set on that object
    WRAPT = "wrapt"  # a wrapt FunctionWrapper: on the host side only, for torch.compile skips it silently
    VALUE = "value"  # data, such as an allowlist


@dataclass(frozen=True)
class Seam:
    """One place in foreign code.

    Args:
        target: `package.leaf_module:Qualified.name`.
        replace: makes the replacement from the original and this seam's state. For VALUE it returns the new
            value, for the other kinds a function with the original's arguments whose first act is
            `if not seam.enter(): return original(...)`.
        kind: how the replacement sits.
        in_graph: a torch.compile region can reach it.
        required: the feature fails without it; otherwise a missing target is passed over.
        stacks: it watches, or changes something else while the original runs: so it may share its place with a
            replacement of another feature.
        why, upstream, remove_when: the ledger.
        closure_because: the ledger too: why a CLOSURE that is not `in_graph` is no WRAPT.
    """

    target: str
    replace: Callable[[Any, SeamState], Any]
    why: str
    upstream: str
    remove_when: str
    kind: Kind = Kind.CLOSURE
    in_graph: bool = False
    required: bool = True
    stacks: bool = False
    closure_because: str = ""

    def __post_init__(self) -> None:
        if self.target.count(":") != 1 or not all(self.target.split(":")):
            raise SeamConflict(f"seam target {self.target!r}", expected="'package.module:Qualified.name'")
        if self.in_graph and self.kind is Kind.WRAPT:
            raise SeamConflict(
                f"seam {self.target} is reached by torch.compile and asks for a wrapt wrapper",
                expected="a plain closure or a bound method: a compiled caller skips a wrapt wrapper silently",
            )

    @property
    def module(self) -> str:
        return self.target.split(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.split(":")[1]
