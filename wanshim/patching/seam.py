"""A seam: one place in foreign code that a feature changes, as data with its ledger, and its state in this process.

A seam is registered, then applied, then exercised, or ineffective if every call failed or was left to the framework, or
not needed if a call found so; or it is native, refused, displaced or failed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from wanshim.errors import WanshimError
from wanshim.settings import Settings


class Kind(Enum):
    """The kind of replacement in its place."""

    CLOSURE = "closure"  # a plain function; in a class it keeps the staticmethod or classmethod around it
    WRAPT = "wrapt"  # a wrapt FunctionWrapper: on the host side only, for torch.compile skips it silently
    VALUE = "value"  # data, such as an allowlist


@dataclass(frozen=True)
class Seam:
    """One place in foreign code.

    Args:
        target: `package.leaf_module:Qualified.name`.
        replace: makes the replacement from the original and this seam's state. For VALUE it returns the new
            value, for the other kinds a function with the original's arguments whose first act is
            `if not seam.enter(): return original(...)`. A call that then goes to the original after all says why:
            `seam.fall_back(reason)`.
        kind: how the replacement sits.
        in_graph: a torch.compile region can reach it.
        required: the feature fails without it; otherwise a missing target is passed over.
        inherited: a method that the class may have from a parent alone. The replacement is then the class's own, the
            parent keeps its method, and the original is what the parent has when it is called.
        stacks: it watches, or changes something else while the original runs: so it may share its place with a
            replacement of another feature.
        passes_through: it calls the original with what it is given and returns what that returns, and needs nothing of
            its code, which therefore stands in no row of the matrix.
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
    inherited: bool = False
    stacks: bool = False
    passes_through: bool = False
    closure_because: str = ""

    def __post_init__(self) -> None:
        if self.target.count(":") != 1 or not all(self.target.split(":")):
            raise WanshimError(f"seam target {self.target!r}", expected="'package.module:Qualified.name'")
        if self.in_graph and self.kind is Kind.WRAPT:
            raise WanshimError(
                f"seam {self.target} is reached by torch.compile and asks for a wrapt wrapper",
                expected="a plain closure: a compiled caller skips a wrapt wrapper silently",
            )

        if self.inherited and self.kind is not Kind.CLOSURE:
            raise WanshimError(
                f"seam {self.target} may be inherited and is {self.kind.value}", expected="a plain closure"
            )

    @property
    def module(self) -> str:
        return self.target.split(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.split(":")[1]


class State(str, Enum):
    """The state of a seam or, as the least of its seams, of a feature."""

    OFF = "off"  # not selected, or taken out again
    REGISTERED = "registered"  # waits for its module to be imported
    APPLIED = "applied"  # in place, not yet called
    EXERCISED = "exercised"  # in place, and at least one call had its effect
    UNNEEDED = "not needed"  # in place and called, and a call found that what was asked for needs no change
    INEFFECTIVE = "ineffective"  # in place and called, and every call failed or was left to the framework
    DISPLACED = "displaced"  # someone put another object in the place afterwards
    NATIVE = "native"
    ABSENT = "absent"
    REFUSED = "refused"
    FAILED = "failed"


MAX_NOTES = 100
MAX_REASONS = 8
OTHER_REASONS = "other reasons"
NUMBER = re.compile(r"\d+(\.\d+)?")


class Notes(list[str]):
    """Notes of a replacement for the user, such as a plan: at once for `on_note`, and the latest for the report.

    A server makes notes for as long as it runs, so only the last MAX_NOTES are kept.
    """

    def __init__(self, seam: SeamState) -> None:
        super().__init__()
        self._seam = seam
        self.headline = ""  # what the whole report begins with
        self.closing = ""  # what the feature's line at the end has beside its calls

    def lead(self, text: str) -> None:
        """A note that the whole report begins with."""
        self.headline = text
        self.append(text)

    def append(self, text: str) -> None:
        import logging  # needed by few: not at activation

        super().append(text)
        del self[:-MAX_NOTES]
        logging.getLogger("wanshim").info("wanshim: %s: %s", self._seam.seam.target, text)
        if on_note is not None:
            on_note(self._seam, text)


def at_compile_time(call: Callable[[], None]) -> Callable[[], None]:
    """`call`, for a place inside a compiled region: torch.compile calls it when it compiles the region, and leaves it
    out of the graph."""

    def once_a_graph() -> None:
        call()

    # what torch.compiler.assume_constant_result does, which imports torch._dynamo
    once_a_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return once_a_graph


class SeamState:
    """The living side of a seam. Replacements ask it at every call whether they are on."""

    __slots__ = (
        "calls", "compiled", "count_compiled", "earlier", "failed", "fallbacks", "installed", "left_out", "named",
        "notes", "off", "original", "passed_by", "rebound", "replace", "seam", "settings", "undo", "unneeded",
    )  # fmt: skip

    def __init__(self, seam: Seam) -> None:
        self.seam = seam
        self.replace = seam.replace  # or what stands in its place where its family is left out
        self.left_out: Mapping[str, str] = {}  # families of models that the feature is not for, each with the reason
        self.settings = Settings()  # what the user has set, from the latest `activate()`
        self.named = False  # its feature was asked for by its name or variable, then
        self.calls = 0
        self.fallbacks: dict[str, int] = {}  # by reason, of `calls`
        self.failed = self.passed_by = 0  # of `calls`
        self.unneeded = False
        self.compiled = False  # is in a graph, whose calls nobody counts
        self.count_compiled = at_compile_time(self._count_compiled)
        self.off = True
        self.original: Any = None  # as found in the owner's namespace, descriptors included
        self.installed: Any = None
        self.undo: Any = None
        self.earlier: list[Callable[[], object]] = []  # undoes what was in before its module was run again
        self.rebound: list[str] = []  # captured names that were rebound too, as module:name
        self.notes = Notes(self)

    def enter(self) -> bool:
        """Count a call; False when the patch was switched off and a stranger's wrapper still leads here."""
        if self.off:
            return False
        self.calls += 1
        return True

    def enter_graph(self) -> bool:
        """`enter` for a place inside a compiled region: a Python counter there would recompile at each call."""
        if self.off:
            return False
        ask = _is_compiling
        if ask is None:
            import torch

            ask = torch.compiler.is_compiling
        if ask():
            self.count_compiled()
        else:
            self.calls += 1
        return True

    def _count_compiled(self) -> None:
        if not self.compiled:
            self.compiled = True
            self.notes.append("in a graph of torch.compile, whose calls are not counted")

    def fall_back(self, reason: str) -> None:
        """The call that was entered is left to the framework.

        Args:
            reason: calls are counted by it. Texts that differ in numbers alone, as in free memory, are one reason, and
                beyond MAX_REASONS all others are OTHER_REASONS: a server has no end of them.
        """
        if reason not in self.fallbacks:
            known = {NUMBER.sub("", text): text for text in self.fallbacks}
            other = OTHER_REASONS if len(known) >= MAX_REASONS else reason
            reason = known.get(NUMBER.sub("", reason), other)
        count = self.fallbacks.get(reason, 0)
        self.fallbacks[reason] = count + 1
        if not count:
            self.notes.append(f"left to the framework: {reason}")

    def pass_by(self) -> None:
        """The call that was entered has no effect of its own: it changes nothing or prepares a later call."""
        self.passed_by += 1

    def not_needed(self, reason: str) -> None:
        """The call that was entered changes nothing because the framework does what was asked for as it is."""
        self.passed_by += 1
        self.unneeded = True
        self.notes.append(reason)

    def fail(self) -> None:
        """The call that was entered ends in an error, and so has no effect."""
        self.failed += 1

    def start_anew(self) -> None:
        """In a forked child: the calls so far are its parent's."""
        self.calls = self.failed = self.passed_by = 0
        self.compiled = self.unneeded = False
        self.fallbacks.clear()
        self.notes = Notes(self)

    @property
    def is_left_out(self) -> bool:
        """Whether its family of models is left out."""
        return self.replace is not self.seam.replace

    @property
    def required(self) -> bool:
        return self.seam.required and not self.is_left_out

    @property
    def effects(self) -> int:
        """The number of calls that had their effect; those of graphs are one."""
        return self.compiled + self.calls - self.failed - self.passed_by - sum(self.fallbacks.values())


on_note: Callable[[SeamState, str], None] | None = None  # set by wanshim.process_report
_is_compiling: Callable[[], bool] | None = None  # an `import torch` in every call costs three times as much


def look_for_torch() -> None:
    """Called when a seam in a graph goes in; never from inside a graph, where a new global would recompile."""
    global _is_compiling
    _is_compiling = getattr(getattr(sys.modules.get("torch"), "compiler", None), "is_compiling", None)
