"""The one place that joins features, matrix, adapters and hooks.

What only a decision or a report needs is imported there: many programs that activate never come to either.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from wanshim import hand_over, settings
from wanshim.core.ranks import agreement
from wanshim.errors import FeatureUnavailable, SettingInvalid, WanshimError, sentence
from wanshim.patching import transaction
from wanshim.patching.feature import Feature
from wanshim.patching.hooks import ImportHook, is_initializing, when_imported
from wanshim.patching.probe import SourceTree
from wanshim.patching.seam import Kind, SeamState, State
from wanshim.patching.verdict import Verdict
from wanshim.reporting import AUTO_WITH, Report, ReportRow, SeamRow, check, may_fail
from wanshim.select import catalog, features

if TYPE_CHECKING:
    from wanshim.process_report import ProcessReport
    from wanshim.select.decision import Decision
    from wanshim.select.matrix import Matrix

DISABLED = "wanshim is switched off by WANSHIM_DISABLE"
FORK_WAIT_S = 2.0


class FeatureRun:
    """One selected feature in this process: the decision, its seams, and what went wrong."""

    def __init__(self, feature: Feature) -> None:
        self.feature = feature
        self.selected_by = ""
        self.named = False
        self.seams = [SeamState(seam) for seam in feature.seams]
        self.decision: Decision | None = None
        self.error: Exception | None = None
        self.traceback = ""
        self.reason = ""
        self.prepared = feature.prepare is None

    @property
    def is_in(self) -> bool:
        return any(state.undo is not None for state in self.seams)


class Activation:
    """The state of the process. One instance, `CURRENT`; every change happens under its lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._forking = threading.local()
        self.hook = ImportHook()
        self.catalog: catalog.Catalog | None = None
        self.settings = settings.Settings()
        self.announce: Callable[[], None] | None = None  # called when a selected framework has been imported
        self.runs: dict[str, FeatureRun] = {}
        self.matrix: Matrix | None = None
        self.note = "wanshim is not active"
        self.unread: tuple[str, ...] = ()  # sentences on variables that are set and without effect
        self.process_report: ProcessReport | None = None  # of this process, once it was asked for
        self.has_children = False  # that carry what was activated here

    def known(self) -> catalog.Catalog:
        if self.catalog is None:
            self.catalog = catalog.discover()
        return self.catalog

    def rows(self) -> Matrix:
        if self.matrix is None:
            from wanshim.select import matrix

            known = [matrix.load()]
            for path in self.known().matrices:
                try:
                    known.append(matrix.load(path))
                except WanshimError as error:
                    _warn("the matrix of a third party's adapters is left out: %s", error)
            self.matrix = matrix.merge(*known)
        return self.matrix

    def select(self, text: str | None, read: settings.Settings) -> features.Selection:
        if text is not None and not isinstance(text, str):
            raise SettingInvalid(
                f"the features given are {text!r}, of type {type(text).__name__}",
                expected='one text, with commas between its items, such as "diffsynth.progress,-diffsynth.fp8_lora"',
            )
        source = settings.FEATURES if text is None else "the list of features"
        text = text if text is not None else read.features or "auto"
        auto = {name: feature.is_auto(read) for name, feature in self.known().features.items()}
        found = features.select(text, auto, self.switched(read), source)
        return replace(found, reasons={name: self._reason(name, why) for name, why in found.reasons.items()})

    def _reason(self, name: str, why: str) -> str:
        feature = self.known().features[name]
        if why == "auto" and not feature.auto:
            return AUTO_WITH + settings.names_of(feature.auto_with)[0]
        return hand_over.as_written(why)

    def switched(self, read: settings.Settings) -> dict[str, str]:
        """The features that a variable of their own switches on, with its name."""
        switches = {
            name: [read.sources[field] for field in on]
            for name, feature in self.known().features.items()
            if (on := feature.switched(read))
        }
        return self._of_installed(switches)

    def plans(self, selection: features.Selection, read: settings.Settings) -> bool:
        """Whether a selected feature plans how devices are used."""
        asked = set(filter(read.is_on, settings.PLANNING))
        return any(asked.intersection(self.known().features[name].switches) for name in selection.reasons)

    def _of_installed(self, switches: dict[str, list[str]]) -> dict[str, str]:
        """The first variable of each feature. One that frameworks share speaks of those that are installed, or of all
        where none is."""
        known = self.known().features
        here = {name for name in switches if SourceTree.of_installed(known[name].framework).root is not None}
        claimed = {variable for name in here for variable in switches[name]}
        own = {
            name: [each for each in found if name in here or each not in claimed] for name, found in switches.items()
        }
        return {name: found[0] for name, found in own.items() if found}

    # -- changes -------------------------------------------------------------------------------------

    def change_to(self, selection: features.Selection, read: settings.Settings) -> None:
        """Make `selection` the truth: take out what left it, put in what joined it."""
        demanded = self._demand(selection, read) if read.strict else {}
        self.settings = read
        runs = {name: self.runs.get(name) or FeatureRun(self.known().features[name]) for name in selection.reasons}
        for name, run in runs.items():
            run.selected_by, run.named = selection.reasons[name], name in selection.named
            run.decision = demanded.get(name)  # an earlier one may rest on other settings
            for state in run.seams:
                state.settings, state.named = read, run.named
        for name, run in self.runs.items():
            if name not in runs or (run.is_in and not self.decide(run).applies):
                self._take_out(run)
        self.runs, self.note = runs, ""
        self._warn_of_absent()
        self.hook.watch(self._watched(), self.on_executed)
        self._catch_up()
        try:
            self._check_strict()
        except FeatureUnavailable:
            self.clear()
            raise

    def _watched(self) -> list[str]:
        packages = {run.feature.framework for run in self.runs.values() if not run.prepared}
        return sorted(packages | {state.seam.module for run in self.runs.values() for state in run.seams})

    def _catch_up(self) -> None:
        """Put in what was imported before the hook was there, and later what is being imported now."""
        for name in self._watched():
            module = sys.modules.get(name)
            if module is not None and is_initializing(module) and when_imported(module, self.on_executed):
                continue
            module = sys.modules.get(name)  # an import that ended just now may have failed
            if module is not None:
                self.on_import(module)

    def _warn_of_absent(self) -> None:
        for run in self.runs.values():
            framework = run.feature.framework
            if run.named and not run.reason and SourceTree.of_installed(framework).root is None:
                run.reason = f"no package {framework} is installed here"
                _warn("%s was selected by %s, but %s", run.feature.name, run.selected_by, run.reason)

    def _demand(self, selection: features.Selection, read: settings.Settings) -> dict[str, Decision]:
        decisions = {name: self._decide(self.known().features[name], read) for name in selection.reasons}
        for name, decision in decisions.items():
            excused = decision.verdict is Verdict.ABSENT and name not in selection.named
            excused = excused or may_fail(selection.reasons[name])
            if not excused and decision.verdict in (Verdict.REFUSE, Verdict.ABSENT):
                raise unavailable(name, decision)
        return decisions

    def check_launch(self, selection: features.Selection, read: settings.Settings) -> None:
        """Raise, before the program loads anything, for what the user named and this launch cannot give.

        Raises:
            FeatureUnavailable: one process could have the feature, and these processes cannot.
        """
        for name in selection.named:
            feature = self.known().features[name]
            blocked = feature.blocked or (lambda read: None)
            reason = blocked(read)
            alone = replace(read, local_world_size=1, local_rank=0, engine=None)
            if reason is None or blocked(alone) is not None:
                continue
            if self._decide(feature, read).verdict is Verdict.REFUSE:
                raise FeatureUnavailable(reason, hint=f"{name} is selected by {selection.reasons[name]}")

    def look_at_variables(self, selection: features.Selection, read: settings.Settings) -> tuple[str, ...]:
        """Sentences on variables that are set and without effect. Each is a warning, unless a parent has said it.

        Raises:
            SettingInvalid: strict, and there is one.
        """
        found = settings.unknown()
        if read.sources:
            from wanshim.select import variables

            found += variables.without_effect(read, selection.reasons, self.known().features)
        if self.has_children or not hand_over.has_parent():
            if read.strict and found:
                raise SettingInvalid(found[0])
            for line in found:
                if line not in self.unread:
                    _warn("%s", line)
        return tuple(found)

    def decide(self, run: FeatureRun) -> Decision:
        """The decision on the package that is imported, or that would be now: a program adds folders to sys.path."""
        root = SourceTree.of_installed(run.feature.framework).root
        if run.decision is None or run.decision.root != root:
            run.decision = self._decide(run.feature, self.settings)
        return run.decision

    def applies(self, name: str) -> bool:
        """Whether the selected feature is in place, or goes in when its modules are imported."""
        run = self.runs[name]
        try:
            return run.error is None and self.decide(run).applies
        except Exception:
            return False  # as a broken judge, which is reported when the feature's own module is imported

    def _decide(
        self, feature: Feature, read: settings.Settings, sources: dict[str, SourceTree] | None = None
    ) -> Decision:
        from wanshim.select import decision

        return decision.decide(feature, self.known().frameworks[feature.framework], self.rows(), read, sources)

    def on_executed(self, module: ModuleType) -> None:
        """A watched module has run, for the first time or in a reload, which made all its objects anew."""
        with self.lock:
            for run in self.runs.values():
                for state in run.seams:
                    if state.seam.module == module.__name__:
                        transaction.retire_after_reload(state)
            self.on_import(module)
            self._catch_up()
            self._check_strict()
        if self.announce is not None:
            self.announce()

    def _check_strict(self) -> None:
        """Under strict a patch that failed ends the import that it failed in, and every later one."""
        demanded = (run for run in self.runs.values() if not may_fail(run.selected_by))
        failed = next((run for run in demanded if run.error is not None), None)
        if self.settings.strict and failed is not None:
            raise FeatureUnavailable(
                f"{failed.feature.name} failed and is not in place: {failed.reason}",
                hint=f"Leave it out with WANSHIM_FEATURES=-{failed.feature.name}, or run without WANSHIM_STRICT",
            ) from failed.error

    def on_import(self, module: ModuleType) -> None:
        """A watched module is in sys.modules. Whatever goes wrong here is kept in the run; see `_check_strict`."""
        with self.lock:
            for run in list(self.runs.values()):
                here = [s for s in run.seams if s.seam.module == module.__name__ and s.undo is None]
                of_package = module.__name__ == run.feature.framework and not run.prepared
                if (here or of_package) and not run.traceback:
                    try:
                        if of_package:
                            self._prepare(run)
                        if here:
                            self._put_in(run, here)
                    except Exception as error:
                        self._fail(run, error)

    def _prepare(self, run: FeatureRun) -> None:
        run.prepared = True
        if run.feature.prepare is not None and self.decide(run).applies:
            run.feature.prepare(self.settings)

    def _put_in(self, run: FeatureRun, here: list[SeamState]) -> None:
        decision = self.decide(run)
        if not decision.applies:
            if self.settings.strict and decision.verdict is Verdict.REFUSE and not may_fail(run.selected_by):
                raise unavailable(run.feature.name, decision)  # `_demand` has read another package
            self._say_refused(run, decision)
            return
        run.reason = ""  # of a time when it was not in place
        if decision.untested and not run.is_in:
            _warn("%s: %s; patched, not tested on it", run.feature.name, decision.reason)
        for state in here:
            family = run.feature.family_of(state.seam.target)
            reason = decision.left_out.get(family or "")
            state.left_out, state.replace = decision.left_out, state.seam.replace
            if family is not None and reason is not None:
                state.replace = run.feature.left_to_framework(family, reason)
        transaction.put_in(list(filter(_goes_in, here)))

    def _say_refused(self, run: FeatureRun, decision: Decision) -> None:
        if decision.verdict is Verdict.REFUSE and run.reason != decision.reason:
            run.reason = decision.reason
            hint = f" {sentence(decision.next_step)}" if decision.next_step else ""
            _warn("%s refused: %s%s", run.feature.name, sentence(decision.reason), hint)

    def _fail(self, run: FeatureRun, error: Exception) -> None:
        import traceback

        run.error, run.traceback = error, traceback.format_exc()
        run.reason = f"{type(error).__name__}: {error}"
        for state in reversed(run.seams):
            transaction.take_out(state)
        _warn("%s failed and is not in place: %s", run.feature.name, run.reason)

    def _take_out(self, run: FeatureRun) -> None:
        for state in reversed(run.seams):
            if not transaction.take_out(state):
                _warn("%s is covered by a foreign object; it stays, ours is off", state.seam.target)

    def clear(self) -> None:
        self.hook.clear()
        for run in reversed(list(self.runs.values())):
            self._take_out(run)
        self.runs, self.unread = {}, ()
        self.note = "wanshim is not active"

    def decisions(self, names: Iterable[str]) -> Iterator[tuple[str, Decision]]:
        """Decisions for the features of these names, without activating them."""
        sources: dict[str, SourceTree] = {}  # a file that several features look at is read once
        for name in names:
            feature = self.known().features[name]
            yield name, self._decide(feature, self.settings, sources)

    # -- forks ---------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Wait until no other thread is in the middle of a change, so that the child has all of it or none. Not for
        ever: that thread may wait for an import that the forking one holds."""
        self._forking.held = self.lock.acquire(timeout=FORK_WAIT_S)

    def after_fork(self) -> None:
        """In the parent."""
        if self._forking.held:
            self.lock.release()

    def after_fork_in_child(self) -> None:
        """A lock that another thread held has nobody here who would release it."""
        self.lock = threading.RLock()
        for run in self.runs.values():
            for state in run.seams:
                state.start_anew()

    # -- looking -------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """This rank's patches, for `core.ranks.agreement`: each feature in place with the hash of its code."""
        import socket

        with self.lock:
            runs = {name: (run, self.decide(run)) for name, run in self.runs.items()}
        carried = {name: pair for name, pair in runs.items() if pair[1].applies}
        return {
            "wanshim": sys.modules["wanshim"].__version__,  # an import of it would be a circle
            "features": {name: _code_hash(run, decision) for name, (run, decision) in carried.items()},
            "packages": {run.feature.framework: str(decision.version) for run, decision in carried.values()},
            "host": socket.gethostname(),
        }

    def report(self) -> Report:
        note = "\n".join(filter(None, (self.note, *self.unread, *self.known().left_out)))
        return Report(self.known().features, self._report_row, selected=self.runs, note=note)

    def _report_row(self, name: str) -> ReportRow:
        with self.lock:
            self._catch_up()
            return self._row(name, self.known().features[name])

    def _row(self, name: str, feature: Feature) -> ReportRow:
        run = self.runs.get(name)
        decision = self.decide(run or FeatureRun(feature))
        seams = tuple(_seam_row(s) for s in run.seams) if run is not None else ()
        return ReportRow(
            feature=name,
            framework=feature.framework,
            version=decision.version,
            selected_by=run.selected_by if run is not None else None,
            verdict=decision.verdict.value,
            state=_feature_state(run, decision, seams).value,
            calls=sum(seam.calls for seam in seams),
            origin=self.known().origins.get(name, ""),
            reason=(run.reason if run is not None and run.reason else decision.reason),
            next_step=decision.next_step,
            traceback=run.traceback if run is not None else "",
            seams=seams if decision.applies else (),
            notes=tuple(note for s in run.seams for note in s.notes) if run is not None else (),
            headline=next((s.notes.headline for s in run.seams if s.notes.headline), "") if run is not None else "",
            closing="; ".join(s.notes.closing for s in run.seams if s.notes.closing) if run is not None else "",
            fallbacks=dict(sum((Counter(seam.fallbacks) for seam in seams), Counter())),
            failed_calls=sum(seam.failed_calls for seam in seams),
        )


