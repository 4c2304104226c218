"""The WANSHIM_FEATURES grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanshim.errors import SettingInvalid
from wanshim.select.features import BASES, Selection, select

AUTO = {
    "diffsynth.model_split": False,
    "diffsynth.patchify": True,
    "diffsynth.vae_decode": False,
    "fastvideo.negative_prompt": True,
    "fastvideo.vae_decode": False,
}
REPAIRS = ["diffsynth.patchify", "fastvideo.negative_prompt"]
NAMES = sorted({part for feature in AUTO for part in (feature, *feature.split(".", 1))})


def chosen(text: str, switches: dict[str, str] | None = None) -> list[str]:
    return list(select(text, AUTO, switches).reasons)


def message(text: str) -> str:
    with pytest.raises(SettingInvalid) as caught:
        select(text, AUTO)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("auto", REPAIRS),
        ("", REPAIRS),
        (" , ", REPAIRS),
        ("all", list(AUTO)),
        ("none", []),
        ("diffsynth.vae_decode", ["diffsynth.patchify", "diffsynth.vae_decode", "fastvideo.negative_prompt"]),
        ("+diffsynth.vae_decode", ["diffsynth.patchify", "diffsynth.vae_decode", "fastvideo.negative_prompt"]),
        ("none,diffsynth.vae_decode", ["diffsynth.vae_decode"]),
        ("-diffsynth", ["fastvideo.negative_prompt"]),
        ("diffsynth", [*(f for f in AUTO if f.startswith("diffsynth")), "fastvideo.negative_prompt"]),
        ("none,diffsynth", [f for f in AUTO if f.startswith("diffsynth")]),
        ("none,vae_decode", ["diffsynth.vae_decode", "fastvideo.vae_decode"]),
        ("none,diffsynth,-vae_decode", ["diffsynth.model_split", "diffsynth.patchify"]),
        ("none,diffsynth,-vae_decode,+diffsynth.vae_decode", [f for f in AUTO if f.startswith("diffsynth")]),
        ("-diffsynth.patchify,fastvideo", ["fastvideo.negative_prompt", "fastvideo.vae_decode"]),
        ("all,-fastvideo,-model_split", ["diffsynth.patchify", "diffsynth.vae_decode"]),
        ("none,+patchify", ["diffsynth.patchify"]),
        ("none, patchify", ["diffsynth.patchify"]),
        (" auto , -patchify ", ["fastvideo.negative_prompt"]),
        ("-patchify,patchify", REPAIRS),
    ],
)
def test_text_selects_the_features_in_the_order_of_the_catalog(text: str, features: list[str]) -> None:
    assert chosen(text) == features


def test_reasons_say_what_selected_each_feature() -> None:
    found = select("auto,+fastvideo", AUTO, {"diffsynth.model_split": "WANSHIM_DEVICES"})
    assert found.reasons == {
        "diffsynth.model_split": "WANSHIM_DEVICES",
        "diffsynth.patchify": "auto",
        "fastvideo.negative_prompt": "+fastvideo",
        "fastvideo.vae_decode": "+fastvideo",
    }
    assert found.named == {"diffsynth.model_split", "fastvideo.negative_prompt", "fastvideo.vae_decode"}
    assert found.text == "auto,+fastvideo"


@pytest.mark.parametrize("text", ["auto", "all"])
def test_what_auto_or_all_selects_was_not_asked_for_by_name(text: str) -> None:
    assert select(text, AUTO).named == frozenset()


@pytest.mark.parametrize("text", ["auto", "all", "patchify", "+patchify", "-patchify", "auto,fastvideo"])
def test_variable_of_a_feature_switches_it_on_and_names_it_unless_the_list_starts_from_none(text: str) -> None:
    found = select(text, AUTO, {"diffsynth.model_split": "WANSHIM_DEVICES"})
    assert found.reasons["diffsynth.model_split"] == "WANSHIM_DEVICES"
    assert "diffsynth.model_split" in found.named


def test_variable_of_a_feature_gives_way_to_a_list_from_none_and_to_a_minus() -> None:
    switches = {"diffsynth.model_split": "WANSHIM_DEVICES"}
    assert chosen("none", switches) == []
    assert chosen("none,patchify", switches) == ["diffsynth.patchify"]
    assert chosen("-model_split", switches) == REPAIRS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "diffsynth.model_spilt",
            "WANSHIM_FEATURES names 'diffsynth.model_spilt', which is no feature, framework or ability. "
            "Did you mean 'diffsynth.model_split'?",
        ),
        (
            "auto,-Patchify",
            "WANSHIM_FEATURES names 'Patchify', which is no feature, framework or ability. Did you mean 'patchify'?",
        ),
        (
            "AUTO",
            "WANSHIM_FEATURES names 'AUTO', which is no feature, framework or ability. Did you mean 'auto'?",
        ),
        (
            "fastvideo,zzz",
            "WANSHIM_FEATURES names 'zzz', which is no feature, framework or ability. "
            "See `wanshim features` for the names.",
        ),
        (
            "++vae_decode",
            "WANSHIM_FEATURES names '+vae_decode', which is no feature, framework or ability. "
            "Did you mean 'vae_decode'?",
        ),
        (
            "-",
            "WANSHIM_FEATURES names '', which is no feature, framework or ability. "
            "See `wanshim features` for the names.",
        ),
        (
            "patchify,all",
            "'all' stands inside the list 'patchify,all'. Expected 'all' alone or as the first item, without a sign.",
        ),
        (
            "+auto",
            "'+auto' stands inside the list '+auto'. Expected 'auto' alone or as the first item, without a sign.",
        ),
        (
            "auto,none",
            "'none' stands inside the list 'auto,none'. Expected 'none' alone or as the first item, without a sign.",
        ),
    ],
)
def test_unknown_token_is_an_error_that_suggests_the_nearest(text: str, expected: str) -> None:
    assert message(text) == expected


# -- properties ----------------------------------------------------------------------------------------

ITEMS = st.tuples(st.sampled_from(["", "+", "-"]), st.sampled_from(NAMES)).map("".join)


@st.composite
def texts(draw: st.DrawFn) -> str:
    items = draw(st.lists(ITEMS, max_size=6))
    base = draw(st.sampled_from(["", *BASES]))
    space = draw(st.sampled_from(["", " "]))
    return f"{space},{space}".join([base, *items] if base else items)


def by_hand(text: str) -> set[str]:
    """The grammar's second reading: one pass over sets."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    start = items.pop(0) if items and items[0] in BASES else "auto"
    found = {"all": set(AUTO), "none": set(), "auto": {f for f, on in AUTO.items() if on}}[start]
    for item in items:
        token = item.lstrip("+-")
        matches = {f for f in AUTO if f == token or f.startswith(token + ".") or f.endswith("." + token)}
        found = found - matches if item[0] == "-" else found | matches
    return found


@given(texts())
def test_any_text_of_the_grammar_selects_what_a_second_reading_selects(text: str) -> None:
    assert set(chosen(text)) == by_hand(text)


@given(texts(), st.sampled_from(NAMES))
def test_last_item_wins(text: str, name: str) -> None:
    def has(found: Selection) -> set[bool]:
        return {feature in found for feature in AUTO if name in (feature, *feature.split("."))}

    prefix = text + "," if text else "auto,"
    assert has(select(prefix + "-" + name, AUTO)) == {False}
    assert has(select(prefix + "+" + name, AUTO)) == {True}


@given(texts())
def test_named_features_are_selected_and_every_reason_is_a_token_of_the_text(text: str) -> None:
    found = select(text, AUTO)
    tokens = {item.strip() for item in text.split(",")} | {"auto"}
    assert found.named <= set(found.reasons)
    assert set(found.reasons.values()) <= tokens


@given(st.text(max_size=20))
def test_any_text_selects_or_raises_our_error(text: str) -> None:
    try:
        found = set(select(text, AUTO).reasons)
    except SettingInvalid:
        found = set()
    assert found <= set(AUTO)
