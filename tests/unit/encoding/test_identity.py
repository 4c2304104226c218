"""What names a function in a cache key: everything that decides what it computes."""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wanshim.core.encoding.identity import code_identity
from wanshim.errors import WanshimError

Text = Callable[[str], str]


def closing_over(prefix: Any) -> Text:
    return lambda text: f"{prefix}{text}"


def with_default(prefix: Any) -> Text:
    def process(text: str, prefix: Any = prefix) -> str:
        return f"{prefix}{text}"

    return process


def with_keyword_default(prefix: Any) -> Text:
    def process(text: str, *, prefix: Any = prefix) -> str:
        return f"{prefix}{text}"

    return process


class Prefixing:
    def __init__(self, prefix: Any) -> None:
        self.prefix = prefix

    def process(self, text: str) -> str:
        return f"{self.prefix}{text}"

    def raised(self, text: str) -> str:
        return f"{self.prefix}{text.upper()}"


class Configured:
    limit: Any = 0

    def process(self, text: str) -> str:
        return text[: self.limit]

    @classmethod
    def of_class(cls, text: str) -> str:
        return text[: cls.limit]


class MarkedText(str):
    mark = ""


class MarkedList(list[Any]):
    mark = ""


def marked(value: Any, mark: str) -> Any:
    value.mark = mark
    return value


def bound(prefix: Any) -> Text:
    return Prefixing(prefix).process


def calling(prefix: Any) -> Text:
    return closing_over(closing_over(prefix))


def decorated(prefix: Any) -> Text:
    def plain(text: str) -> str:
        return text

    @functools.wraps(plain)
    def process(text: str) -> str:
        return f"{prefix}{plain(text)}"

    return process


MAKERS = [closing_over, with_default, with_keyword_default, bound, calling, decorated]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("one", "other"),
    [("a", "b"), (1, 1.0), (1, True), ("1", 1), (("a", "b"), ("ab",)), ({"a": 1}, {"a": 2}), (0.0, -0.0)],
    ids=repr,
)
def test_functions_that_depend_on_different_values_differ(make: Callable[[Any], Text], one: Any, other: Any) -> None:
    assert code_identity(make(one)) != code_identity(make(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"b": 1}),
        (["a"], ("a",)),
        ({"a"}, {"b"}),
        ({"a"}, frozenset("a")),
        (b"a", b"b"),
        (1j, 2j),
        (..., None),
        (str, int),
        (Prefixing, type("Prefixing", (), {"__qualname__": "Prefixing", "__module__": "elsewhere"})),
        (os, sys),
        (len, max),
        (str.lower, str.upper),
        (str.__add__, str.__mul__),
        (", ".join, "; ".join),
        ("a".lower, "a".upper),
        ({"a": 1}.get, {"a": 2}.get),
        (Prefixing("a").process, Prefixing("b").process),
        (Prefixing("a").process, Prefixing("a").raised),
        (functools.partial(round, ndigits=1), functools.partial(round, ndigits=2)),
        (torch.bfloat16, torch.float32),
        (torch.device("cpu"), torch.device("cuda", 1)),
        (Path("a"), Path("b")),
        (MarkedText("a"), MarkedText("b")),
        (MarkedText("a"), "a"),
        (marked(MarkedText("a"), "x"), marked(MarkedText("a"), "y")),
        (MarkedList("a"), MarkedList("b")),
        (marked(MarkedList("a"), "x"), marked(MarkedList("a"), "y")),
        (OrderedDict(a=1), OrderedDict(a=2)),
        (defaultdict(int), defaultdict(str)),
        ([re.compile("a"), re.compile("b")], [re.compile("a"), re.compile("c")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_functions_that_close_over_different_objects_differ(one: Any, other: Any) -> None:
    assert code_identity(closing_over(one)) != code_identity(closing_over(other))
    assert code_identity(closing_over(one)) == code_identity(closing_over(one))


def test_functions_differ_by_which_of_their_values_are_one_object() -> None:
    a, b, other_a, other_b = (Prefixing(prefix) for prefix in "abab")
    found = [code_identity(closing_over(values)) for values in ((a, b, a), (other_a, other_b, other_a), (a, b, b))]
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda text: text + "a", lambda text: text + "b"),
        (lambda text: text[1:], lambda text: text[:1]),
        (lambda a, b: a + b, lambda a, b: a - b),
        (lambda text: text.lower(), lambda text: text.upper()),
        (lambda text: min(text, key=lambda c: c + "a"), lambda text: min(text, key=lambda c: c + "b")),
        (lambda text: text in {"a", "b"}, lambda text: text in {"a", "c"}),
    ],
    ids=["constant", "order", "operator", "name", "inner function", "set"],
)
def test_functions_of_different_code_differ(one: Text, other: Text) -> None:
    assert code_identity(one) != code_identity(other)


