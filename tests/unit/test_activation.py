"""activate, deactivate and report, on a framework made for the test."""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import wanshim
from tests.unit.conftest import FakeFramework
from tests.unit.fake_framework import DECODE, DIT, REPAIR, VAE, Fake, a_seam, fails, ours, wan
from wanshim import activation
from wanshim.errors import FeatureUnavailable, SettingInvalid
from wanshim.launch.boot.plugin import activate_in_worker
from wanshim.patching import Framework, Kind, Seam, SeamState, hooks, seam
from wanshim.patching.probe import Verdict
from wanshim.reporting import Report
from wanshim.select.catalog import Catalog
from wanshim.settings import Settings

__all__ = ["wan"]  # the fixture

OPTIONAL = replace(REPAIR, seams=(*REPAIR.seams, a_seam("dit:usp_forward", required=False)))


def states(report: Report | None = None) -> dict[str, str]:
    return {row.feature: row.state for row in (report or wanshim.report()).rows}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "wanshim" and r.levelno >= logging.WARNING]


# -- the road ------------------------------------------------------------------------------------------


def test_feature_goes_from_registered_to_applied_to_exercised_to_off(wan: Fake) -> None:
    assert states() == {"fakewan.repair": "off", "fakewan.decode": "off"}
    assert states(wanshim.activate()) == {"fakewan.repair": "registered", "fakewan.decode": "off"}
    dit = wan.dit()
    assert states()["fakewan.repair"] == "applied"
    assert dit.forward(1) == ["ours", "original", 1]
    assert dit.forward(2) == ["ours", "original", 2]
    row = wanshim.report().row("fakewan.repair")
    assert (row.state, row.calls, row.verdict, row.version) == ("exercised", 2, "patch", "1.0")
    assert (row.selected_by, row.reason, row.framework) == ("auto", "tested: behaviour", "fakewan")
    assert [(s.target, s.state, s.calls) for s in row.seams] == [("fakewan.dit:forward", "exercised", 2)]
    wanshim.deactivate()
    assert states()["fakewan.repair"] == "off"
    assert dit.forward(1) == ["original", 1]


def test_framework_imported_first_is_patched_in_place_with_its_captured_names(wan: Fake) -> None:
    wan.framework.write(dit=DIT, vae=VAE, pipeline="from fakewan.dit import forward\n")
    pipeline, dit = wan.framework.module("pipeline"), wan.dit()
    original = dit.forward
    report = wanshim.activate()
    assert pipeline.forward is dit.forward is not original
    assert report.row("fakewan.repair").seams[0].note == "; also rebound fakewan.pipeline:forward"
    assert "also rebound fakewan.pipeline:forward" in str(report)
    wanshim.deactivate()
    assert pipeline.forward is dit.forward is original


def test_feature_prepares_once_when_the_package_has_been_imported_and_its_modules_have_not(wan: Fake) -> None:
    prepared: list[tuple[Settings, list[str]]] = []

    def prepare(read: Settings) -> None:
        prepared.append((read, [name for name in sys.modules if name.startswith("fakewan.")]))

    wan.framework.write(dit=DIT, vae=VAE)
    wan.offer(replace(REPAIR, prepare=prepare), DECODE)
    wanshim.activate()
    assert prepared == []
    importlib.import_module("fakewan")
    assert prepared == [(activation.CURRENT.settings, [])]
    dit = wan.framework.module("dit")
    wanshim.activate()
    assert len(prepared) == 1
    assert dit.forward(1) == ["ours", "original", 1]


@pytest.mark.parametrize("why", ["refused", "not selected"])
def test_feature_that_does_not_apply_prepares_nothing(wan: Fake, caplog: pytest.LogCaptureFixture, why: str) -> None:
    def prepare(read: Settings) -> None:
        pytest.fail("prepared")

    wan.offer(replace(REPAIR, prepare=prepare, blocked=lambda read: "too many processes"), DECODE)
    wanshim.activate("auto" if why == "refused" else "none,decode")
    importlib.import_module("fakewan")
    assert warnings(caplog) == []  # a program that never comes to the pipeline need not hear of it
    assert wan.dit().forward(1) == ["original", 1]
    assert len(warnings(caplog)) == (why == "refused")


def test_activate_twice_wraps_once(wan: Fake) -> None:
    wanshim.activate()
    dit = wan.dit()
    once = dit.forward
    wanshim.activate()
    assert dit.forward is once
    assert dit.forward(1) == ["ours", "original", 1]
    wanshim.deactivate()
    wanshim.deactivate()
    assert dit.forward(1) == ["original", 1]


def test_nothing_selected_touches_nothing(wan: Fake) -> None:
    before = list(sys.meta_path)
    report = wanshim.activate("none")
    dit = wan.dit()
    assert sys.meta_path == before
    assert dit.forward.__code__.co_filename == dit.__file__
    assert (report.active, report.selected) == (False, ())


def test_deactivate_removes_the_import_hook(wan: Fake) -> None:
    before = list(sys.meta_path)
    wanshim.activate("all")
    assert len(sys.meta_path) == len(before) + 1
    wanshim.deactivate()
    assert sys.meta_path == before


def test_changed_selection_takes_out_what_left_and_puts_in_what_joined(wan: Fake) -> None:
    dit, vae = wan.dit(), wan.vae()
    forward, modes = dit.forward, vae.MODES
    wanshim.activate("none,repair")
    dit.forward(1)
    wanshim.activate("none,decode")
    assert dit.forward is forward
    assert vae.decode(1) == ["ours", "original", 1]
    assert vae.MODES == ["plain", "fast"]
    assert states() == {"fakewan.repair": "off", "fakewan.decode": "exercised"}
    wanshim.activate("all")
    assert vae.decode(1) == ["ours", "original", 1]
    assert dit.forward(1) == ["ours", "original", 1]
    assert vae.MODES == ["plain", "fast"]
    wanshim.activate("none")
    assert (dit.forward, vae.MODES) == (forward, modes)
    assert vae.MODES is modes


