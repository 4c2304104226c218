"""What an adapter's test says about a feature: data, no code of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from wanshim.patching.verdict import Verdict
from wanshim.values import checked_seconds

# The import stands between any two switches: every order of up to two of them, and off and on again.
SWITCHES = ("", *"AD", *("".join(pair) for pair in product("AD", repeat=2)), "ADA")
CHECKS = (
    "one_layer_after_repatching",
    "originals_back_by_identity",
    "spawned_child_has_it",
    "launched_rank_has_it",
    "compiled_equals_eager",
    "off_is_untouched",
    "shadowing_module_does_no_harm",
    "applied_but_never_called_is_reported",
    "foreign_wrapper_is_left_alone",
    "instance_attribute_is_detected",
)
# What a case that does not give what a check needs is asked instead: that no seam under test wants it.
NOT_NEEDED = {
    "compiled_equals_eager": "no_graph_is_needed",
    "instance_attribute_is_detected": "no_instance_is_needed",
}
# This runs in an interpreter of its own, as the spawned child and the launched rank do, where AI is the order; the
# others run in forks of one interpreter that imported what the framework imports.
FRESH = ("order_IA",)
# The one check of a feature that the matrix gives no patch in the installed version.
STEPS_ASIDE = "steps_aside"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One feature and a tiny call that goes through it.

    Args:
        feature: `framework.ability`.
        call: `package.module:function`, importable where the tests run. It takes nothing, is called after the
            framework's modules were imported, and returns tensors, plain data, or containers of them. It must
            give the same each time: seed what is random.
        modules: what "the import" imports; default: the modules of the seams under test.
        calls: target -> how often one `call` goes through that seam. Default: once through each required one.
            The seams under test are the required ones, and those that stand here with a number above zero.
        case: distinguishes further contracts of the same feature, in the names of their tests.
        graph: `package.module:function` that returns `(module or function, arguments)` for torch.compile;
            None for a feature that no compiled region reaches.
        instance: `package.module:function` that returns a living object of the class whose method a seam patches, or
            a tuple of objects, one a class; None where no seam under test is a method.
        left_out: check -> why it cannot be run. pytest shows it as skipped, with this reason.
        source_tree: `package.module:function` that is given an empty folder and writes packages into it, which
            come before the installed ones: code of the framework that no release has.
        rebinds: names that the call itself binds anew, such as `torch.distributed._backend`. What a plain call,
            without wanshim, binds anew is found and need not be named.
        environment: variables, such as WANSHIM_DEVICES.
        prepare: modules imported first in every process, such as one that puts a stub in place of a kernel package.
        preload: packages imported once and shared by the checks that run in forks; never the framework itself.
        timeout_s: for all checks of one process.
    """

    feature: str
    call: str
    modules: tuple[str, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    case: str = ""
    graph: str | None = None
    instance: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    source_tree: str | None = None
    rebinds: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: tuple[str, ...] = ()
    preload: tuple[str, ...] = ("torch",)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        checked_seconds(self.timeout_s, "timeout_s")

    @property
    def id(self) -> str:
        """What the names of its tests begin with."""
        return f"{self.feature}-{self.case}" if self.case else self.feature

    def checks(self, verdict: Verdict | None = None) -> Iterator[str]:
        """The names of all checks that this contract gets where its feature has `verdict`; None: it is patched."""
        if verdict in (Verdict.NATIVE, Verdict.REFUSE, Verdict.ABSENT) and self.source_tree is None:
            yield STEPS_ASIDE
            return
        yield from orders()
        given = {"compiled_equals_eager": self.graph, "instance_attribute_is_detected": self.instance}
        for name in CHECKS:
            if name not in self.left_out:
                yield name if given.get(name, "") is not None else NOT_NEEDED[name]


@dataclass(frozen=True)
class Passed:
    check: str


@dataclass(frozen=True)
class Failed:
    """A check that did not hold, and what was found instead."""

    check: str
    found: str


def orders() -> Iterator[str]:
    """Every order of activate (A), deactivate (D) and the one import (I), as `order_AID`."""
    for switches in SWITCHES:
        for place in range(len(switches) + 1):
            yield f"order_{switches[:place]}I{switches[place:]}"
