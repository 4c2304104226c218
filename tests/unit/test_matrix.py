"""compat_matrix.yaml: what is read from it, and that every fault is named with its place."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from wanshim.errors import WanshimError
from wanshim.patching.probe import Verdict
from wanshim.select import catalog, matrix
from wanshim.select.matrix import Cell, Matrix, Row

GOOD = """
schema: 1
frameworks:
  fakewan:
    declared: ">=1.0"
    newest_seen: "1.2"
    rows:
      - version: "1.0"
        ci: true
        python: "3.12"
        install: [fakewan==1.0, peft]
        environment: {torch: "2.11.0"}
        features:
          decode: {verdict: absent, tested: nothing, reason: no decoder yet}
          split:
            verdict: patch
            tested: behaviour
            seams:
              fakewan.dit:Model.forward: "0123456789abcdef"
              fakewan.usp:forward: null
      - version: "1.2"
        tox: true
        source: fakewan @ git+https://example.org/fakewan
        features:
          split: {verdict: native, tested: probe, seams: {"fakewan.dit:Model.forward": "fedcba9876543210"}}
"""


def load(folder: Path, text: str) -> Matrix:
    path = folder / "compat_matrix.yaml"
    path.write_text(textwrap.dedent(text))
    return matrix.load(path)


def faults(folder: Path, text: str) -> list[str]:
    with pytest.raises(WanshimError) as caught:
        load(folder, text)
    first, *rest = str(caught.value).removesuffix(".").splitlines()
    assert first == f"{folder / 'compat_matrix.yaml'} has faults:"
    return [line.strip() for line in rest]


def with_row(row: str) -> str:
    indented = textwrap.indent(textwrap.dedent(row), "        ").lstrip()
    return f"schema: 1\nframeworks:\n  f:\n    declared: x\n    newest_seen: y\n    rows:\n      - {indented}"


def with_cell(cell: str) -> str:
    return with_row(f'version: "1"\nfeatures:\n  a: {cell}')


def test_good_file_gives_its_rows(tmp_path: Path) -> None:
    found = load(tmp_path, GOOD)
    first, second = found.rows
    assert first == Row(
        framework="fakewan",
        version="1.0",
        cells={
            "decode": Cell(Verdict.ABSENT, "nothing", "no decoder yet", {}),
            "split": Cell(
                Verdict.PATCH,
                "behaviour",
                "",
                {"fakewan.dit:Model.forward": "0123456789abcdef", "fakewan.usp:forward": None},
            ),
        },
        python="3.12",
        ci=True,
        tox=True,
        install=("fakewan==1.0", "peft"),
        environment={"torch": "2.11.0"},
    )
    assert (second.version, second.ci, second.tox, second.python) == ("1.2", False, True, "3.11")
    assert second.source == "fakewan @ git+https://example.org/fakewan"
    assert (found.declared, found.newest_seen) == ({"fakewan": ">=1.0"}, {"fakewan": "1.2"})


def test_rows_are_found_by_version_and_code_by_feature_newest_first(tmp_path: Path) -> None:
    found = load(tmp_path, GOOD)
    assert found.row("fakewan", "1.2") is found.rows[1]
    assert found.row("fakewan", "1.1") is None
    assert found.row("other", "1.2") is None
    assert [row.version for row, _ in found.known_code("fakewan.split")] == ["1.2", "1.0"]
    assert list(found.known_code("fakewan.decode")) == []


def test_merged_matrices_keep_what_the_first_says_and_take_what_the_others_add(tmp_path: Path) -> None:
    own = load(tmp_path, GOOD)
    third = (
        GOOD.replace(">=1.0", "==9")
        .replace("split:", "extra:")
        .replace("decode: {verdict: absent", "decode: {verdict: patch")
    )
    found = matrix.merge(own, load(tmp_path, third), load(tmp_path, GOOD.replace('"1.0"', '"9"')))
    assert [row.version for row in found.rows] == ["1.0", "1.2", "9"]
    assert {name: cell.verdict.value for name, cell in found.rows[0].cells.items()} == {
        "decode": "absent",
        "split": "patch",
        "extra": "patch",
    }
    assert found.rows[0].install == own.rows[0].install
    assert found.declared == {"fakewan": ">=1.0"}


def test_every_fault_is_named_at_once_with_its_place(tmp_path: Path) -> None:
    text = """
    schema: 2
    frameworks:
      fakewan:
        newest_seen: 1.2
        rows:
          - version: 1.0
            ci: maybe
            python: 3.10
            install: peft
            environment: torch
            features:
              split:
                verdict: [patch]
                tested: twice
                tests: test_split
                passed: many
                seam: {}
                seams:
                  fakewan.dit:Model.forward: 1234567890123456
                  fakewan.usp:forward: "0123"
          - version: "2"
            features: none
          - version: "2"
          - text
      other:
        declared: "1"
        newest_seen: "1"
        rows: 3
    """
    at = "frameworks.fakewan.rows"
    verdicts = "patch, native, refuse, unknown, absent"
    assert faults(tmp_path, text) == [
        "schema: expected the number 1, found 2",
        "frameworks.fakewan.declared: expected text (put versions in quotes), found None",
        "frameworks.fakewan.newest_seen: expected text (put versions in quotes), found 1.2",
        f"{at}[0].features.split.seam: expected one of the keys verdict, tested, reason, seams, tests, passed, "
        "found 'seam'",
        f"{at}[0].features.split.verdict: expected one of {verdicts}, found ['patch']",
        f"{at}[0].features.split.tested: expected one of behaviour, probe, nothing, found 'twice'",
        f"{at}[0].features.split.seams.fakewan.dit:Model.forward: expected 16 hex digits in quotes, or null, "
        "found 1234567890123456",
        f"{at}[0].features.split.seams.fakewan.usp:forward: expected 16 hex digits in quotes, or null, found '0123'",
        f"{at}[0].features.split.passed: expected a number of tests, found 'many'",
        f"{at}[0].features.split.tests: expected a list, found 'test_split'",
        f"{at}[0].environment: expected a mapping, found 'torch'",
        f"{at}[0].version: expected text (put versions in quotes), found 1.0",
        f"{at}[0].python: expected text (put versions in quotes), found 3.1",
        f"{at}[0].ci: expected true or false, found 'maybe'",
        f"{at}[0].install: expected a list, found 'peft'",
        f"{at}[1].features: expected a mapping, found 'none'",
        f"{at}[2].version: expected each version once, found '2'",
        f"{at}[3]: expected a mapping, found 'text'",
        f"{at}[3].version: expected text (put versions in quotes), found None",
        "frameworks.other.rows: expected a list, found 3",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the file: expected a mapping, found None"),
        ("- 1", "the file: expected a mapping, found [1]"),
        ("schema: 1\nframeworks: [f]", "frameworks: expected a mapping, found ['f']"),
        ("schema: 1\nframeworks: {f: null}", "frameworks.f: expected a mapping, found None"),
        (with_row("versoin: '1'"), "frameworks.f.rows[0].version: expected text (put versions in quotes), found None"),
        (with_cell("{}"), "frameworks.f.rows[0].features.a.verdict: expected one of patch, native, refuse, unknown, "
         "absent, found None"),
        (with_cell("patch"), "frameworks.f.rows[0].features.a: expected a mapping, found 'patch'"),
        (with_cell("{verdict: patch, seams: [x]}"), "frameworks.f.rows[0].features.a.seams: expected a mapping, "
         "found ['x']"),
    ],
)  # fmt: skip
def test_wrong_shape_is_a_fault_not_a_crash(tmp_path: Path, text: str, fault: str) -> None:
    assert fault in faults(tmp_path, text)


def test_broken_yaml_is_one_error_with_line_and_next_step(tmp_path: Path) -> None:
    with pytest.raises(WanshimError) as caught:
        load(tmp_path, "schema: 1\nframeworks: {f: ]")
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'compat_matrix.yaml'} cannot be read: ")
    assert "line 2" in text
    assert text.endswith("Reinstall wanshim, or fix the file and run `wanshim matrix`.")


def test_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(WanshimError, match="cannot be read"):
        load(tmp_path, f"schema: !!python/object/apply:os.mkdir ['{mark}']")
    assert not mark.exists()


def test_missing_file_is_one_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WanshimError) as caught:
        matrix.load(tmp_path / "gone.yaml")
    assert str(tmp_path / "gone.yaml") in str(caught.value)
    assert "No such file" in str(caught.value)


def test_file_that_is_no_text_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WanshimError, match="cannot be read"):
        matrix.load(tmp_path / "m.yaml")


# -- rows that share code ------------------------------------------------------------------------------

SHARED = """
schema: 1
frameworks:
  toy:
    declared: ">=1"
    newest_seen: "2"
    rows:
      - version: "1"
        features:
          fix:
            verdict: patch
            tested: behaviour
            seams: {"toy.leaf:f": "0123456789abcdef"}
      - version: "2"
        features:
          fix: %s