class Inheriting(Configured):
    pass


@pytest.mark.parametrize(
    "function",
    [
        Configured().process,
        Configured.of_class,
        Inheriting().process,
        Inheriting.of_class,
        closing_over(Configured()),
    ],
    ids=["object", "class", "heir", "heir's class", "closure over an object"],
)
def test_function_that_depends_on_a_class_counts_its_attributes(
    function: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for limit in (1, 2, 1):
        monkeypatch.setattr(Configured, "limit", limit)
        found.append(code_identity(function))
    assert found[0] == found[2]
    assert found[0] != found[1]


class Logging:
    log = logging.getLogger("before")

    def process(self, text: str) -> str:
        return text


def test_logger_of_a_class_is_named_without_the_loggers_of_the_process() -> None:
    before = code_identity(Logging().process)
    logging.getLogger(f"{__name__}.new")
    assert code_identity(Logging().process) == before


def test_function_that_was_moved_is_the_same() -> None:
    """Neither its file nor its line counts, nor those of the functions inside it."""
    found = set()
    for file, before in (("one.py", ""), ("other.py", "\n" * 7)):
        names: dict[str, Any] = {"__name__": "module"}
        source = before + "def process(text):\n    return ''.join(map(lambda c: c.lower(), text))\n"
        exec(compile(source, file, "exec"), names)
        found.add(code_identity(names["process"]))
    assert len(found) == 1


def test_function_that_closes_over_a_name_not_yet_given_is_named() -> None:
    def process(text: str) -> str:
        return later(text)

    before = code_identity(process)
    later = str.lower
    assert code_identity(process) != before


def test_identity_begins_with_the_name_for_whoever_reads_it() -> None:
    assert code_identity(closing_over).startswith(f"{__name__}.closing_over#")


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "value", ["a", ("a", {"b": [1.5, None]}), {"x", "y"}, torch.bfloat16, torch.device("cpu"), Prefixing("a"), str]
)
def test_functions_that_depend_on_equal_values_are_one(make: Callable[[Any], Text], value: Any) -> None:
    assert code_identity(make(value)) == code_identity(make(value))


def test_wrapper_counts_beside_what_it_wraps() -> None:
    def plain(text: str) -> str:
        return text

    @functools.wraps(plain)
    def lowered(text: str) -> str:
        return plain(text).lower()

    @functools.wraps(plain)
    def raised(text: str) -> str:
        return plain(text).upper()

    assert len({code_identity(plain), code_identity(lowered), code_identity(raised)}) == 3


def test_function_decorated_by_torch_is_named() -> None:
    @torch.no_grad()
    def process(text: str) -> str:
        return text

    assert code_identity(process) == code_identity(process)


def test_function_that_calls_itself_is_named() -> None:
    def countdown(n: int) -> int:
        return 0 if n == 0 else countdown(n - 1)

    assert code_identity(countdown) == code_identity(countdown)


@pytest.mark.parametrize(
    "value", [torch.ones(2), threading.Lock(), (i for i in [1])], ids=["tensor", "lock", "iterator"]
)
def test_function_that_depends_on_what_has_no_exact_form_is_refused(value: Any) -> None:
    with pytest.raises(WanshimError, match=r"closing_over.* depends on a .* no exact form"):
        code_identity(closing_over(value))


def test_identity_of_a_builtin_is_refused() -> None:
    with pytest.raises(WanshimError, match="no Python function"):
        code_identity(len)  # type: ignore[arg-type]


@pytest.mark.slow
def test_identity_is_the_same_in_every_process(capfd: pytest.CaptureFixture[str]) -> None:
    """Sets have another order in a process of another hash seed."""
    script = (
        "from wanshim.core.encoding.identity import code_identity\n"
        "class Object:\n"
        "    def __init__(self): self.names = {'a', 'b', 'c'}\n"
        "def make(names, made):\n"
        "    def f(x, more=frozenset({'d', 'e', 'f'})): return x in {'a', 'b', 'c', 'd', 'e'}, names, made\n"
        "    return f\n"
        "print(code_identity(make({'x', 'y', 'z'}, Object())))"
    )
    exec(script, {"__name__": "__main__"})
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    subprocess.run([sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, check=True)
    here, there = capfd.readouterr().out.split()
    assert here == there
