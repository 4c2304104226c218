"""Feature names and the WANSHIM_FEATURES grammar.

    auto | all | none | item,item,...      item: [+|-] framework | ability | framework.ability

A list with an unsigned item starts from nothing; a list of signed items alone changes `auto`.
`auto`, `all` and `none` may also stand as the first item of a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wanshim.errors import FeatureUnknown

BASES = ("auto", "all", "none")


@dataclass(frozen=True)
class Selection:
    """Which features are on, and why each is."""

    text: str
    reasons: Mapping[str, str]  # feature -> what selected it
    named: frozenset[str]  # those the user asked for by name, framework or variable, not by auto or all

    def __contains__(self, feature: str) -> bool:
        return feature in self.reasons


def select(text: str, auto: Mapping[str, bool], switches: Mapping[str, str] | None = None) -> Selection:
    """Resolve the grammar.

    Args:
        text: the value of WANSHIM_FEATURES or the argument of `activate`.
        auto: every known feature, and whether `auto` selects it.
        switches: features that a variable of their own turns on, with that variable's name. They count
            only where the text builds on `auto`: an explicit list is the whole truth.

    Raises:
        FeatureUnknown: a token fits no feature, framework or ability; names the nearest.
    """
    items = [item.strip() for item in text.split(",") if item.strip()] or ["auto"]
    base, items = _base(items)
    reasons: dict[str, str] = {}
    named: set[str] = set()
    if base == "all":
        reasons.update(dict.fromkeys(auto, "all"))
    elif base == "auto":
        reasons.update({feature: "auto" for feature, on in auto.items() if on})
        for feature, variable in (switches or {}).items():
            reasons[feature] = variable
            named.add(feature)
    for item in items:
        matches = _match(_token(item), auto)
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
    base = items[0] if items[0] in BASES else None
    misplaced = next((item for item in items[1 if base else 0 :] if _token(item) in BASES), None)
    if misplaced is not None:
        raise FeatureUnknown(
            f"{misplaced!r} stands inside the list {','.join(items)!r}",
            expected=f"{_token(misplaced)!r} alone or as the first item, without a sign",
        )
    if base is not None:
        return base, items[1:]
    return ("auto" if all(item[0] in "+-" for item in items) else "none"), items


def _token(item: str) -> str:
    return item[1:] if item[0] in "+-" else item


def _match(token: str, features: Iterable[str]) -> list[str]:
    features = list(features)
    matches = [f for f in features if token == f or token in f.split(".", 1)]
    if matches:
        return matches
    import difflib

    tokens = sorted({part for f in features for part in (f, *f.split(".", 1))} | set(BASES))
    near = difflib.get_close_matches(token.lower(), tokens, n=1, cutoff=0.5)
    raise FeatureUnknown(
        f"WANSHIM_FEATURES names {token!r}, which is no feature, framework or ability",
        hint=f"Did you mean {near[0]!r}?" if near else "See `wanshim features` for the names",
    )
