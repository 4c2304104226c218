"""The fingerprint changes with the meaning of code and with nothing else."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.conftest import FakeFramework
from wanshim.patching import SourceTree
from wanshim.patching.probe import find, fingerprint

F = "def f(a, b=1):\n    c = a + b\n    return c\n"


def of(source: str) -> str:
    return fingerprint(ast.parse(source))


@pytest.mark.parametrize(
    "same",
    [
        "# a comment\ndef f(a, b=1):\n    c = a + b  # another\n    return c\n",
        'def f(a, b=1):\n    """Docstring."""\n    c = a + b\n    return c\n',
        "def f(\n    a,\n    b=1,\n):\n    c = (a +\n         b)\n\n    return (c)\n",
        "def f(a, b = 0x1):\n\tc = a + b; return c\n",
    ],
    ids=["comments", "docstring", "layout", "spelling"],
)
def test_what_python_ignores_does_not_change_the_fingerprint(same: str) -> None:
    assert of(same) == of(F)


@pytest.mark.parametrize(
    "other",
    [
        F.replace("a + b", "b + a"),
        F.replace("a + b", "a - b"),
        F.replace("b=1", "b=2"),
        F.replace("b=1", "b=True"),
        F.replace("b=1", "b=1.0"),
        F.replace("b=1", "*, b=1"),
        F.replace("return c", "return"),
        F.replace("def f", "async def f"),
        F.replace("def f", "def g"),
        F.replace("    return c\n", ""),
        "@decorate\n" + F,
        F.replace("b=1", "b: int = 1"),
        F.replace("    return c\n", "    return c\n    'late text'\n"),
    ],
)
def test_any_other_change_changes_the_fingerprint(other: str) -> None:
    assert of(other) != of(F)


def test_fingerprint_is_sixteen_hex_digits() -> None:
    assert len(of(F)) == 16
    int(of(F), 16)


NAMES = st.sampled_from("abc")
ATOMS = st.one_of(NAMES, st.integers(0, 3).map(str), st.sampled_from(["None", "True", "''", "'a'", "[]", "()", "{}"]))
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: f"({p[0]} + {p[1]})"),
        st.tuples(NAMES, inner).map(lambda p: f"{p[0]}({p[1]})"),
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]"),
        st.tuples(NAMES, inner).map(lambda p: f"{p[0]}({p[0]}={p[1]})"),
        inner.map(lambda e: f"(lambda: {e})"),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS, EXPRESSIONS)
def test_fingerprints_are_equal_exactly_where_the_trees_are(one: str, two: str) -> None:
    one, two = f"a = {one}", f"a = {two}"  # a string alone would be a docstring, which is of no account
    equal = ast.dump(ast.parse(one)) == ast.dump(ast.parse(two))
    assert (of(one) == of(two)) is equal


EVERYTHING = '''
@decorate(1, key="v")
class C(Base, metaclass=M):
    x: int = -1
    async def m(self, a, /, b: "T" = 0.5, *args, c=..., **kw) -> dict[str, int]:
        """Docstring."""
        async with open(a) as f, g:
            text = f"{a!r:>{b}} {{}} {b + 1=}" "tail" + rb"\\d".decode()
        for i, (j, *k) in enumerate(z for z in args if z is not None):
            d = {**kw, i: {j, 1j}, "k": [y async for y in k]}
        else:
            del d[1:2, ::-1], self.x
        try:
            return (lambda q=1: q and not b or a @ b)(await c)
        except (ValueError, E) as e:
            raise E from e
        while (n := a) < b <= 3:
            continue
'''


def test_fingerprint_is_the_same_in_every_python() -> None:
    """Frozen here and compared by every Python that runs the tests: rows are made with one and read with all."""
    assert of(EVERYTHING) == "bd18d3cf7f2d4ae8"


@pytest.mark.parametrize(
    ("qualname", "line"),
    [("f", 2), ("C", 3), ("C.m", 4), ("C.D.m", 8), ("X", 9), ("Y", 10), ("guarded", 14), ("C.D.p", 7)],
)
def test_definitions_and_assignments_are_found_by_qualified_name(qualname: str, line: int) -> None:
    source = (
        "def f(): old\n"
        "def f(): new\n"
        "class C:\n"
        "    def m(self): pass\n"
        "    x = 1\n"
        "    class D:\n"
        "        p = 2\n"
        "        def m(self): pass\n"
        "X = 1\n"
        "Y: int = 1\n"
        "try:\n"
        "    import nothing\n"
        "except ImportError:\n"
        "    def guarded(): pass\n"
    )
    node = find(ast.parse(source), qualname)
    assert getattr(node, "lineno", None) == line


@pytest.mark.parametrize("qualname", ["g", "C.gone", "f.inner", "os", "C.m.n"])
def test_name_that_is_not_defined_is_not_found(qualname: str) -> None:
    assert find(ast.parse("import os\nclass C:\n    def m(self): pass\ndef f(): pass\n"), qualname) is None


def test_source_tree_reads_packages_modules_and_names(fake: FakeFramework) -> None:
    fake.write(__init__="TOP = 1", dit=F)
    assert fake.tree.file_of("fakewan") == fake.site / "fakewan" / "__init__.py"
    assert fake.tree.file_of("fakewan.dit") == fake.site / "fakewan" / "dit.py"
    assert fake.tree.file_of("fakewan.gone") is None
    assert fake.tree.file_of("other.dit") is None
    assert fake.tree.fingerprint("fakewan.dit:f") == fingerprint(ast.parse(F).body[0])
    assert fake.tree.fingerprint("fakewan:TOP") is not None
    assert fake.tree.fingerprint("fakewan.dit:gone") is None
    assert fake.tree.fingerprint("fakewan.gone:f") is None


@pytest.mark.parametrize("source", [b"def f(:", b"f = 1\0", b"# coding: none\n"], ids=["syntax", "null", "encoding"])
def test_file_that_python_cannot_read_has_no_tree(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "__init__.py").write_bytes(source)
    tree = SourceTree("fakewan", tmp_path)
    assert tree.tree("fakewan") is None
    assert tree.fingerprint("fakewan:f") is None


def test_installed_package_is_found_without_importing_it(fake: FakeFramework) -> None:
    fake.write(__init__="raise RuntimeError")
    assert SourceTree.of_installed("fakewan").root == fake.site / "fakewan"
    assert "fakewan" not in sys.modules


def test_package_that_is_imported_is_found_where_it_came_from(fake: FakeFramework, tmp_path: Path) -> None:
    fake.write(dit=F)
    fake.module("dit")
    earlier = tmp_path / "earlier" / "fakewan"
    earlier.mkdir(parents=True)
    (earlier / "__init__.py").write_text("")
    sys.path.insert(0, str(tmp_path / "earlier"))
    assert SourceTree.of_installed("fakewan").root == fake.site / "fakewan"


def test_module_put_together_by_hand_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fakewan", types.ModuleType("fakewan"))
    assert SourceTree.of_installed("fakewan").root is None
