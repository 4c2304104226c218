"""One tree, and messages that say what was found, what was expected, what to do."""

from __future__ import annotations

import pickle

import pytest

from wanshim import errors
from wanshim.errors import WanshimError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WanshimError("a seam is gone"), "a seam is gone."),
        (WanshimError("a seam is gone."), "a seam is gone."),
        (WanshimError("found x", expected="y"), "found x. Expected y."),
        (WanshimError("found x", hint="Do z"), "found x. Do z."),
        (WanshimError("found x", expected="y.", hint="Do z."), "found x. Expected y. Do z."),
        (WanshimError("it is off", hint="Run wanshim run -f X -- ..."), "it is off. Run wanshim run -f X -- ..."),
        (WanshimError("found x", hint="Did you mean 'z'?"), "found x. Did you mean 'z'?"),
        (WanshimError("a table:\n  x  y\n", hint="Do z"), "a table:\n  x  y\nDo z."),
    ],
)
def test_message_joins_its_parts_as_sentences(error: WanshimError, text: str) -> None:
    assert str(error) == text


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (None, "found x. Set WANSHIM_KEEP=off."),
        ("Do z", "found x. Do z. Set WANSHIM_KEEP=off."),
    ],
)
def test_an_error_of_core_gets_the_user_s_next_step_by_its_topic(hint: str | None, text: str) -> None:
    error = WanshimError("found x", hint=hint, topic="keep_off")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == text


def test_a_step_may_go_on_with_the_sentence_of_the_hint() -> None:
    error = WanshimError("found x", hint="Remove it", topic="cache_directory")
    assert str(error).startswith("found x. Remove it, or name another directory with WANSHIM_CACHE_DIR")


def kinds() -> list[type]:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(found) > 5
    return found


@pytest.mark.parametrize("kind", kinds())
def test_every_error_belongs_to_the_tree_and_says_what_it_means(kind: type) -> None:
    assert issubclass(kind, (WanshimError, errors.WanshimWarning))
    assert kind.__doc__


@pytest.mark.parametrize("kind", [k for k in kinds() if issubclass(k, WanshimError)])
def test_error_from_a_worker_process_keeps_its_message(kind: type[WanshimError]) -> None:
    error = kind("found x", expected="y", hint="Do z")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "found x. Expected y. Do z."
