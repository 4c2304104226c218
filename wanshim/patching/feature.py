"""Declarations of an adapter: a framework, and the features it gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wanshim.patching.probe import Finding, SourceTree
from wanshim.patching.seam import Seam
from wanshim.settings import Settings


@dataclass(frozen=True)
class Framework:
    """A package wanshim patches: its import name and the distribution that installs it."""

    name: str
    distribution: str


@dataclass(frozen=True)
class Feature:
    """One ability for one framework. The name is `framework.ability`, the file is named after the ability.

    Args:
        summary: one line for `wanshim features`.
        seams: the places it changes; all go in, or none.
        relies_on: code that is not changed but counted on, as targets; the probe checks it with the seams.
        auto: it fixes what is broken, or gives a framework's own option its effect.
        switched_on_by: the Settings field that turns it on when set, or several.
        along_with: the Settings field without which none of those turns it on.
        judge: reads the source of code that no row of the matrix knows. A Finding with verdict `native`
            says that upstream has the ability, `patch` that the seams fit, `refuse` why they do not;
            None leaves it to the fingerprints.
        needs_devices: how many GPUs it takes where WANSHIM_DEVICES names none.
        blocked: why this machine or these settings cannot have it although the code fits, or None.
        prepare: called once when the framework's package has been imported, where the feature applies: its modules,
            which take longer, come after that.
    """

    name: str
    summary: str
    seams: tuple[Seam, ...]
    relies_on: tuple[str, ...] = ()
    auto: bool = False
    switched_on_by: str | tuple[str, ...] = ()
    along_with: str = ""
    judge: Callable[[SourceTree], Finding | None] | None = None
    needs_devices: int = 0
    blocked: Callable[[Settings], str | None] | None = None
    prepare: Callable[[Settings], None] | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """Everything the probe looks at."""
        return (*(seam.target for seam in self.seams), *self.relies_on)

    @property
    def switches(self) -> tuple[str, ...]:
        """The Settings fields that turn it on."""
        return (self.switched_on_by,) if isinstance(self.switched_on_by, str) else self.switched_on_by

    def switch(self, read: Settings) -> str | None:
        """The Settings field that turns it on, or None."""
        if self.along_with and not read.is_on(self.along_with):
            return None
        return next(filter(read.is_on, self.switches), None)

    @property
    def framework(self) -> str:
        return self.name.split(".")[0]

    @property
    def ability(self) -> str:
        return self.name.split(".", 1)[1]
