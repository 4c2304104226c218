"""Sentences of `doctor` and `features` for people, which no width of a terminal cuts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from wanshim import settings
from wanshim.doctor.diagnosis import Diagnosis, DiagnosisRow
from wanshim.doctor.known_engines import FRONTEND
from wanshim.errors import sentence
from wanshim.patching.feature import Feature
from wanshim.select import variables

Line = tuple[str, str]  # the text, and its colour or ""
AGAINST = {"native": "not needed", "absent": "not available", "refuse": "refused"}  # in words, by verdict


def of_diagnosis(result: Diagnosis, *, everything: bool = False) -> Iterator[Line]:
    """The lines of a diagnosis.

    Args:
        everything: features of frameworks that are not installed too, how each verdict was tested, and what a release
            does not need or cannot have.
    """
    away = []
    for framework, rows in groupby(result.rows, key=lambda row: row.framework):
        members = list(rows)
        is_away = members[0].version is None and all(row.verdict == "absent" for row in members)
        if is_away and not everything and not any(row.feature in result.missing for row in members):
            away.append(framework)
            continue
        no_version = "(not installed)" if is_away else "(not installed as a distribution)"
        yield f"{framework} {members[0].version or no_version}", "bold"
        for row in members:
            yield f"  {_sentence(row, result, everything)}", _colour(row, result)
        yield "", ""
    if away:
        yield f"Not installed: {', '.join(away)}.", ""
    yield from _rest(result)


def _rest(result: Diagnosis) -> Iterator[Line]:
    if not result.disabled:
        count = "not counted, neither torch nor NVIDIA's driver says" if result.gpus is None else result.gpus
        yield f"GPUs in sight: {count}.", ""
    if result.prompt_cache:
        yield f"Encoded prompts are kept in {result.prompt_cache}.", ""
    for folder, outlook in zip(result.run_states, result.run_outlooks, strict=True):
        yield f"{folder} has the state of a run: {outlook}.", ""
    if result.not_counted:
        yield result.not_counted, ""
    yield from ((str(known), "") for known in result.engines)
    for gpu in result.unlearned:
        yield f"cuDNN's engines are not known yet on {gpu}. Ahead of time: wanshim warm --size 704x1280x81", ""
    if result.without_frontend:
        gpus = ", ".join(result.without_frontend)
        yield f"{FRONTEND} is not installed, which finds the fastest engines of cuDNN on {gpus}.", "yellow"
        yield "On an H100 a decode or encode takes 0.5 to 0.8 of the time: pip install 'wanshim[cudnn]'", "yellow"
    if result.note:
        yield result.note, "yellow"
    for finding in result.unreached:
        colour = "red" if result.strict else "yellow"
        yield f"not reached: {sentence(finding.found)} {sentence(finding.advice)}", colour
    yield from ((text, "yellow") for text in result.without_effect)
    yield from ((text, "red") for text in result.unknown)
    if result.missing:
        yield f"requested but unavailable: {', '.join(result.missing)}", "red"
    if result.unknown_code:
        yield f"WANSHIM_STRICT: code that wanshim does not know: {', '.join(result.unknown_code)}", "red"


def _sentence(row: DiagnosisRow, result: Diagnosis, everything: bool) -> str:
    origin = f" (from {row.origin})" if row.origin else ""
    state = _state(row, result)
    more = [state]
    if everything and row.reason not in state:
        more.append(sentence(f"{row.reason[0].upper()}{row.reason[1:]}"))
    if row.next_step and row.next_step not in state:
        more.append(sentence(row.next_step))
    return f"{row.feature}{origin}: {' '.join(more)}"


def _state(row: DiagnosisRow, result: Diagnosis) -> str:
    """On, off and how to turn it on, or why not."""
    turn_on = "" if result.disabled else f" Turn on: {' or '.join(row.turn_on)}"
    waits_for_its_variable = any(row.reason == f"{typed.partition('=')[0]} is not set" for typed in row.turn_on)
    if row.verdict == "refuse" and row.selected_by is None and waits_for_its_variable:
        return f"available, off.{turn_on}"
    if row.verdict in AGAINST:
        return sentence(f"{AGAINST[row.verdict]}: {row.reason}")
    warning = f" Not tested on this release: {row.reason}." if row.verdict == "unknown" else _remark(row)
    if row.selected_by is None:
        return f"available, off.{warning}{turn_on}"
    by = "on by default" if row.selected_by == "auto" else f"on, selected by {row.selected_by}"
    return f"{by}.{warning}"


def _remark(row: DiagnosisRow) -> str:
    """The remark of a row: its reason without how it was tested."""
    said = [part for part in row.reason.split("; ") if not part.startswith("tested: ")]
    return f" {'; '.join(said)}." if said else ""


def _colour(row: DiagnosisRow, result: Diagnosis) -> str:
    if row.feature in result.missing:
        return "red"
    if row.selected_by is not None and row.verdict in ("patch", "unknown"):
        return "green" if row.verdict == "patch" else "yellow"
    return ""


def of_features(known: Iterable[Feature]) -> Iterator[Line]:
    """Two lines a feature: what it does, and what turns it on."""
    for feature in known:
        yield f"{feature.name}: {feature.summary}", ""
        by = "on by default" if feature.auto else f"turn on: {' or '.join(variables.turn_on(feature))}"
        yield f"  {by}", "green" if feature.auto else ""


def feature_record(feature: Feature) -> dict[str, Any]:
    """One feature for `wanshim features --json`."""
    switches = [
        {
            "variables": list(settings.names_of(field)),
            "example": variables.assignment(field),
            "meaning": settings.meaning_of(field),
        }
        for field in feature.switches
    ]
    return {"feature": feature.name, "summary": feature.summary, "auto": feature.auto, "switches": switches}