"""


def load_shared(tmp_path: Path, cell: str) -> matrix.Matrix:
    (tmp_path / "m.yaml").write_text(SHARED % cell)
    return matrix.load(tmp_path / "m.yaml")


def test_cell_like_a_row_above_takes_its_code_but_not_how_it_was_tested(tmp_path: Path) -> None:
    row = load_shared(tmp_path, "{like: '1', tested: probe}").row("toy", "2")
    assert row is not None
    cell = row.cells["fix"]
    assert (cell.verdict, cell.tested, dict(cell.seams)) == (Verdict.PATCH, "probe", {"toy.leaf:f": "0123456789abcdef"})


@pytest.mark.parametrize(
    ("cell", "place"),
    [
        ("{like: '3'}", "fix.like"),
        ("{like: '1', verdict: native}", "fix.verdict"),
        ("{like: '1', tested: often}", "fix.tested"),
    ],
)
def test_cell_like_with_a_fault_is_named_with_its_place(tmp_path: Path, cell: str, place: str) -> None:
    with pytest.raises(WanshimError, match=place):
        load_shared(tmp_path, cell)


# -- the table that ships ------------------------------------------------------------------------------


def test_own_matrix_is_sound_and_ascends() -> None:
    own = matrix.load()
    assert own.row("diffsynth", "2.1.12") is not None
    for framework in own.declared:
        versions = [Version(row.version) for row in own.of(framework) if not row.source]
        assert versions == sorted(versions)


def test_own_matrix_speaks_of_features_and_targets_that_exist() -> None:
    known = catalog.discover().features
    for row in matrix.load().rows:
        for ability, cell in row.cells.items():
            feature = known[f"{row.framework}.{ability}"]
            place = f"{feature.name} at {row.version}"
            assert set(cell.seams) <= set(feature.targets), place
            if cell.verdict is Verdict.PATCH:
                assert set(cell.seams) == set(feature.targets), place


def test_own_matrix_has_a_cell_for_every_feature_at_every_version() -> None:
    """No exceptions: source that no release has is read at its commit."""
    features = catalog.discover().features.values()
    missing = [
        f"{feature.name} at {row.version}"
        for row in matrix.load().rows
        for feature in features
        if feature.framework == row.framework and feature.ability not in row.cells
    ]
    assert not missing, "write them with `tools/matrix.py scan --write`, then judge them"


def test_tox_environment_is_named_after_framework_and_version() -> None:
    assert Row("vllm_omni", "0.30.0", {}).tox_environment == "vllm-omni-0.30.0"


def boundaries(table: Matrix, framework: str) -> list[Row]:
    """The releases whose tests stand for all of the declared range: its floor, each at which a verdict changes, and its
    newest. Pre-releases, code without a release and what nobody judged count for none."""
    declared = SpecifierSet(table.declared[framework])
    rows = [r for r in table.of(framework) if not r.source and declared.contains(r.version, prereleases=False)]
    chosen: list[Row] = []
    verdicts: dict[str, Verdict] = {}
    for row in rows:
        judged = {name: c.verdict for name, c in row.cells.items() if c.verdict is not Verdict.UNKNOWN}
        if row in (rows[0], rows[-1]) or any(verdicts.get(name) is not v for name, v in judged.items()):
            chosen.append(row)
        verdicts.update(judged)
    return chosen


def test_boundaries_are_floor_newest_and_every_change_of_a_verdict() -> None:
    verdicts = {"0.9": "absent", "1.0": "refuse", "1.1": "refuse", "1.2rc1": "patch", "1.2": "patch"}
    verdicts |= {"1.3": "unknown", "1.4": "patch", "1.5": "native", "1.6": "native", "1.6+commit": "patch"}
    rows = [Row("f", v, {"a": Cell(Verdict(name), "probe", "", {})}) for v, name in verdicts.items()]
    rows[-1] = replace(rows[-1], source="a commit")
    found = boundaries(Matrix(tuple(rows), {"f": ">=1.0"}, {"f": "1.6"}), "f")
    assert [row.version for row in found] == ["1.0", "1.2", "1.5", "1.6"]


def test_own_matrix_has_a_tox_row_at_every_boundary() -> None:
    own = matrix.load()
    missing = [row.tox_environment for name in own.declared for row in boundaries(own, name) if not row.tox]
    assert not missing, "give these `tox: true` and what they install"


def test_own_matrix_says_behaviour_only_where_somebody_can_run_it_again() -> None:
    """A tox row, or a commit: FastVideo's tests take a checkout of one (WANSHIM_TEST_FASTVIDEO_TREE)."""
    tested = [row for row in matrix.load().rows if any(cell.tested == "behaviour" for cell in row.cells.values())]
    assert [row.tox_environment for row in tested if not (row.tox or row.commit)] == []


def test_own_matrix_names_the_environment_of_every_row_that_says_tested() -> None:
    own = matrix.load()
    tested = [row for row in own.rows if any(cell.tested == "behaviour" for cell in row.cells.values())]
    missing = [row.tox_environment for row in tested if not {"python", "torch"} <= row.environment.keys()]
    assert not missing, "record it with `make record ROW=...`"