def _goes_in(state: SeamState) -> bool:
    """Whether a seam has its place. Of a family that is left out, a value and code inside a graph say nothing."""
    if state.is_left_out and (state.seam.in_graph or state.seam.kind is Kind.VALUE):
        return False
    return state.required or transaction.has_target(state)


def _warn(text: str, *values: object) -> None:
    import logging

    logging.getLogger("wanshim").warning("wanshim: " + text, *values)


def _code_hash(run: FeatureRun, decision: Decision) -> str:
    if run.traceback:
        return "failed"
    import hashlib

    return hashlib.sha256(repr(sorted(decision.fingerprints.items())).encode()).hexdigest()[:12]


CURRENT = Activation()
os.register_at_fork(
    before=CURRENT.before_fork, after_in_parent=CURRENT.after_fork, after_in_child=CURRENT.after_fork_in_child
)


def activate(features: str | None = None, *, strict: bool | None = None) -> Report:
    """Select features and put their patches in, now or when their framework is imported. The variables are read here,
    once: after a change of one, call it again.

    Args:
        features: the WANSHIM_FEATURES grammar, such as `"diffsynth.progress"`, which adds to `auto`, or
            `"none,diffsynth.progress"`, that feature alone. Default: WANSHIM_FEATURES, else `auto`.
        strict: raise where a selected feature is unavailable, instead of warning. Default: WANSHIM_STRICT.

    Returns:
        The report as it stands now; `wanshim.report()` gives a later one.

    Raises:
        SettingInvalid: a token names no feature; nothing is changed.
        SettingInvalid, WanshimError: `features`, a variable or the matrix cannot be read, or, strict, a variable that
            is set has no effect; nothing is changed.
        FeatureUnavailable: strict, and a selected feature is unavailable; nothing is changed.
    """
    return _activate(features, strict)


