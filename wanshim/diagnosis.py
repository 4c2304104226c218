"""What `wanshim doctor` finds: verdicts from the matrix and the sources, nothing imported, nothing patched."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from wanshim import process_coverage, settings
from wanshim.activation import DISABLED, Activation
from wanshim.decision import Decision
from wanshim.errors import FeatureUnavailable
from wanshim.patching.feature import Feature
from wanshim.verdict import Verdict


@dataclass(frozen=True)
class Diagnosis:
    """One row a feature, and the features that were asked for and cannot be had."""

    rows: tuple[DiagnosisRow, ...]
    missing: tuple[str, ...]
    note: str = ""  # why nothing at all would happen, or which adapters are left out
    unreached: tuple[process_coverage.Finding, ...] = ()  # processes that would run without the patches

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DiagnosisRow:
    framework: str
    version: str | None
    feature: str
    verdict: str
    state: str  # selected or off
    selected_by: str | None
    reason: str
    next_step: str
    origin: str = ""  # the distribution and version of a third party


def examine(text: str | None = None) -> Diagnosis:
    """Decide for every feature as `activate(text)` would, without changing anything.

    Raises:
        FeatureUnknown, SettingInvalid, MatrixInvalid: as `activate`.
    """
    look = Activation()
    look.settings = settings.read()
    disabled = look.settings.disable
    selection = look.select("none" if disabled else text, look.settings)
    rows, missing = [], []
    for name, decision in look.decisions():
        if name in selection and decision.applies:
            decision = _with_devices(look.known().features[name], look.settings, decision)
        row = DiagnosisRow(
            framework=name.split(".")[0],
            version=decision.version,
            feature=name,
            verdict=decision.verdict.value,
            state="selected" if name in selection else "off",
            selected_by=selection.reasons.get(name),
            reason=decision.reason,
            next_step=decision.next_step,
            origin=look.known().origins.get(name, ""),
        )
        rows.append(row)
        wanted = name in selection and (name in selection.named or decision.verdict is not Verdict.ABSENT)
        if wanted and decision.verdict in (Verdict.REFUSE, Verdict.ABSENT):
            missing.append(name)
    if disabled:
        return Diagnosis(tuple(rows), tuple(missing), DISABLED)
    return Diagnosis(tuple(rows), tuple(missing), "\n".join(look.known().left_out), process_coverage.findings())


def _with_devices(feature: Feature, read: settings.Settings, decision: Decision) -> Decision:
    """A selected feature that needs GPUs is refused where there are too few. The one look that imports torch."""
    if feature.needs_devices == 0 or read.devices is not None or read.plan is not None:  # a plan may need one alone
        return decision
    import torch

    count = torch.cuda.device_count()
    if count >= feature.needs_devices:
        return decision
    reason = f"it needs {feature.needs_devices} GPUs and {count} are in sight"
    return replace(decision, verdict=Verdict.REFUSE, reason=reason, next_step="Name the devices in WANSHIM_DEVICES")


def check_selection(text: str | None) -> str:
    """Before a program starts: the names must be right and, under WANSHIM_STRICT, everything must be there.

    Returns:
        What `text`, given in place of WANSHIM_FEATURES, no longer selects, in words; "" where that is nothing.

    Raises:
        FeatureUnknown, SettingInvalid, MatrixInvalid, FeatureUnavailable.
    """
    look = Activation()
    look.settings = settings.read()
    if look.settings.disable:
        return ""
    selection = look.select(text, look.settings)
    look.rows()
    if look.settings.strict:
        found = examine(text)
        row = next((row for row in found.rows if row.feature in found.missing), None)
        if row is not None:
            raise FeatureUnavailable(
                f"{row.feature}, selected by {row.selected_by}, cannot be had: {row.reason}",
                hint=row.next_step or f"Leave it out with WANSHIM_FEATURES=...,-{row.feature}",
            )
    before = look.settings.features if text is not None else None
    dropped = [name for name in look.select(before, look.settings).reasons if name not in selection] if before else []
    if not dropped:
        return ""
    return f"-f {text} replaces WANSHIM_FEATURES={before}; no longer selected: {', '.join(dropped)}"
