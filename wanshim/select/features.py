"""Feature names and the WANSHIM_FEATURES grammar.

    [auto | all | none,] item,item,...      item: [+|-] framework | ability | framework.ability

A list changes what its first item selects: `auto` (the default), `all` or `none`. An item adds features, with `+` or
without; `-` leaves them out; the last item wins. To `auto` and `all` belongs what a variable of a feature's own
switches on. So `diffsynth.progress` adds one feature, and `none,diffsynth.progress` selects that one alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wanshim.errors import SettingInvalid
from wanshim.settings import FAST, FEATURES

BASES = ("auto", "all", "none")


@dataclass(frozen=True)
class Selection:
    """Which features are on, and why each is."""

    text: str
    reasons: Mapping[str, str]  # feature -> what selected it
    named: frozenset[str]  # those the user asked for by name, framework or variable, not by auto or all

    def __contains__(self, feature: str) -> bool:
        return feature in self.reasons


def select(
    text: str, auto: Mapping[str, bool], switches: Mapping[str, str] | None = None, source: str = FEATURES
) -> Selection:
    """Resolve the grammar.

    Args:
        text: the value of WANSHIM_FEATURES or the argument of `activate`.
        auto: every known feature, and whether `auto` selects it.
        switches: features that a variable of their own turns on, with that variable's name. They count
            unless the text starts with `none`.
        source: of the text, for messages.

    Raises:
        SettingInvalid: a token fits no feature, framework or ability; names the nearest.
    """
    base, items = _base([item.strip() for item in text.split(",") if item.strip()])
    switched = switches or {} if base != "none" else {}
    reasons = {feature: base for feature, on in auto.items() if base == "all" or (base == "auto" and on)}
    reasons.update(switched)
    named = {feature for feature, variable in switched.items() if variable != FAST}  # which names no feature
    for item in items:
        matches = _match(_token(item), auto, source)
        if item.startswith("-"):
            for feature in matches:
                reasons.pop(feature, None)
                named.discard(feature)
        else:
            reasons.update(dict.fromkeys(matches, item))
            named.update(matches)
    ordered = {feature: reasons[feature] for feature in auto if feature in reasons}
    return Selection(text=text, reasons=ordered, named=frozenset(named))


def _base(items: list[str]) -> tuple[str, list[str]]:
    base, changes = (items[0], items[1:]) if items and items[0] in BASES else ("auto", items)
    misplaced = next((item for item in changes if _token(item) in BASES), None)
    if misplaced is not None:
        raise SettingInvalid(
            f"{misplaced!r} stands inside the list {','.join(items)!r}",
            expected=f"{_token(misplaced)!r} alone or as the first item, without a sign",
        )
    return base, changes


def _token(item: str) -> str:
    return item[1:] if item[0] in "+-" else item


def _match(token: str, features: Iterable[str], source: str) -> list[str]:
    features = list(features)
    matches = [f for f in features if token == f or token in f.split(".", 1)]
    if matches:
        return matches
    import difflib

    tokens = sorted({part for f in features for part in (f, *f.split(".", 1))} | set(BASES))
    near = difflib.get_close_matches(token.lower(), tokens, n=1, cutoff=0.5)
    raise SettingInvalid(
        f"{source} names {token!r}, which is no feature, framework or ability",
        hint=f"Did you mean {near[0]!r}?" if near else "See `wanshim features` for the names",
    )