def activate_as_parent() -> None:
    """Activate with the features of the parent of this process, if it was activated or a variable asks for it."""
    _activate(hand_over.inherited(), None, only_if_asked=True)


def _activate(features: str | None, strict: bool | None, *, only_if_asked: bool = False) -> Report:
    with CURRENT.lock:
        asked = settings.read()
        if only_if_asked and not (hand_over.asked_for() or CURRENT.switched(asked)):
            return CURRENT.report()
        if asked.disable:
            CURRENT.clear()
            CURRENT.settings, CURRENT.note = asked, DISABLED
            hand_over.hand_down_nothing()
            return Report((), CURRENT._report_row, selected=(), note=CURRENT.note)
        read = asked if strict is None else replace(asked, strict=strict)
        selection = CURRENT.select(features, read)
        CURRENT.check_launch(selection, read)
        if CURRENT.plans(selection, read):
            read = hand_over.expand_segments(read, torch_started="torch" in sys.modules)
        unread = CURRENT.look_at_variables(selection, read)
        CURRENT.change_to(selection, read)
        CURRENT.unread = unread
        agreement.set_fingerprint_provider(CURRENT.fingerprint)
        if CURRENT.process_report is None and (asked.report or asked.strict):
            from wanshim.process_report import ProcessReport

            CURRENT.process_report = ProcessReport(CURRENT)
            CURRENT.process_report.begin(asked)
        hand_over.hand_down(features)
        CURRENT.has_children = True
        return CURRENT.report()


