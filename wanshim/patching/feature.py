"""Declarations of an adapter: a framework, and the features it gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wanshim.errors import FeatureUnavailable
from wanshim.patching.probe import Finding, SourceTree
from wanshim.patching.seam import Seam, SeamState
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
        families: families of models that need nothing of each other, each with how the names of the modules begin that
            hold its code. A family whose seams and relied-on code are not known is left out, and the
            others go on.
        auto: it fixes what is broken, or gives a framework's own option its effect.
        switched_on_by: the Settings field that turns it on when set, or several.
        along_with: the Settings field without which none of those turns it on.
        auto_with: the Settings field with which it is as `auto`, unless one of those says otherwise.
        judge: reads the source of code that no row of the matrix knows. A Finding with verdict `native`
            says that upstream has the ability, `patch` that the seams fit, `refuse` why they do not;
            None leaves it to the fingerprints.
        needs_devices: how many GPUs it takes where WANSHIM_DEVICES names none.
        insists: whether these settings ask for what a script that uses a family that is left out must not go on
            without.
        blocked: why this machine or these settings cannot have it although the code fits, or None.
        prepare: called once when the framework's package has been imported, where the feature applies: its modules,
            which take longer, come after that.
    """

    name: str
    summary: str
    seams: tuple[Seam, ...]
    relies_on: tuple[str, ...] = ()
    families: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    auto: bool = False
    switched_on_by: str | tuple[str, ...] = ()
    along_with: str = ""
    auto_with: str = ""
    judge: Callable[[SourceTree], Finding | None] | None = None
    needs_devices: int = 0
    insists: Callable[[Settings], bool] = lambda read: read.strict
    blocked: Callable[[Settings], str | None] | None = None
    prepare: Callable[[Settings], None] | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """Everything the probe looks at."""
        return (*(seam.target for seam in self.seams if not seam.passes_through), *self.relies_on)

    def family_of(self, target: str) -> str | None:
        """The family whose code this target is, or None: it is there for all."""
        module = target.split(":")[0].rpartition(".")[2]
        return next((name for name, start in self.families.items() if module.startswith(start)), None)

    def left_to_framework(self, family: str, reason: str) -> Callable[[Any, SeamState], Any]:
        """The replacement in a seam of a family that is left out: a call says so.

        Args:
            reason: why it is left out.
        """

        def replace(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not seam.enter():
                    return original(*args, **kwargs)
                text = f"{family} is left out: {reason}"
                if self.insists(seam.settings):
                    seam.fail()
                    raise FeatureUnavailable(f"{self.name} is unavailable for this model: {text}")
                if text not in seam.fallbacks:
                    import logging  # needed by few: not at activation

                    logging.getLogger("wanshim").warning("wanshim: %s: %s", self.name, text)
                seam.fall_back(text)
                return original(*args, **kwargs)

            return call

        return replace

    @property
    def switches(self) -> tuple[str, ...]:
        """The Settings fields that turn it on."""
        return (self.switched_on_by,) if isinstance(self.switched_on_by, str) else self.switched_on_by

    def switched(self, read: Settings) -> list[str]:
        """The Settings fields that turn it on, the first of them first."""
        if self.along_with and not read.is_on(self.along_with):
            return []
        return list(filter(read.is_on, self.switches))

    def is_auto(self, read: Settings) -> bool:
        """Whether `auto` selects it under these settings."""
        said = any(field in read.sources for field in self.switches)
        return self.auto or (bool(self.auto_with) and read.is_on(self.auto_with) and not said)

    @property
    def framework(self) -> str:
        return self.name.split(".")[0]

    @property
    def ability(self) -> str:
        return self.name.split(".", 1)[1]
