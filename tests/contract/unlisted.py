"""Code that no row speaks of, made from the installed framework: its row hidden, its bodies or its layout changed."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from wanshim import diagnosis, matrix
from wanshim.catalog import discover
from wanshim.decision import decide, installed_version
from wanshim.matrix import Matrix
from wanshim.patching import Feature, Framework, SourceTree
from wanshim.patching.probe import find
from wanshim.settings import Settings
from wanshim.verdict import Verdict


def without_row(known: Matrix, framework: str, version: str | None) -> Matrix:
    assert known.row(framework, version or "") is not None, f"{framework} {version} is no row: these tests need one"
    kept = (row for row in known.rows if (row.framework, row.version) != (framework, version))
    return replace(known, rows=tuple(kept))


def judged(framework: Framework, known: Matrix) -> dict[Feature, Verdict]:
    """The features whose row for the installed version rests on code, with its verdict."""
    row = known.row(framework.name, installed_version(framework) or "")
    assert row is not None
    cells = {feature: row.cells.get(feature.ability) for feature in discover().features.values()}
    return {
        feature: cell.verdict
        for feature, cell in cells.items()
        if feature.framework == framework.name and cell and any(cell.seams.values())
    }


def expected_without_row(feature: Feature, verdict: Verdict, known: Matrix, source: SourceTree) -> Verdict:
    """What the row said, as far as code alone shows it: `unknown` patches with a warning, and code that stands in
    no other row and that no judge recognises is refused."""
    found = {target: source.fingerprint(target) for target in feature.targets}
    same = any(all(found.get(t) == d for t, d in cell.seams.items()) for _, cell in known.known_code(feature.name))
    finding = feature.judge(source) if feature.judge is not None and not same else None
    recognised = same or (finding is not None and finding.verdict is verdict)
    if not recognised:
        return Verdict.REFUSE
    return Verdict.UNKNOWN if verdict is Verdict.PATCH else verdict


def relaid(source: SourceTree, module: str) -> SourceTree:
    """The package with one module laid out anew: no comments, other quotes and line breaks, new docstrings."""
    tree = source.tree(module)
    assert tree is not None
    text = ast.unparse(tree).replace("):\n", "):  # new\n")
    return replace(source, _trees={module: ast.parse(text)})


def rewritten(source: SourceTree, target: str) -> SourceTree:
    """The package with one more statement in a function, or another value in an assignment."""
    module, qualname = target.split(":")
    original = source.tree(module)
    assert original is not None
    tree = ast.parse(ast.unparse(original))
    node = find(tree, qualname)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        node.value = ast.Constant(value="changed")
    else:
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        node.body.append(ast.parse("changed = 1").body[0])
    return replace(source, _trees={module: tree})


class UnlistedCode:
    """The tests, for a subclass that pytest collects and that names `framework`."""

    framework: str

    @pytest.fixture
    def known(self) -> Matrix:
        return matrix.load()

    @pytest.fixture
    def installed(self) -> Framework:
        return discover().frameworks[self.framework]

    @pytest.fixture
    def source(self) -> SourceTree:
        return SourceTree.of_installed(self.framework)

    def test_doctor_without_the_row_gives_its_verdict_from_the_code_alone(
        self, known: Matrix, installed: Framework, source: SourceTree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hidden = without_row(known, installed.name, installed_version(installed))
        monkeypatch.setattr(matrix, "load", lambda: hidden)
        rows = {row.feature: row for row in diagnosis.examine("none").rows}
        features = judged(installed, known)
        assert features
        for feature, verdict in features.items():
            row = rows[feature.name]
            assert row.verdict == expected_without_row(feature, verdict, hidden, source).value, row
            assert row.version == installed_version(installed)

    def test_changed_layout_and_comments_keep_the_verdict(
        self, known: Matrix, installed: Framework, source: SourceTree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for feature, verdict in judged(installed, known).items():
            for module in {target.split(":")[0] for target in feature.targets if source.node(target) is not None}:
                changed = relaid(source, module)
                monkeypatch.setattr(SourceTree, "of_installed", lambda package, changed=changed: changed)
                found = decide(replace(feature, blocked=None), installed, known, Settings())
                assert found.verdict is verdict, f"{feature.name}, {module}: {found.reason}"

    def test_changed_body_under_the_known_version_is_refused(
        self, known: Matrix, installed: Framework, source: SourceTree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for feature, verdict in judged(installed, known).items():
            for target in feature.targets if verdict is Verdict.PATCH else ():
                if source.node(target) is None:
                    continue
                changed = rewritten(source, target)
                monkeypatch.setattr(SourceTree, "of_installed", lambda package, changed=changed: changed)
                found = decide(replace(feature, blocked=None), installed, known, Settings())
                assert found.verdict is Verdict.REFUSE, f"{feature.name}, {target}: {found.reason}"
                assert target in found.reason
