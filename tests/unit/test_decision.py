"""Two gates: the row of the installed version, then the code found."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.conftest import FakeFramework
from wanshim.patching import Feature, Finding, Framework, Seam, SourceTree
from wanshim.patching.probe import Verdict
from wanshim.select.decision import Decision, decide
from wanshim.select.matrix import Cell, Matrix, Row
from wanshim.settings import Settings

TARGET = "fakewan.dit:Model.forward"
HELPER = "fakewan.dit:helper"
SOURCE = """
class Model:
    def forward(self, x):
        return x + 1

def helper():
    return 1
"""
REWRITTEN = SOURCE.replace("x + 1", "x + 2")
SAME_MEANING = '''
"""A new docstring."""
import os


class Model:
    """Documented now."""

    def forward(
        self,
        x,  # the input
    ):
        """Also documented."""
        # and explained
        return (x
                + 1)


def helper():
    return 1
'''


def a_feature(**changes: object) -> Feature:
    seam = Seam(TARGET, lambda original, seam: original, why="w", upstream="u", remove_when="r")
    feature = Feature("fakewan.speed", "a feature", seams=(seam,), relies_on=(HELPER,))
    return replace(feature, **changes)


def a_cell(fake: FakeFramework, verdict: Verdict = Verdict.PATCH, reason: str = "") -> Cell:
    return Cell(verdict, "behaviour", reason, fake.digests(TARGET, HELPER))


def a_matrix(**cells: Cell) -> Matrix:
    rows = (Row("fakewan", version.replace("v", "").replace("_", "."), {"speed": c}) for version, c in cells.items())
    return Matrix(tuple(rows), {}, {})


def decided(fake: FakeFramework, matrix: Matrix, settings: Settings | None = None, **changes: object) -> Decision:
    return decide(a_feature(**changes), fake.framework, matrix, settings or Settings())


@pytest.fixture
def known(fake: FakeFramework) -> Matrix:
    """Version 1.0 is installed with the source that its row knows."""
    fake.write(dit=SOURCE)
    fake.install("1.0")
    return a_matrix(v1_0=a_cell(fake))


def test_known_version_with_known_code_gets_the_rows_verdict(fake: FakeFramework, known: Matrix) -> None:
    found = decided(fake, known)
    assert found == Decision(Verdict.PATCH, "tested: behaviour", "", "1.0", fake.digests(TARGET, HELPER))
    assert found.applies


@pytest.mark.parametrize("verdict", [Verdict.NATIVE, Verdict.REFUSE, Verdict.ABSENT])
def test_known_version_with_known_code_keeps_any_verdict_and_its_reason(
    fake: FakeFramework, known: Matrix, verdict: Verdict
) -> None:
    found = decided(fake, a_matrix(v1_0=a_cell(fake, verdict, "says the row")))
    assert (found.verdict, found.reason, found.applies) == (verdict, "says the row", False)


def test_known_version_with_rewritten_body_is_refused(fake: FakeFramework, known: Matrix) -> None:
    before = fake.digests(TARGET)[TARGET]
    fake.write(dit=REWRITTEN)
    found = decided(fake, known)
    assert found.verdict is Verdict.REFUSE
    assert found.reason == (
        f"{TARGET} differs from the code of 1.0 (found {fake.digests(TARGET)[TARGET]}, expected {before})"
    )
    where = fake.site / "fakewan"
    assert found.next_step == f"Reinstall fakewan 1.0, or take out the local change in {where}"


def test_known_version_with_rewritten_code_it_relies_on_is_refused(fake: FakeFramework, known: Matrix) -> None:
    fake.write(dit=SOURCE.replace("return 1", "return 2"))
    found = decided(fake, known)
    assert found.verdict is Verdict.REFUSE
    assert found.reason.startswith(f"{HELPER} differs")


def test_judge_cannot_talk_a_rewritten_body_of_a_known_version_in(fake: FakeFramework, known: Matrix) -> None:
    fake.write(dit=REWRITTEN)
    assert decided(fake, known, judge=lambda source: Finding(Verdict.PATCH, "fits")).verdict is Verdict.REFUSE


def test_judge_that_finds_the_ability_in_a_known_version_makes_way(fake: FakeFramework, known: Matrix) -> None:
    fake.write(dit=REWRITTEN)
    found = decided(fake, known, judge=lambda source: Finding(Verdict.NATIVE, "has it"))
    assert (found.verdict, found.reason) == (Verdict.NATIVE, "has it")


def test_comments_layout_and_docstrings_do_not_refuse(fake: FakeFramework, known: Matrix) -> None:
    fake.write(dit=SAME_MEANING)
    assert decided(fake, known).verdict is Verdict.PATCH


def test_unknown_version_with_known_code_is_unknown_and_applies(fake: FakeFramework, known: Matrix) -> None:
    fake.install("1.1")
    found = decided(fake, known)
    assert (found.verdict, found.applies) == (Verdict.UNKNOWN, True)
    assert found.reason == "no row for 1.1, but its code is that of 1.0"
    assert found.version == "1.1"


def test_unknown_version_with_code_that_has_the_ability_is_native(fake: FakeFramework, known: Matrix) -> None:
    fake.install("1.1")
    found = decided(fake, a_matrix(v1_0=a_cell(fake, Verdict.NATIVE, "upstream has it")))
    assert (found.verdict, found.reason) == (Verdict.NATIVE, "same code as 1.0: upstream has it")


def test_unknown_version_takes_the_newest_row_with_its_code(fake: FakeFramework, known: Matrix) -> None:
    fake.install("1.9")
    rows = a_matrix(v1_0=a_cell(fake), v1_5=a_cell(fake), v1_8=Cell(Verdict.PATCH, "probe", "", {TARGET: "0" * 16}))
    assert decided(fake, rows).reason == "no row for 1.9, but its code is that of 1.5"


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (Finding(Verdict.NATIVE, "has it"), (Verdict.NATIVE, "has it")),
        (Finding(Verdict.ABSENT, "no such part"), (Verdict.ABSENT, "no such part")),
        (Finding(Verdict.REFUSE, "breaks it"), (Verdict.REFUSE, "breaks it")),
        (Finding(Verdict.PATCH, "fits"), (Verdict.UNKNOWN, "fits")),
        (None, (Verdict.REFUSE, "no row for 1.1, and its code is unlike that of any version in the matrix")),
    ],
)
def test_unknown_version_with_unknown_code_is_left_to_the_judge(
    fake: FakeFramework, known: Matrix, finding: Finding | None, expected: tuple[Verdict, str]
) -> None:
    fake.install("1.1")
    fake.write(dit=REWRITTEN)
    seen: list[SourceTree] = []

    def judge(source: SourceTree) -> Finding | None:
        seen.append(source)
        return finding

    found = decided(fake, known, judge=judge)
    assert (found.verdict, found.reason) == expected
    assert seen[0].fingerprint(TARGET) == fake.digests(TARGET)[TARGET]


def test_unknown_version_without_a_judge_is_refused_with_the_next_step(fake: FakeFramework, known: Matrix) -> None:
    fake.install("1.1")
    fake.write(dit=REWRITTEN)
    found = decided(fake, known)
    assert found.verdict is Verdict.REFUSE
    assert found.next_step == "Run `wanshim matrix` for the versions known, or open an issue with this line"


def test_unknown_version_that_lost_the_target_is_refused_by_its_name(fake: FakeFramework, known: Matrix) -> None:
    fake.install("1.1")
    fake.write(dit="class Model:\n    pass\n")
    assert decided(fake, known).reason == f"no row for 1.1, and {TARGET} is not there"


def test_target_that_no_release_has_is_not_what_an_unknown_version_lacks(fake: FakeFramework, known: Matrix) -> None:
    """As a method that a class has from its parent has no code of its own."""
    inherited = "fakewan.dit:Model.backward"
    cell = Cell(Verdict.PATCH, "behaviour", "", fake.digests(TARGET, HELPER, inherited))
    fake.install("1.1")
    fake.write(dit=REWRITTEN)
    reason = decided(fake, a_matrix(v1_0=cell), relies_on=(HELPER, inherited)).reason
    assert reason == "no row for 1.1, and its code is unlike that of any version in the matrix"


def test_row_that_says_absent_does_not_speak_of_code_that_came_later(fake: FakeFramework, known: Matrix) -> None:
    absent = Cell(Verdict.ABSENT, "probe", "not yet", {TARGET: None, HELPER: None})
    rows = a_matrix(v0_9=a_cell(fake), v1_0=absent)
    found = decided(fake, rows)
    assert (found.verdict, found.reason) == (Verdict.UNKNOWN, "the row of 1.0 says absent, but its code is that of 0.9")


def test_row_without_a_cell_for_the_feature_is_not_called_missing(fake: FakeFramework, known: Matrix) -> None:
    rows = (*a_matrix(v0_9=a_cell(fake)).rows, Row("fakewan", "1.0", {}))
    found = decided(fake, Matrix(rows, {}, {}))
    assert (found.verdict, found.reason) == (
        Verdict.UNKNOWN,
        "the row of 1.0 has no cell for speed, but its code is that of 0.9",
    )
    fake.write(dit=REWRITTEN)
    found = decided(fake, Matrix(rows, {}, {}))
    assert found.reason.startswith("the row of 1.0 has no cell for speed, and its code is unlike")


def test_row_that_nobody_judged_is_named_so(fake: FakeFramework, known: Matrix) -> None:
    found = decided(fake, a_matrix(v0_9=a_cell(fake), v1_0=a_cell(fake, Verdict.UNKNOWN)))
    assert (found.verdict, found.reason) == (
        Verdict.UNKNOWN,
        "the row of 1.0 says unknown, but its code is that of 0.9",
    )


def test_source_without_metadata_says_so(fake: FakeFramework) -> None:
    fake.write(dit=SOURCE)
    found = decided(fake, a_matrix(v1_0=a_cell(fake)))
    assert found.version is None
    assert found.reason == (
        "it is not installed as a distribution, so no row speaks of it, but its code is that of 1.0"
    )


def test_framework_that_is_not_installed_is_absent(fake: FakeFramework) -> None:
    found = decided(fake, Matrix((), {}, {}))
    assert found == Decision(Verdict.ABSENT, "no package fakewan is installed here")
    assert not found.applies


def test_loose_file_of_the_frameworks_name_is_not_the_framework(fake: FakeFramework) -> None:
    (fake.site / "fakewan.py").write_text("raise RuntimeError('never imported')\n")
    assert decided(fake, Matrix((), {}, {})).verdict is Verdict.ABSENT


def test_folder_of_the_frameworks_name_is_not_the_framework(fake: FakeFramework) -> None:
    (fake.site / "fakewan" / "examples").mkdir(parents=True)
    assert decided(fake, Matrix((), {}, {})).verdict is Verdict.ABSENT


def test_file_that_cannot_be_parsed_is_refused_not_a_crash(fake: FakeFramework, known: Matrix) -> None:
    fake.write(dit="def broken(:\n")
    assert decided(fake, known).verdict is Verdict.REFUSE


def test_machine_that_cannot_have_it_is_refused_although_the_code_fits(fake: FakeFramework, known: Matrix) -> None:
    def blocked(settings: Settings) -> str | None:
        return f"{settings.local_world_size} processes" if (settings.local_world_size or 1) > 1 else None

    assert decided(fake, known, blocked=blocked).verdict is Verdict.PATCH
    found = decided(fake, known, Settings(local_world_size=2), blocked=blocked)
    assert (found.verdict, found.reason, found.version) == (Verdict.REFUSE, "2 processes", "1.0")


def test_deciding_imports_nothing_of_the_framework(fake: FakeFramework, tmp_path: Path) -> None:
    fake.write(__init__="raise RuntimeError('imported')", dit="raise RuntimeError('imported')\n" + SOURCE)
    fake.install("1.0")
    found = decided(fake, a_matrix(v1_0=a_cell(fake)))
    assert found.verdict is Verdict.PATCH
    assert not [name for name in sys.modules if name.startswith("fakewan")]


def test_version_comes_from_the_distribution_not_the_package_name(fake: FakeFramework, known: Matrix) -> None:
    found = decide(a_feature(), Framework("fakewan", "packaging"), known, Settings())
    assert found.version is not None
    assert found.version != "1.0"


def test_code_without_a_release_is_known_by_its_code_whatever_it_calls_itself(fake: FakeFramework) -> None:
    fake.write(dit=SOURCE)
    fake.install("1.0")
    unreleased = Row("fakewan", "1.0+abc", {"speed": a_cell(fake)}, source="fakewan since abc")
    released = Row("fakewan", "1.0", {"speed": Cell(Verdict.NATIVE, "probe", "fixed", {TARGET: "0" * 16})})
    found = decided(fake, Matrix((released, unreleased), {}, {}))
    assert found.verdict is Verdict.PATCH
    assert found.reason == "calls itself 1.0, and its code is that of fakewan since abc"


def test_commit_between_two_releases_is_known_by_the_code_of_the_later_one(fake: FakeFramework, known: Matrix) -> None:
    """As a clone of the main branch: it calls itself the release before. So does a copy beside the script, for which
    the metadata of the installed one speak."""
    fake.write(dit=REWRITTEN)
    later = a_cell(fake)
    found = decided(fake, replace(known, rows=(*known.rows, *a_matrix(v1_1=later).rows)))
    assert (found.verdict, found.untested) == (Verdict.UNKNOWN, True)
    assert found.reason == "it calls itself 1.0, but its code is that of 1.1"


def test_code_of_a_release_is_that_of_the_release_although_code_without_one_is_the_same(fake: FakeFramework) -> None:
    fake.write(dit=SOURCE)
    fake.install("2.0")
    released = a_matrix(v1_0=a_cell(fake)).rows
    unreleased = Row("fakewan", "1.0+abc", {"speed": a_cell(fake)}, source="fakewan since abc")
    found = decided(fake, Matrix((*released, unreleased), {}, {}))
    assert (found.verdict, found.reason) == (Verdict.UNKNOWN, "no row for 2.0, but its code is that of 1.0")


@pytest.mark.parametrize(
    ("declared", "tested", "reason", "untested"),
    [
        (">=2.0", "probe", "outside the declared range >=2.0: read, not run", True),
        (">=1.0", "probe", "tested: probe", False),
        (">=2.0", "behaviour", "tested: behaviour", False),
        ("none yet", "probe", "tested: probe", False),
    ],
)
def test_patch_outside_the_declared_range_says_that_nothing_ran(
    fake: FakeFramework, known: Matrix, declared: str, tested: str, reason: str, untested: bool
) -> None:
    cell = replace(a_cell(fake), tested=tested)
    found = decided(fake, replace(a_matrix(v1_0=cell), declared={"fakewan": declared}))
    assert (found.verdict, found.reason, found.untested) == (Verdict.PATCH, reason, untested)


def test_reason_of_a_row_outside_the_declared_range_is_kept(fake: FakeFramework, known: Matrix) -> None:
    cell = replace(a_cell(fake), tested="probe", reason="half of it")
    found = decided(fake, replace(a_matrix(v1_0=cell), declared={"fakewan": ">=2.0"}))
    assert found.reason == "half of it; outside the declared range >=2.0: read, not run"


# -- families of models, of which each has code of its own ------------------------------------------------

BIRDS, FISH = "fakewan.bird_dit:Bird.forward", "fakewan.fish_dit:Fish.forward"
FAMILIES = {"Birds": ("bird_",), "Fish": ("fish_",)}
ANIMAL = "class {0}:\n    def forward(self, x):\n        return x{1}\n"


def write_families(fake: FakeFramework, birds: str = "", fish: str = "", common: str = SOURCE) -> None:
    fake.write(dit=common, bird_dit=ANIMAL.format("Bird", birds), fish_dit=ANIMAL.format("Fish", fish))


def family_cell(fake: FakeFramework, birds: str = "", fish: str = "") -> Cell:
    write_families(fake, birds, fish)
    return Cell(Verdict.PATCH, "behaviour", "", fake.digests(TARGET, HELPER, BIRDS, FISH))


def decided_by_family(fake: FakeFramework, matrix: Matrix) -> Decision:
    return decided(fake, matrix, relies_on=(HELPER, BIRDS, FISH), families=FAMILIES)


def test_family_whose_code_is_changed_under_a_known_version_is_left_out_alone(fake: FakeFramework) -> None:
    fake.install("1.0")
    rows = a_matrix(v1_0=family_cell(fake))
    before = fake.digests(FISH)[FISH]
    write_families(fake, fish=" + 1")
    found = decided_by_family(fake, rows)
    reason = f"{FISH} differs from the code of 1.0 (found {fake.digests(FISH)[FISH]}, expected {before})"
    assert (found.verdict, found.left_out) == (Verdict.PATCH, {"Fish": reason})
    assert found.reason == f"tested: behaviour; Fish is left out: {reason}"
    assert decided(fake, rows, relies_on=(HELPER, BIRDS, FISH)).verdict is Verdict.REFUSE  # without families


@pytest.mark.parametrize("changed", [{"birds": " + 1", "fish": " + 1"}, {"common": REWRITTEN}], ids=str)
def test_feature_without_a_known_family_or_without_what_all_need_is_refused(
    fake: FakeFramework, changed: dict[str, str]
) -> None:
    rows = a_matrix(v1_0=family_cell(fake))
    for version in ("1.0", "1.1"):
        fake.install(version)
        write_families(fake, **changed)
        found = decided_by_family(fake, rows)
        assert (found.verdict, found.left_out) == (Verdict.REFUSE, {})


def test_families_of_an_unknown_version_may_have_the_code_of_different_rows(fake: FakeFramework) -> None:
    fake.install("1.2")
    rows = a_matrix(v1_0=family_cell(fake), v1_1=family_cell(fake, " + 1", " + 1"))
    write_families(fake, fish=" + 1")
    assert (decided_by_family(fake, rows).verdict, decided_by_family(fake, rows).left_out) == (Verdict.UNKNOWN, {})
    write_families(fake, fish=" + 2")
    found = decided_by_family(fake, rows)
    assert (found.verdict, list(found.left_out)) == (Verdict.UNKNOWN, ["Fish"])
    assert found.reason == (
        "no row for 1.2, but its code is that of 1.0; "
        "Fish is left out: its code is unlike that of any version in the matrix"
    )


def test_families_of_a_commit_between_two_releases_are_those_of_the_later_one(fake: FakeFramework) -> None:
    fake.install("1.0")
    earlier = family_cell(fake)
    write_families(fake, common=REWRITTEN)
    later = Cell(Verdict.PATCH, "behaviour", "", fake.digests(TARGET, HELPER, BIRDS, FISH))
    write_families(fake, fish=" + 1", common=REWRITTEN)
    found = decided_by_family(fake, a_matrix(v1_0=earlier, v1_1=later))
    assert (found.verdict, list(found.left_out)) == (Verdict.UNKNOWN, ["Fish"])
    assert found.reason.startswith("it calls itself 1.0, but its code is that of 1.1; Fish is left out: ")


def test_family_that_is_gone_is_left_out_and_one_that_is_not_there_yet_keeps_nothing_going(fake: FakeFramework) -> None:
    fake.install("1.2")
    rows = a_matrix(v1_0=family_cell(fake))
    (fake.site / "fakewan" / "fish_dit.py").unlink()
    assert decided_by_family(fake, rows).left_out == {"Fish": f"{FISH} is not there"}
    birds_alone = a_matrix(v1_0=Cell(Verdict.PATCH, "behaviour", "", fake.digests(TARGET, HELPER, BIRDS, FISH)))
    fake.write(dit=SOURCE, bird_dit=ANIMAL.format("Bird", " + 1"))
    assert decided_by_family(fake, birds_alone).verdict is Verdict.REFUSE
