"""Findings of `wanshim doctor`, and the checks of `wanshim run` before it starts: nothing imported, nothing patched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from wanshim import settings
from wanshim.activation import DISABLED, Activation
from wanshim.core.resume.state import newest_facts
from wanshim.core.shared import gpus
from wanshim.core.shared.files import prompt_cache
from wanshim.doctor import process_coverage
from wanshim.doctor.known_engines import KnownEngines, known_engines, unlearned, without_frontend
from wanshim.errors import FeatureUnavailable, SettingInvalid
from wanshim.patching.feature import Feature
from wanshim.patching.verdict import Verdict
from wanshim.reporting import is_named_by, may_fail
from wanshim.select import variables
from wanshim.select.decision import Decision
from wanshim.select.features import Selection

NOT_COUNTED = (
    "How many processes the command starts, its launcher alone knows, when it runs; what so many processes cannot have "
    "is refused there."
)
DEVICE = re.compile(r"(cpu|mps|meta)|(cpu|cuda|hpu|mlu|mps|mtia|musa|npu|xla|xpu|privateuseone):\d+")  # torch's names


@dataclass(frozen=True)
class Diagnosis:
    """One row a feature, and the features that were requested but unavailable."""

    rows: tuple[DiagnosisRow, ...]
    missing: tuple[str, ...]
    note: str = ""  # why nothing at all would happen, or which adapters are left out
    unreached: tuple[process_coverage.Finding, ...] = ()  # processes that would run without the patches
    unknown: tuple[str, ...] = ()  # sentences on variables that nothing reads at all
    without_effect: tuple[str, ...] = ()  # and on those that nothing reads in this combination
    prompt_cache: str = ""  # the folder of encoded prompts, if there is one
    run_states: tuple[
        str, ...
    ] = ()  # folders with the state of a run, in the command's output folder or below the one of WANSHIM_RESUME
    run_outlooks: tuple[str, ...] = ()  # of each of these: what its command does from there
    not_counted: str = ""  # that nothing here depends on how many processes the command starts
    engines: tuple[KnownEngines, ...] = ()  # what is known of cuDNN's engines
    unlearned: tuple[str, ...] = ()  # names of GPUs in sight for which nothing is known of them
    without_frontend: tuple[str, ...] = ()  # names of GPUs in sight, if what finds them is not installed
    gpus: int | None = None  # in sight; None: they cannot be counted
    disabled: bool = False
    strict: bool = False

    @property
    def unknown_code(self) -> tuple[str, ...]:
        """Under strict: the features of installed frameworks, on or off, that are refused for code that is not known.
        Where features were named, of their frameworks."""
        named = {row.framework for row in self.rows if row.selected_by is not None and is_named_by(row.selected_by)}
        rows = (row for row in self.rows if not named or row.framework in named)
        return tuple(row.feature for row in rows if not row.known) if self.strict else ()

    @property
    def is_well(self) -> bool:
        """Whether all that was asked for is available, under strict in every process that would run."""
        return not (self.missing or self.unknown or self.unknown_code or (self.strict and self.unreached))

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
    turn_on: tuple[str, ...] = ()  # what to type while it is off, one of these
    known: bool = True  # False: it is refused for code that neither the matrix nor its judge knows


def examine(
    read: settings.Settings,
    text: str | None = None,
    command: Sequence[str] = (),
) -> Diagnosis:
    """Decide for every feature as `activate(text)` would in what `command` starts, without changing anything.

    Args:
        read: the settings.
        text: the WANSHIM_FEATURES grammar.
        command: what is to be run, for the run states that it would go on from.

    Raises:
        SettingInvalid, WanshimError: as `activate`.
    """
    look = Activation()
    selection = look.select("none" if read.disable else text, read)
    rows = tuple(_rows(look, selection, read, look.known().features))
    missing = tuple(row.feature for row in rows if _is_missing(row, selection))
    if read.disable:
        return Diagnosis(rows, missing, DISABLED, disabled=True)
    return Diagnosis(
        rows=rows,
        missing=missing,
        note="\n".join(look.known().left_out),
        unreached=process_coverage.findings(),
        unknown=tuple(settings.unknown()),
        without_effect=tuple(variables.without_effect(look.settings, selection.reasons, look.known().features)),
        prompt_cache=_prompt_cache(read),
        run_states=(states := tuple(_run_states(read, command))),
        run_outlooks=tuple(_outlook(Path(folder), read, command) for folder in states),
        not_counted=NOT_COUNTED if command and read.local_world_size is None else "",
        engines=(engines := known_engines()),
        unlearned=unlearned(engines),
        without_frontend=without_frontend(),
        gpus=gpus.in_sight(settings.visible_gpus()),
        strict=read.strict,
    )


def _prompt_cache(read: settings.Settings) -> str:
    """The folder of encoded prompts, which outlives wanshim; "" where there are none."""
    folder = Path(read.cache_dir) if read.cache_dir else prompt_cache()
    return str(folder) if folder.is_dir() else ""


def _run_states(read: settings.Settings, command: Sequence[str]) -> Iterator[str]:
    """Folders of states: in the command's output folder, and below the one that WANSHIM_RESUME names."""
    folders = [Path(path, "training_state") for option, path in _options(command) if option == "output_path"]
    if read.resume is not None and read.resume.folder is not None:
        folders += sorted(path for path in Path(read.resume.folder).glob("*") if path.is_dir())
    return (str(folder) for folder in folders if any(folder.glob("run-*/step-*.safetensors")))