def deactivate() -> None:
    """Put every original back, by identity, and forget all hooks. Safe to call twice."""
    with CURRENT.lock:
        CURRENT.clear()
        agreement.set_fingerprint_provider(None)
        hand_over.hand_down_nothing()
        CURRENT.has_children = False


def report(*, strict: bool = False) -> Report:
    """The report: each selected feature, whether it is patched, and how often it ran.

    Raises:
        FeatureUnavailable: strict, and a feature that the user named (itself, its framework or ability, or by its
            variable) is not in place or had no effect, or one that `auto` or `all` selected failed or was displaced.
    """
    with CURRENT.lock:
        result = CURRENT.report()
    if strict:
        check(result.selected)
    return result


def unavailable(feature: str, decision: Decision) -> FeatureUnavailable:
    """The error for a feature that was requested but unavailable."""
    return FeatureUnavailable(
        f"{feature} is unavailable with version {decision.version}: {decision.reason}",
        hint=decision.next_step or f"Leave it out with WANSHIM_FEATURES=...,-{feature}",
    )


def _seam_row(state: SeamState) -> SeamRow:
    note = f"; also rebound {', '.join(state.rebound)}" if state.rebound else ""
    covered = transaction.covered_on_an_instance(state) if state.undo is not None else None
    if covered is not None:
        note += f"; covered by an attribute set on an instance of {covered}"
    return SeamRow(
        state.seam.target, _seam_state(state, covered).value, state.calls, note, dict(state.fallbacks), state.failed
    )


def _seam_state(state: SeamState, covered: str | None) -> State:
    if state.undo is None:
        return State.REGISTERED
    if covered is not None or not transaction.in_place(state):
        return State.DISPLACED
    if not (state.calls or state.compiled):
        return State.APPLIED
    if state.effects > 0:
        return State.EXERCISED
    return State.UNNEEDED if state.unneeded and not state.fallbacks else State.INEFFECTIVE


def _feature_state(run: FeatureRun | None, decision: Decision, seams: Sequence[SeamRow]) -> State:
    if run is None:
        return State.OFF
    if run.traceback:
        return State.FAILED
    if not decision.applies:
        return {Verdict.NATIVE: State.NATIVE, Verdict.ABSENT: State.ABSENT}.get(decision.verdict, State.REFUSED)
    states = [State(row.state) for row in seams]
    for state in (State.DISPLACED, State.EXERCISED, State.UNNEEDED, State.INEFFECTIVE):
        if state in states and not (state is State.UNNEEDED and any(row.fallbacks for row in seams)):  # as of one seam
            return state
    required = [state for state, of in zip(states, run.seams) if of.required]
    waits = State.REGISTERED in required or set(states) == {State.REGISTERED}
    return State.REGISTERED if waits else State.APPLIED