def test_report_names_what_selects_a_feature_now(wan: Fake) -> None:
    assert wanshim.activate("repair").row("fakewan.repair").selected_by == "repair"
    assert wanshim.activate("auto").row("fakewan.repair").selected_by == "auto"


def test_variable_of_a_feature_selects_it(wan: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_VAE_MODE", "tile")
    assert wanshim.activate().row("fakewan.decode").selected_by == "WANSHIM_VAE_MODE"


def test_argument_beats_the_environment(wan: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_FEATURES", "none,decode")
    assert [row.feature for row in wanshim.activate().selected] == ["fakewan.decode"]
    assert [row.feature for row in wanshim.activate("repair").selected] == ["fakewan.repair"]


def test_named_feature_adds_to_auto_and_to_what_a_variable_switches_on(
    wan: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(DECODE, name="fakewan.other", switched_on_by="")
    wan.offer(REPAIR, DECODE, other)
    monkeypatch.setenv("WANSHIM_VAE_MODE", "tile")
    selected = {row.feature: row.selected_by for row in wanshim.activate("other").selected}
    assert selected == {"fakewan.repair": "auto", "fakewan.decode": "WANSHIM_VAE_MODE", "fakewan.other": "other"}


def test_missing_target_that_is_not_required_is_passed_over(wan: Fake) -> None:
    wan.offer(OPTIONAL)
    wanshim.activate()
    assert wan.dit().forward(1) == ["ours", "original", 1]
    row = wanshim.report().row("fakewan.repair")
    assert row.state == "exercised"
    assert [s.state for s in row.seams] == ["exercised", "registered"]


def test_feature_of_optional_seams_alone_is_registered_until_one_is_in_place(wan: Fake) -> None:
    wan.offer(replace(REPAIR, seams=tuple(a_seam(f"dit:{name}", required=False) for name in ("forward", "missing"))))
    assert states(wanshim.activate())["fakewan.repair"] == "registered"
    wan.dit()
    assert states()["fakewan.repair"] == "applied"


KINDS = pytest.mark.parametrize("kind", [Kind.CLOSURE, Kind.WRAPT])


@KINDS
def test_reload_applies_again_and_counts_on(wan: Fake, kind: Kind) -> None:
    wan.offer(replace(REPAIR, seams=(a_seam("dit:forward", kind=kind),)))
    wanshim.activate()
    dit = wan.dit()
    dit.forward(1)
    importlib.reload(dit)
    assert dit.forward(2) == ["ours", "original", 2]
    assert wanshim.report().row("fakewan.repair").calls == 2
    wanshim.deactivate()
    assert type(dit.forward) is types.FunctionType
    assert dit.forward.__code__.co_filename == dit.__file__


@KINDS
def test_name_captured_before_a_reload_gets_its_original_back(wan: Fake, kind: Kind) -> None:
    """It keeps the old function over the reload, as it would without wanshim, patched while wanshim is on."""
    wan.offer(replace(REPAIR, seams=(a_seam("dit:forward", kind=kind),)))
    wan.framework.write(dit=DIT, vae=VAE, pipeline="from fakewan.dit import forward\n")
    pipeline, dit = wan.framework.module("pipeline"), wan.dit()
    original = pipeline.forward
    wanshim.activate()
    importlib.reload(dit)
    assert pipeline.forward(1) == dit.forward(1) == ["ours", "original", 1]
    assert wanshim.report().row("fakewan.repair").calls == 2
    wanshim.deactivate()
    assert pipeline.forward is original
    assert type(dit.forward) is types.FunctionType
    assert dit.forward.__code__.co_filename == dit.__file__


@KINDS
def test_class_of_before_a_reload_gets_its_original_back(wan: Fake, kind: Kind) -> None:
    source = DIT + "class Model:\n    def forward(self, x):\n        return ['original', x]\n"
    wan.framework.write(dit=source, vae=VAE)
    make = lambda original, seam: lambda self, x: ["ours", *original(self, x)]  # noqa: E731
    method = a_seam("dit:Model.forward", make, kind=kind)
    wan.offer(replace(REPAIR, seams=(method,)))
    dit = wan.dit()
    old, original = dit.Model, dit.Model.forward
    wanshim.activate()
    importlib.reload(dit)
    assert old().forward(1) == dit.Model().forward(1) == ["ours", "original", 1]
    wanshim.deactivate()
    assert old.forward is original
    assert dit.Model().forward(1) == ["original", 1]


def test_notes_of_a_seam_are_in_the_report(wan: Fake) -> None:
    def noting(original: Any, seam: SeamState) -> Callable[..., Any]:
        seam.notes.append("stage 0: blocks 0..3\nstage 1: blocks 4..7")
        return ours(original, seam)

    wan.offer(replace(REPAIR, seams=(a_seam("dit:forward", noting),)))
    wanshim.activate()
    wan.dit()
    report = wanshim.report()
    assert report.row("fakewan.repair").notes == ("stage 0: blocks 0..3\nstage 1: blocks 4..7",)
    assert "\n    stage 0: blocks 0..3\n    stage 1: blocks 4..7" in str(report)


def test_object_put_on_top_is_reported_as_displaced_and_stays(wan: Fake, caplog: pytest.LogCaptureFixture) -> None:
    wanshim.activate()
    dit = wan.dit()
    beneath = dit.forward
    on_top = dit.forward = lambda x: ["stranger", *beneath(x)]
    assert states()["fakewan.repair"] == "displaced"
    wanshim.deactivate()
    assert dit.forward is on_top
    assert dit.forward(1) == ["stranger", "original", 1]
    assert warnings(caplog) == ["wanshim: fakewan.dit:forward is covered by a foreign object; it stays, ours is off"]


def test_feature_with_one_seam_displaced_is_displaced_although_another_was_exercised(wan: Fake) -> None:
    for covered, called in (("forward", "usp_forward"), ("usp_forward", "forward")):
        wan.framework.write(dit=f"{DIT}\n\n{DIT.replace('forward', 'usp_forward')}")
        wan.offer(OPTIONAL)
        wanshim.activate()
        dit = wan.dit()
        getattr(dit, called)(1)
        assert states()["fakewan.repair"] == "exercised"
        setattr(dit, covered, lambda x: x)
        assert states()["fakewan.repair"] == "displaced"
        wanshim.deactivate()
        sys.modules.pop("fakewan.dit")


# -- off, strict, bad input ----------------------------------------------------------------------------


def test_disabled_does_nothing_and_takes_out_what_was_in(wan: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    wanshim.activate()
    dit = wan.dit()
    monkeypatch.setenv("WANSHIM_DISABLE", "1")
    monkeypatch.setenv("WANSHIM_FEATURES", "no such feature")
    report = wanshim.activate("all", strict=True)
    assert (report.active, report.rows) == (False, ())
    assert report.note == str(report) == "wanshim is switched off by WANSHIM_DISABLE"
    assert dit.forward(1) == ["original", 1]
    assert set(states().values()) == {"off"}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("variable", [True, False])
def test_strict_comes_from_the_argument_or_the_variable(
    wan: Fake, monkeypatch: pytest.MonkeyPatch, strict: bool, variable: bool
) -> None:
    wan.offer(REPAIR, verdict=Verdict.REFUSE, reason="known to break")
    if variable:
        monkeypatch.setenv("WANSHIM_STRICT", str(int(strict)))
    argument = None if variable else strict
    if not strict:
        assert states(wanshim.activate(strict=argument)) == {"fakewan.repair": "refused"}
        return
    with pytest.raises(FeatureUnavailable) as caught:
        wanshim.activate(strict=argument)
    assert str(caught.value) == (
        "fakewan.repair is unavailable with version 1.0: known to break. "
        "Leave it out with WANSHIM_FEATURES=...,-fakewan.repair."
    )


def test_strict_argument_beats_the_variable(wan: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    wan.offer(REPAIR, verdict=Verdict.REFUSE, reason="known to break")
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    assert states(wanshim.activate(strict=False)) == {"fakewan.repair": "refused"}


def test_strict_failure_changes_nothing(wan: Fake) -> None:
    wanshim.activate("repair")
    dit = wan.dit()
    in_place = dit.forward
    wan.framework.write(dit=DIT, vae=VAE.replace("return", "return 1 and"))
    with pytest.raises(FeatureUnavailable, match=r"fakewan\.decode is unavailable"):
        wanshim.activate("decode", strict=True)
    assert dit.forward is in_place
    assert [row.feature for row in wanshim.report().selected] == ["fakewan.repair"]


UNREAD = {
    "WANSHIM_VERBOSE": "nothing reads WANSHIM_VERBOSE. `wanshim features` names what there is",
    "WANSHIM_VAE_FAST": "WANSHIM_VAE_FAST has no effect, since fakewan.vae_decode is off. "
    "Turn on: WANSHIM_VAE_MODE=auto",
}


@pytest.fixture
def unread(wan: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A variable that nothing knows, and one that a feature reads which is off."""
    wan.offer(REPAIR, replace(DECODE, name="fakewan.vae_decode"))
    for name in UNREAD:
        monkeypatch.setenv(name, "1")
    return wan


def test_activate_in_a_script_names_variables_that_nothing_reads_once_and_in_the_report(
    unread: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    report = wanshim.activate()
    assert warnings(caplog) == [f"wanshim: {line}" for line in UNREAD.values()]
    assert str(report).splitlines()[:2] == report.note.splitlines() == list(UNREAD.values())
    wanshim.activate()
    assert len(warnings(caplog)) == 2
    assert wanshim.activate("fakewan.vae_decode").note == UNREAD["WANSHIM_VERBOSE"]
    wanshim.deactivate()
    assert wanshim.report().note == "wanshim is not active"


@pytest.mark.parametrize("chosen", ["-fakewan.vae_decode", "none,repair"])
def test_variable_of_a_feature_that_is_left_out_says_so_and_not_to_set_it(
    wan: Fake, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    wan.offer(REPAIR, replace(DECODE, name="fakewan.vae_decode"))
    monkeypatch.setenv("WANSHIM_VAE_MODE", "auto")
    monkeypatch.setenv("WANSHIM_VAE_FAST", "1")
    assert wanshim.activate(chosen).note.splitlines() == [
        f"{name} has no effect, since WANSHIM_FEATURES, -f or activate() leaves out fakewan.vae_decode"
        for name in ("WANSHIM_VAE_FAST", "WANSHIM_VAE_MODE")
    ]


@pytest.mark.parametrize("variable", UNREAD)
def test_strict_activate_fails_on_a_variable_that_nothing_reads_and_changes_nothing(
    unread: Fake, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(next(name for name in UNREAD if name != variable))
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    with pytest.raises(SettingInvalid, match=variable):
        wanshim.activate()
    assert not wanshim.report().selected
    assert unread.dit().forward(1) == ["original", 1]


@pytest.mark.parametrize("parent", ["WANSHIM_RUN_PREFIX", "WANSHIM_INHERITED"])
def test_variables_that_a_parent_has_looked_at_are_in_the_report_alone(
    unread: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, parent: str
) -> None:
    monkeypatch.setenv(parent, "auto")
    assert wanshim.activate(strict=True).note.splitlines() == list(UNREAD.values())
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("text", "variables", "error"),
    [
        ("repare", {}, SettingInvalid),
        ("decode", {"WANSHIM_DEVICES": ","}, SettingInvalid),
        (["decode"], {}, SettingInvalid),
    ],
)
def test_bad_input_changes_nothing(
    wan: Fake, monkeypatch: pytest.MonkeyPatch, text: Any, variables: dict[str, str], error: type[Exception]
) -> None:
    wanshim.activate("repair")
    dit = wan.dit()
    in_place = dit.forward
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error):
        wanshim.activate(text)
    assert dit.forward is in_place
    assert [row.feature for row in wanshim.report().selected] == ["fakewan.repair"]


@pytest.mark.parametrize(("features", "said"), [(["decode"], r"\['decode'\], of type list"), (3, "3, of type int")])
def test_features_that_are_no_text_are_one_error_that_names_the_form(wan: Fake, features: Any, said: str) -> None:
    with pytest.raises(SettingInvalid, match=rf"^the features given are {said}\. Expected one text, with commas"):
        wanshim.activate(features)


def test_refused_feature_leaves_the_original_and_warns_once(wan: Fake, caplog: pytest.LogCaptureFixture) -> None:
    wanshim.activate()
    wan.framework.write(dit=DIT.replace('"original"', '"rewritten"'), vae=VAE)
    dit = wan.dit()
    assert dit.forward.__code__.co_filename == dit.__file__
    wanshim.activate()
    importlib.reload(dit)
    row = wanshim.report().row("fakewan.repair")
    assert (row.state, row.verdict, row.seams) == ("refused", "refuse", ())
    assert row.reason.startswith("fakewan.dit:forward differs from the code of 1.0")
    assert warnings(caplog) == [f"wanshim: fakewan.repair refused: {row.reason}. {row.next_step}."]


def test_unknown_version_with_known_code_is_patched_with_one_warning(
    wan: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    wan.framework.install("1.1")
    wanshim.activate("decode")
    wan.vae()
    wanshim.activate("decode")
    assert wanshim.report().row("fakewan.decode").verdict == "unknown"
    assert states()["fakewan.decode"] == "applied"
    assert warnings(caplog) == [
        "wanshim: fakewan.decode: no row for 1.1, but its code is that of 1.0; patched, not tested on it"
    ]


def test_version_outside_the_declared_range_that_nothing_ran_for_is_patched_with_one_warning(
    wan: Fake, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = activation.CURRENT.matrix
    assert known is not None
    (row,) = known.rows
    cells = {ability: replace(cell, tested="probe") for ability, cell in row.cells.items()}
    outside = replace(known, rows=(replace(row, cells=cells),), declared={"fakewan": ">=2"})
    monkeypatch.setattr(activation.CURRENT, "matrix", outside)
    wanshim.activate("decode")
    wan.vae()
    wanshim.activate("decode")
    found = wanshim.report().row("fakewan.decode")
    reason = "outside the declared range >=2: read, not run"
    assert (found.verdict, found.state, found.reason) == ("patch", "applied", reason)
    assert warnings(caplog) == [f"wanshim: fakewan.decode: {reason}; patched, not tested on it"]


def test_native_feature_steps_aside(wan: Fake) -> None:
    wan.offer(REPAIR, verdict=Verdict.NATIVE, reason="upstream has it")
    wanshim.activate("repair", strict=True)
    dit = wan.dit()
    assert dit.forward(1) == ["original", 1]
    assert states() == {"fakewan.repair": "native"}
    assert wanshim.report(strict=True).rows


def test_variable_that_frameworks_share_speaks_of_the_one_that_is_installed(
    wan: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seam = Seam("otherwan.vae:decode", ours, why="w", upstream="u", remove_when="r")
    elsewhere = replace(DECODE, name="otherwan.decode", seams=(seam,))
    frameworks = {"fakewan": wan.framework.framework, "otherwan": Framework("otherwan", "otherwan")}
    catalog = Catalog(frameworks, {feature.name: feature for feature in (REPAIR, DECODE, elsewhere)}, ())
    monkeypatch.setattr(activation.CURRENT, "catalog", catalog)
    monkeypatch.setenv("WANSHIM_VAE_MODE", "temporal")
    assert states(wanshim.activate(strict=True))["otherwan.decode"] == "off"
    assert warnings(caplog) == []
    wanshim.deactivate()
    for path in (wan.framework.site / "fakewan").iterdir():
        path.unlink()
    importlib.invalidate_caches()
    with pytest.raises(FeatureUnavailable, match="is installed here"):
        wanshim.activate(strict=True)


def test_variable_of_an_installed_feature_that_another_one_turns_on_too_asks_nothing_of_absent_frameworks(
    wan: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    seam = Seam("otherwan.vae:decode", ours, why="w", upstream="u", remove_when="r")
    elsewhere = replace(DECODE, name="otherwan.decode", seams=(seam,), switched_on_by="compute")
    here = replace(DECODE, switched_on_by=("vae_mode", "compute"))
    frameworks = {"fakewan": wan.framework.framework, "otherwan": Framework("otherwan", "otherwan")}
    catalog = Catalog(frameworks, {feature.name: feature for feature in (REPAIR, here, elsewhere)}, ())
    monkeypatch.setattr(activation.CURRENT, "catalog", catalog)
    monkeypatch.setenv("WANSHIM_VAE_MODE", "temporal")
    monkeypatch.setenv("WANSHIM_COMPUTE", "float8")
    assert states(wanshim.activate(strict=True))["otherwan.decode"] == "off"


def test_framework_that_is_not_installed_is_quiet_under_auto_and_named_otherwise(
    wan: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (wan.framework.site / "fakewan").iterdir():
        path.unlink()
    importlib.invalidate_caches()
    assert states(wanshim.activate(strict=True))["fakewan.repair"] == "absent"
    assert warnings(caplog) == []
    wanshim.activate("repair")
    assert warnings(caplog) == [
        "wanshim: fakewan.repair was selected by repair, but no package fakewan is installed here"
    ]
    with pytest.raises(FeatureUnavailable, match="no package fakewan is installed here"):
        wanshim.activate("repair", strict=True)


def test_a_seam_has_what_activate_read_until_the_next_activate(wan: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """And parses no variable itself: one that became invalid meanwhile ends no call."""
    seen: list[tuple[str | None, bool]] = []

    def watched(original: Callable[..., Any], state: SeamState) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            seen.append((state.settings.vae_mode, state.settings.strict))
            return original(*args)

        return forward

    wan.offer(replace(REPAIR, seams=(replace(REPAIR.seams[0], replace=watched),)))
    monkeypatch.setenv("WANSHIM_VAE_MODE", "spatial")
    wanshim.activate()
    dit = wan.dit()
    dit.forward(1)
    monkeypatch.setenv("WANSHIM_VAE_MODE", "temporal")
    dit.forward(1)
    wanshim.activate(strict=True)  # an argument beats the variable, for the seams too
    dit.forward(1)
    monkeypatch.setenv("WANSHIM_VAE_MODE", "no such mode")
    dit.forward(1)
    assert seen == [("spatial", False)] * 2 + [("temporal", True)] * 2


def test_settings_that_now_forbid_a_feature_take_it_out(wan: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(settings: Settings) -> str | None:
        return "too many processes" if (settings.local_world_size or 1) > 1 else None

    wan.offer(replace(REPAIR, blocked=blocked))
    dit = wan.dit()
    original = dit.forward
    wanshim.activate()
    assert dit.forward is not original
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    report = wanshim.activate()
    assert dit.forward is original
    assert (report.rows[0].state, report.rows[0].reason) == ("refused", "too many processes")


def takes_one_process(read: Settings) -> str | None:
    return f"{read.local_world_size} processes" if (read.local_world_size or 1) > 1 else None


def test_named_feature_that_these_processes_cannot_have_raises_without_strict_and_changes_nothing(
    wan: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    wan.offer(REPAIR, replace(DECODE, blocked=takes_one_process))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for named in ("decode", "+fakewan.decode"):
        with pytest.raises(FeatureUnavailable, match=r"^2 processes\. "):
            wanshim.activate(named)
        assert wan.vae().decode(1) == ["original", 1]
    assert states(wanshim.activate("all"))["fakewan.decode"] == "refused"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    wanshim.activate("decode")
    assert wan.vae().decode(1) == ["ours", "original", 1]


def test_named_feature_that_no_number_of_processes_can_have_is_refused_as_before(
    wan: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    wan.offer(replace(DECODE, blocked=lambda read: "never"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert states(wanshim.activate("decode"))["fakewan.decode"] == "refused"


# -- failures ------------------------------------------------------------------------------------------


def test_patch_that_fails_raises_out_of_the_import_under_strict_and_out_of_the_next_one(wan: Fake) -> None:
    wan.offer(replace(REPAIR, seams=(a_seam("dit:forward", fails),)), DECODE)
    wanshim.activate("auto,decode", strict=True)
    for module in (wan.dit, wan.dit, wan.vae):
        with pytest.raises(FeatureUnavailable, match=r"fakewan.repair failed .* the factory fails") as caught:
            module()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert states()["fakewan.repair"] == "failed"
    wanshim.deactivate()
    assert wan.dit().forward(1) == ["original", 1]


def test_patch_that_fails_on_an_imported_module_raises_out_of_activate_under_strict_and_leaves_nothing(
    wan: Fake,
) -> None:
    wan.offer(REPAIR, replace(DECODE, seams=(a_seam("vae:decode", fails),)))
    dit, _ = wan.dit(), wan.vae()
    with pytest.raises(FeatureUnavailable, match=r"fakewan.decode failed"):
        wanshim.activate("auto,decode", strict=True)
    assert dit.forward(1) == ["original", 1]
    assert not wanshim.report().active


def another_copy(wan: Fake, monkeypatch: pytest.MonkeyPatch, dit: str) -> None:
    """The program puts a folder with a copy of its own first on sys.path."""
    own = FakeFramework(wan.framework.site.parent / "own")
    own.write(dit=dit, vae=VAE)
    monkeypatch.syspath_prepend(str(own.site))


def test_decision_on_the_installed_package_says_nothing_of_the_copy_that_is_imported(
    wan: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wanshim.activate().row("fakewan.repair").verdict == "patch"  # which has read the installed one
    another_copy(wan, monkeypatch, DIT.replace("original", "own"))
    assert wan.dit().forward(1) == ["own", 1]
    assert wanshim.report().row("fakewan.repair").state == "refused"


def test_strict_ends_the_import_of_a_copy_whose_code_is_not_that_of_the_installed_package(
    wan: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanshim.activate(strict=True)
    another_copy(wan, monkeypatch, DIT.replace("original", "own"))
    with pytest.raises(FeatureUnavailable, match=r"fakewan\.repair .* differs from the code of 1\.0"):
        wan.dit()


def test_package_that_was_nowhere_at_first_is_not_called_absent_when_it_is_patched(
    wan: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = str(wan.framework.site)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != installed])
    assert wanshim.activate("fakewan.repair").row("fakewan.repair").reason.startswith("no package fakewan")
    monkeypatch.syspath_prepend(installed)
    wan.dit()
    row = wanshim.report().row("fakewan.repair")
    assert (row.state, row.reason) == ("applied", "tested: behaviour")


def test_failing_factory_leaves_the_import_and_the_other_seams_unharmed(
    wan: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    wan.offer(replace(REPAIR, seams=(a_seam("dit:forward"), a_seam("vae:decode", fails))))
    wanshim.activate()
    dit = wan.dit()
    assert dit.forward(1) == ["ours", "original", 1]
    vae = wan.vae()
    assert vae.decode(1) == ["original", 1]
    assert dit.forward(1) == ["original", 1]
    assert dit.forward.__code__.co_filename == dit.__file__
    row = wanshim.report().row("fakewan.repair")
    assert (row.state, row.reason) == ("failed", "RuntimeError: the factory fails")
    assert row.traceback.startswith("Traceback (most recent call last):")
    assert 'raise RuntimeError("the factory fails")' in row.traceback
    assert warnings(caplog) == ["wanshim: fakewan.repair failed and is not in place: RuntimeError: the factory fails"]


def test_failed_feature_stays_out_until_wanshim_is_switched_off_and_on(wan: Fake) -> None:
    broken = [True]

    def sometimes(original: Any, seam: SeamState) -> Callable[..., Any]:
        return fails(original, seam) if broken[0] else ours(original, seam)

    wan.offer(replace(REPAIR, seams=(a_seam("dit:forward", sometimes),)))
    wanshim.activate()
    dit = wan.dit()
    broken[0] = False
    assert states(wanshim.activate())["fakewan.repair"] == "failed"
    wanshim.deactivate()
    wanshim.activate()
    assert dit.forward(1) == ["ours", "original", 1]


def test_framework_that_fails_to_import_keeps_its_own_error(wan: Fake) -> None:
    source = DIT + "raise OSError('no CUDA')\n"
    wan.framework.write(dit=source, vae=VAE)
    wanshim.activate()
    with pytest.raises(OSError, match="no CUDA"):
        wan.dit()
    assert states()["fakewan.repair"] == "registered"
    wan.framework.write(dit=DIT, vae=VAE)
    assert wan.dit().forward(1) == ["ours", "original", 1]


def test_broken_judge_never_reaches_the_import(wan: Fake) -> None:
    def judge(source: Any) -> None:
        raise ZeroDivisionError

    wan.offer(replace(REPAIR, judge=judge))
    wan.framework.write(dit=DIT.replace("original", "rewritten"), vae=VAE)
    wanshim.activate()
    assert wan.dit().forward(1) == ["rewritten", 1]


def test_strict_report_passes_a_fix_that_was_not_needed_and_says_so(wan: Fake) -> None:
    wanshim.activate("decode")
    wan.dit()
    wan.vae().decode(1)
    report = wanshim.report(strict=True)
    assert report.row("fakewan.repair").state == "applied"
    assert "fakewan.repair (fakewan 1.0): patch, not needed in this run; tested: behaviour" in str(report)
    assert "fakewan.decode (fakewan 1.0): patch, exercised, 1 call of decode; tested: behaviour" in str(report)


@pytest.mark.parametrize("text", ["decode", "vae_mode"])
def test_strict_report_fails_on_a_feature_that_a_name_or_a_variable_asked_for(
    wan: Fake, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    if text == "vae_mode":
        monkeypatch.setenv("WANSHIM_VAE_MODE", "tile")
    wanshim.activate("auto" if text == "vae_mode" else text)
    wan.dit().forward(1)
    wan.vae()
    assert "fakewan.decode (fakewan 1.0): patch, applied, never called; " in str(wanshim.report())
    with pytest.raises(FeatureUnavailable, match=r"fakewan\.decode was selected by \w+ and is applied"):
        wanshim.report(strict=True)


@pytest.mark.parametrize("text", ["auto", "all"])
def test_strict_report_fails_on_a_fix_that_failed(wan: Fake, text: str) -> None:
    wan.offer(replace(REPAIR, seams=(a_seam("dit:forward", fails),)))
    wanshim.activate(text)
    wan.dit()
    with pytest.raises(FeatureUnavailable, match=r"fakewan\.repair was selected by \w+ and is failed: RuntimeError"):
        wanshim.report(strict=True)


def test_strict_report_fails_on_a_named_feature_that_never_ran(wan: Fake) -> None:
    wanshim.activate("repair")
    dit = wan.dit()
    with pytest.raises(FeatureUnavailable) as caught:
        wanshim.report(strict=True)
    assert str(caught.value) == (
        "fakewan.repair was selected by repair and is applied, never called: tested: behaviour. "
        "Expected that it is in place and had its effect. Run `wanshim doctor` to see every seam."
    )
    dit.forward(1)
    assert wanshim.report(strict=True).row("fakewan.repair").calls == 1


def test_calls_that_were_left_to_the_framework_are_counted_apart_and_fail_a_strict_report(wan: Fake) -> None:
    def falls_back(original: Any, seam: Any) -> Any:
        def replacement(x: int) -> Any:
            if seam.enter() and x != 2:
                seam.fall_back("not 2")
            return original(x)

        return replacement

    wan.offer(replace(DECODE, seams=(a_seam("vae:decode", falls_back),)))
    wanshim.activate("decode")
    vae = wan.vae()
    vae.decode(1)
    row = wanshim.report().row("fakewan.decode")
    assert (row.state, row.calls, row.fallbacks) == ("ineffective", 1, {"not 2": 1})
    assert wanshim.report().to_dict()["rows"][0]["seams"][0]["fallbacks"] == {"not 2": 1}
    with pytest.raises(FeatureUnavailable, match=r"is left to the framework 1 time: not 2: tested"):
        wanshim.report(strict=True)
    vae.decode(2)
    report = wanshim.report(strict=True)
    assert report.row("fakewan.decode").state == "exercised"
    for counted in ("2 calls of decode", "2 calls"):  # of the feature, and of its seam
        assert str(report).count(f"exercised, {counted}, of which left to the framework 1 time: not 2") == 1
    assert str(report).count("left to the framework: not 2") == 1


FAMILIES = replace(
    DECODE,
    seams=(a_seam("dit:forward"), a_seam("vae:decode"), a_seam("vae:MODES", lambda v, seam: ["ours"], kind=Kind.VALUE)),
    families={"Transformers": ("dit",), "VAEs": ("vae",)},
)


@pytest.mark.parametrize("strict", [False, True])
def test_family_that_is_left_out_says_so_when_it_is_used_and_the_other_is_patched(
    wan: Fake, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    wan.offer(FAMILIES)
    wan.framework.write(dit=DIT, vae=VAE.replace('"original"', '"another"'))
    wanshim.activate("none,decode", strict=strict)
    assert wan.dit().forward(1) == ["ours", "original", 1]
    vae = wan.vae()
    assert (vae.MODES, warnings(caplog)) == (["plain"], [])  # nobody has used it
    row = wanshim.report().row("fakewan.decode")
    assert (row.state, row.verdict) == ("exercised", "patch")
    assert "VAEs is left out: fakewan.vae:decode differs from the code of 1.0" in row.reason
    if strict:
        with pytest.raises(
            FeatureUnavailable, match=r"fakewan.decode is unavailable for this model: VAEs is left out: "
        ):
            vae.decode(2)
    else:
        assert vae.decode(2) == vae.decode(2) == ["another", 2]
        (said,) = warnings(caplog)
        assert said.startswith("wanshim: fakewan.decode: VAEs is left out: fakewan.vae:decode differs")
        assert list(wanshim.report().row("fakewan.decode").fallbacks.values()) == [2]
    wanshim.deactivate()
    assert vae.decode(2) == ["another", 2]


def test_reasons_and_notes_of_a_server_have_an_end() -> None:
    state = seam.SeamState(a_seam("vae:decode"))
    state.off = False
    for number in range(1000):
        assert state.enter()
        assert state.enter()
        state.fall_back(f"no plan fits: {number / 7:.2f} GiB are free")
        state.fall_back("unknown: " + "x" * number)
        state.notes.append(f"plan {number}")
    assert state.effects == 0
    assert len(state.fallbacks) == seam.MAX_REASONS + 1
    assert state.fallbacks["no plan fits: 0.00 GiB are free"] == 1000
    assert state.fallbacks[seam.OTHER_REASONS] == 1000 - seam.MAX_REASONS + 1
    assert len(state.notes) == seam.MAX_NOTES
    assert state.notes[-1] == "plan 999"


def test_plugin_never_raises(wan: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("WANSHIM_FEATURES", "auto")
    activate_in_worker()
    activate_in_worker()
    assert wan.dit().forward(1) == ["ours", "original", 1]
    monkeypatch.setenv("WANSHIM_FEATURES", "repare")
    activate_in_worker()
    assert warnings(caplog) == ["wanshim is not active in this worker"]


# -- threads -------------------------------------------------------------------------------------------


def test_two_threads_at_once_wrap_once(wan: Fake) -> None:
    start = threading.Barrier(4)
    errors: list[BaseException] = []

    def work(act: Callable[[], Any]) -> None:
        try:
            start.wait(20)
            for _ in range(10):
                act()
        except BaseException as error:
            errors.append(error)

    acts = [wanshim.activate, wanshim.activate, wan.dit, lambda: wanshim.report().rows]
    threads = [threading.Thread(target=work, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert wan.dit().forward(1) == ["ours", "original", 1]
    assert states()["fakewan.repair"] == "exercised"


SLOW = "import fakewan.gate\nfakewan.gate.started.set()\nfakewan.gate.go.wait(20)\n"
GATE = "import threading\nstarted, go = threading.Event(), threading.Event()\n"


def test_activating_while_another_thread_imports_the_module_patches_it_when_it_is_done(wan: Fake) -> None:
    """Before the importing thread can call anything, without any later look at the modules."""
    wan.framework.write(dit=SLOW + DIT, vae=VAE, gate=GATE)
    wan.offer(REPAIR)
    events = wan.framework.module("gate")
    called: list[Any] = []
    importing = threading.Thread(target=lambda: called.append(wan.dit().forward(1)))
    importing.start()
    assert events.started.wait(20)
    wanshim.activate()
    events.go.set()
    importing.join(20)
    assert called == [["ours", "original", 1]]
    assert states()["fakewan.repair"] == "exercised"


def test_a_look_while_an_import_ends_leaves_the_patch_to_that_import(
    wan: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import waits for wanshim's lock at its end. Who imports the module meanwhile gets it patched."""
    current, ended = activation.CURRENT, threading.Event()
    on_executed = current.on_executed
    monkeypatch.setattr(current, "on_executed", lambda module: (ended.set(), on_executed(module)))
    wan.framework.write(dit=SLOW + DIT, vae=VAE, gate=GATE)
    wan.offer(REPAIR)
    events = wan.framework.module("gate")
    called: list[Any] = []
    importing, late = (threading.Thread(target=lambda: called.append(wan.dit().forward(1))) for _ in range(2))
    importing.start()
    assert events.started.wait(20)
    wanshim.activate()
    with current.lock:
        events.go.set()
        assert ended.wait(20)
        late.start()
        late.join(0.1)
        assert states()["fakewan.repair"] == "registered"
    importing.join(20)
    late.join(20)
    assert called == [["ours", "original", 1]] * 2
    assert states()["fakewan.repair"] == "exercised"


@pytest.mark.parametrize("strict", [True, False])
def test_an_import_that_ends_while_activate_looks_at_it_is_patched_there(
    wan: Fake, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    dit = wan.dit()
    monkeypatch.setattr(activation, "is_initializing", lambda module: module is dit)
    wan.offer(REPAIR)
    wanshim.activate(strict=strict)
    assert dit.forward(1) == ["ours", "original", 1]
    assert type(dit.__spec__) is importlib.machinery.ModuleSpec
    wanshim.deactivate()
    wan.offer(replace(REPAIR, seams=(a_seam("dit:forward", fails),)))
    if strict:
        with pytest.raises(FeatureUnavailable, match="the factory fails"):
            wanshim.activate(strict=True)
        assert states()["fakewan.repair"] == "off"
    else:
        assert states(wanshim.activate()) == {"fakewan.repair": "failed"}
    assert wan.dit() is dit


def test_activating_again_behind_the_import_wraps_once(wan: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a post-import hook of wrapt does it: behind our loader, while the module still counts as being imported."""

    class Chained:
        def __init__(self, loader: Any) -> None:
            self.create_module, self.loader = loader.create_module, loader

        def exec_module(self, module: types.ModuleType) -> None:
            self.loader.exec_module(module)
            wanshim.activate()

    class InFront:
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            spec = activation.CURRENT.hook.find_spec(name, path, target)  # which asks this one too
            if spec is not None:
                spec.loader = Chained(spec.loader)  # type: ignore[assignment]
            return spec

    wanshim.activate()
    monkeypatch.setattr(sys, "meta_path", [InFront(), *sys.meta_path])
    assert wan.dit().forward(1) == ["ours", "original", 1]
    assert states()["fakewan.repair"] == "exercised"


def test_activating_while_another_thread_searches_for_the_module_patches_it(
    wan: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That search began before wanshim's finder was there, and goes on without it."""
    searching, go = threading.Event(), threading.Event()

    class Slow:
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            if name == "fakewan.dit":
                searching.set()
                go.wait(20)
            return importlib.machinery.PathFinder.find_spec(name, path, target)

    monkeypatch.setattr(sys, "meta_path", [Slow(), *sys.meta_path])
    monkeypatch.setattr(hooks, "SEARCH_WAIT_S", 20.0)
    called: list[Any] = []
    importing = threading.Thread(target=lambda: called.append(wan.dit().forward(1)))
    importing.start()
    assert searching.wait(20)
    activating = threading.Thread(target=wanshim.activate)
    activating.start()
    while not any(isinstance(finder, hooks.ImportHook) for finder in sys.meta_path):
        time.sleep(0.001)
    go.set()
    activating.join(20)
    importing.join(20)
    assert wan.dit().forward(1) == ["ours", "original", 1]


def test_an_import_that_fails_after_activation_leaves_nothing_behind(wan: Fake) -> None:
    wan.framework.write(dit=SLOW + "raise ValueError('half')\n", vae=VAE, gate=GATE)
    wan.offer(REPAIR)
    events = wan.framework.module("gate")
    errors: list[str] = []

    def load() -> None:
        with pytest.raises(ValueError, match="half") as failed:
            wan.dit()
        errors.append(str(failed.value))

    importing = threading.Thread(target=load)
    importing.start()
    assert events.started.wait(20)
    wanshim.activate()
    events.go.set()
    importing.join(20)
    assert errors == ["half"]
    assert states()["fakewan.repair"] == "registered"
    wan.framework.write(dit=DIT, vae=VAE)
    assert wan.dit().forward(1) == ["ours", "original", 1]


def test_activating_from_inside_the_frameworks_own_import_patches_it_when_it_is_done(wan: Fake) -> None:
    wan.framework.write(dit="import wanshim\nwanshim.activate()\n" + DIT, vae=VAE)
    wan.offer(REPAIR, DECODE)
    dit = wan.dit()
    assert dit.forward(1) == ["ours", "original", 1]
    assert type(dit.__spec__) is importlib.machinery.ModuleSpec
    assert states()["fakewan.repair"] == "exercised"


def test_strict_activation_inside_the_import_ends_that_import_where_the_patch_fails(wan: Fake) -> None:
    wan.framework.write(dit="import wanshim\nwanshim.activate(strict=True)\n" + DIT, vae=VAE)
    wan.offer(replace(REPAIR, seams=(a_seam("dit:forward", fails),)))
    with pytest.raises(FeatureUnavailable, match="the factory fails"):
        wan.dit()
    assert "fakewan.dit" not in sys.modules


# -- records -------------------------------------------------------------------------------------------


def test_report_is_plain_data_and_text(wan: Fake) -> None:
    report = wanshim.activate("repair")
    wan.dit().forward(1)
    report = wanshim.report()
    data = report.to_dict()
    assert data["active"] is True
    assert data["rows"][0]["feature"] == "fakewan.repair"
    assert data["rows"][0]["seams"][0]["calls"] == 1
    assert str(report).splitlines()[:2] == [
        "fakewan.repair (fakewan 1.0): patch, exercised, 1 call of forward; tested: behaviour",
        "    fakewan.dit:forward: exercised, 1 call",
    ]
    with pytest.raises(KeyError):
        report.row("fakewan.gone")


def test_activate_reads_no_matrix_until_someone_looks(wan: Fake, tmp_path: Path) -> None:
    current = activation.CURRENT
    wan.monkeypatch.setattr(current, "matrix", None)
    wanshim.activate()
    assert current.matrix is None
    assert wanshim.report().rows
    assert current.matrix is not None


def test_allocator_is_set_up_where_a_selected_feature_plans(wan: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in activation.settings.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    wanshim.activate()
    assert not activation.CURRENT.settings.expandable_segments  # nothing is planned
    monkeypatch.setattr(activation.CURRENT, "plans", lambda selection, read: True)
    wanshim.activate()
    assert activation.CURRENT.settings.expandable_segments
    wanshim.deactivate()
    assert not activation.settings.read().expandable_segments