def _options(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and values of a command's options, written as `--name value` or `--name=value`."""
    words = (part for word in command for part in (word.split("=", 1) if word.startswith("--") else (word,)))
    return ((name.removeprefix("--"), value) for name, value in pairwise(words) if name.startswith("--"))


def _outlook(folder: Path, read: settings.Settings, command: Sequence[str]) -> str:
    """The sentence on what a run's command does from the newest state in `folder`."""
    path, facts = newest_facts(folder) or (folder, None)
    if facts is None:
        return f"its newest, {path.name}, cannot be read"
    step, saved = facts["position"].get("steps"), facts["identity"]
    accepted = read.resume.accepted if read.resume is not None else frozenset()
    given = dict(_options(command))
    changed = [
        f"{name} is {saved[name]} in the state and {value} in this command"
        for name, value in given.items()
        if folder.parent == Path(given.get("output_path", ""))
        and type(saved.get(name)) in (int, float, str)
        and name not in accepted
        and not _is_value(saved[name], value)
    ]
    if changed:
        return f"with WANSHIM_RESUME its command is refused: {'; '.join(changed)}"
    if facts.get("ended"):
        return f"it has ended at step {step}, and with WANSHIM_RESUME its command trains nothing"
    return f"with WANSHIM_RESUME its command goes on from step {step}, if it is the same run"


def _is_value(saved: float | str, given: str) -> bool:
    """Whether an option's text is this value."""
    try:
        return type(saved)(given) == saved
    except ValueError:
        return False


def selected_rows(read: settings.Settings, text: str | None, names: Iterable[str]) -> Iterator[DiagnosisRow]:
    """The rows of those among the features of these names that `activate(text)` would select, one by one: to judge a
    feature its framework's files are read."""
    look = Activation()
    selection = look.select(text, read)
    return _rows(look, selection, read, filter(selection.__contains__, names))


def _rows(
    look: Activation, selection: Selection, read: settings.Settings, names: Iterable[str]
) -> Iterator[DiagnosisRow]:
    look.settings = read
    for name, decision in look.decisions(names):
        if name in selection and decision.applies:
            decision = _with_devices(look.known().features[name], read, decision)
        yield DiagnosisRow(
            framework=name.split(".")[0],
            version=decision.version,
            feature=name,
            verdict=decision.verdict.value,
            state="selected" if name in selection else "off",
            selected_by=selection.reasons.get(name),
            reason=decision.reason,
            next_step=decision.next_step,
            origin=look.known().origins.get(name, ""),
            turn_on=() if name in selection else tuple(variables.turn_on(look.known().features[name])),
            known=decision.known,
        )


def _is_missing(row: DiagnosisRow, selection: Selection) -> bool:
    """Whether a selected feature is unavailable. One whose framework is absent counts if it was named."""
    is_absent = row.verdict == Verdict.ABSENT.value and row.feature in selection.named
    is_unavailable = row.verdict == Verdict.REFUSE.value or is_absent
    return row.feature in selection and is_unavailable and not may_fail(selection.reasons[row.feature])


def prepare(text: str | None, read: settings.Settings, option: str = "") -> list[str]:
    """Check what `wanshim run` is to start, before it starts.

    Args:
        text: the WANSHIM_FEATURES grammar.
        read: the settings of the processes.
        option: `--gpus N`, if it was given.

    Returns:
        Lines for the user.

    Raises:
        SettingInvalid, WanshimError: as `activate`.
        FeatureUnavailable: a feature that the user named is unavailable in this launch or on the devices named, or,
            under WANSHIM_STRICT, a selected feature is unavailable at all.
    """
    look = Activation()
    if read.disable:
        idle = (option, f"-f {text}" if text is not None else "", "--fast" if read.fast else "")
        return [f"{DISABLED}: {each} has no effect" for each in idle if each]
    selection = look.select(text, read)
    if look.known().matrices:
        look.rows()  # one that is left out is said here
    for sentence in settings.unknown():
        raise SettingInvalid(sentence)
    look.check_launch(selection, read)
    lines = variables.without_effect(read, selection.reasons, look.known().features)
    if read.strict and lines:
        raise SettingInvalid(lines[0])
    for name in selection.named:
        fault = _misnamed(look.known().features[name], read)
        if fault:
            raise FeatureUnavailable(fault, hint=f"{name} is selected by {selection.reasons[name]}")
        absent = _absent(look.known().features[name], read)  # elsewhere, as behind srun, they may be there
        lines += [absent] if absent else []
    if read.strict:
        _demand_all(text, read)
    if read.fast and any(name.partition(".")[2] in variables.VARIABLES["fast"].read_by for name in selection.reasons):
        by_fast = [field for field in settings.FAST_FIELDS if read.sources[field] == settings.FAST]
        turned_on = " ".join(settings.assigned(field, getattr(read, field)) for field in by_fast) or "nothing"
        lines = [f"{settings.FAST} turned on what changes bits, where it is available: {turned_on}", *lines]
    return [*lines, *filter(None, (_dropped(look, selection, text, read),))]


def _dropped(look: Activation, selection: Selection, text: str | None, read: settings.Settings) -> str:
    """Features that `text`, given in place of WANSHIM_FEATURES, no longer selects, in words; "" if there are none."""
    before = read.features if text is not None else None
    dropped = [name for name in look.select(before, read).reasons if name not in selection] if before else []
    return f"-f {text} replaces WANSHIM_FEATURES={before}; no longer selected: {', '.join(dropped)}" if dropped else ""


def _demand_all(text: str | None, read: settings.Settings) -> None:
    found = examine(read, text)
    row = next((row for row in found.rows if row.feature in found.missing), None)
    if row is not None:
        raise FeatureUnavailable(
            f"{row.feature}, selected by {row.selected_by}, is unavailable: {row.reason}",
            hint=row.next_step or f"Leave it out with WANSHIM_FEATURES=...,-{row.feature}",
        )


# -- devices -------------------------------------------------------------------------------------------


def _with_devices(feature: Feature, read: settings.Settings, decision: Decision) -> Decision:
    """The decision of a selected feature, refused where it needs other devices than there are."""
    fault = _misnamed(feature, read) or _absent(feature, read)
    if fault:
        step = "Correct WANSHIM_DEVICES" if read.devices is not None else "Name the devices in WANSHIM_DEVICES"
        return replace(decision, verdict=Verdict.REFUSE, reason=fault, next_step=step)
    if feature.needs_devices and _cards(read) and gpus.in_sight(settings.visible_gpus()) is None:
        return replace(decision, reason=f"{decision.reason}; the GPUs of this machine cannot be counted without torch")
    return decision


def _fewest(feature: Feature, read: settings.Settings) -> int:
    one_may_do = read.plan_name in ("auto", "stream", "sequence")
    return min(feature.needs_devices, 1) if one_may_do else feature.needs_devices


def _cards(read: settings.Settings) -> list[int]:
    return [int(name.removeprefix("cuda:")) for name in read.devices or () if name.startswith("cuda:")]


def _misnamed(feature: Feature, read: settings.Settings) -> str:
    """The fault of the devices that a variable names, wherever they are; "" if there is none."""
    if feature.needs_devices == 0 or read.devices is None:
        return ""
    variable = read.sources["devices"]
    wrong = next((name for name in read.devices if not DEVICE.fullmatch(name)), None)
    if wrong is not None:
        return f"{variable} names {wrong!r}, which is no device of torch's, such as cuda:0 or cpu"
    if len({name.partition(":")[0] for name in read.devices}) > 1:
        return f"{variable} names devices of several kinds: {', '.join(read.devices)}"
    if len(read.devices) < _fewest(feature, read):
        return f"{variable} names {len(read.devices)} device, and a split needs {_fewest(feature, read)}"
    return ""


def _absent(feature: Feature, read: settings.Settings) -> str:
    """Which GPU this machine lacks, as far as that is known without torch; "" where it lacks none."""
    fewest = _fewest(feature, read)
    if read.devices is None:
        count = gpus.in_sight(settings.visible_gpus()) if fewest > 1 else None
        return f"it needs {fewest} GPUs and {count} are in sight" if count is not None and count < fewest else ""
    cards = _cards(read) if fewest else []
    count = gpus.in_sight(settings.visible_gpus()) if cards else None
    if count is None or max(cards) < count:
        return ""
    return f"{read.sources['devices']} names cuda:{max(cards)}, GPUs in sight: {count}"
