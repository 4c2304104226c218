"""What documents say of the matrix and of features is what the matrix and the adapters say."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from wanshim.patching import Kind
from wanshim.select.catalog import discover
from wanshim.select.matrix import load

ROOT = Path(__file__).parent.parent.parent
IGNORED = shutil.ignore_patterns("__pycache__", "*.png")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("generate")


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "docs" / "generate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the documents are made from."""
    for name in ("wanshim", "adapters", "docs", "deploy", "benchmarks/results", "tests/mutants"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=IGNORED)
    for name in ("README.md", "compat_matrix.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_documents_are_those_that_the_matrix_and_the_adapters_make() -> None:
    result = run(ROOT, "--check")
    assert result.returncode == 0, f"run `make docs`:\n{result.stdout}{result.stderr}"


def test_stale_table_is_noticed(generate: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    assert generate.render(text.replace("| 2.0.0 to 2.1.12 |", "| 2.0.0 to 2.1.11 |", 1), load()) == text


def test_stale_missing_and_left_over_page_are_noticed_and_mended(checkout: Path) -> None:
    pages = checkout / "docs" / "features"
    before = {path.name: path.read_text() for path in pages.iterdir()}
    (pages / "diffsynth.patchify.md").write_text("stale\n")
    (pages / "diffsynth.model_split.md").unlink()
    (pages / "diffsynth.gone.md").write_text("of a feature that is gone\n")
    result = run(checkout, "--check")
    assert result.returncode == 1, result.stderr
    for name in ("patchify", "model_split", "gone"):
        assert f"--- docs/features/diffsynth.{name}.md" in result.stdout
    assert run(checkout).returncode == 0
    assert {path.name: path.read_text() for path in pages.iterdir()} == before


def test_changed_ledger_makes_its_page_stale(checkout: Path) -> None:
    adapter = checkout / "adapters" / "diffsynth" / "patchify.py"
    adapter.write_text(adapter.read_text().replace('remove_when="', 'remove_when="never: '))
    result = run(checkout, "--check")
    assert result.returncode == 1
    assert "+- remove when: never: " in result.stdout


def test_changed_measurement_makes_the_tables_of_its_page_stale_and_names_a_missed_aim(checkout: Path) -> None:
    path = checkout / "benchmarks" / "results" / "vae_decode_2.1.json"
    record = json.loads(path.read_text())
    for row in record["rows"]:
        if row["arm"] == "vLLM-Omni 0.30 tile executor" and row["ranks"] == 4:
            row["seconds"] = 0.001
    path.write_text(json.dumps(record))
    result = run(checkout, "--check")
    assert result.returncode == 1
    assert "--- docs/measured/decode.md" in result.stdout
    assert "+| vLLM-Omni 0.30 tile executor | 4 | 0.001 |" in result.stdout
    ratios = next(
        line for line in result.stdout.splitlines() if line.startswith("+| vLLM-Omni's tile executor | 1.8 |")
    )
    assert " | **0.00** / " in ratios


def test_record_of_tests_on_gpus_has_its_line_and_says_that_files_differed(checkout: Path) -> None:
    record = {"gpus": 2, "gpu": "NVIDIA H200", "outcomes": {"passed": 40, "skipped": 3, "error": 1}, "torch": "2.11.0"}
    record |= {"driver": "580.1", "date": "2026-11-22T15:00:00+00:00", "commit": "c0ffee" + "0" * 34, "clean": False}
    (checkout / "benchmarks" / "results" / "gpu_tests_2xH200.json").write_text(json.dumps(record))
    assert run(checkout).returncode == 0
    said = (checkout / "docs" / "reference" / "reliability.md").read_text()
    assert (
        "\n| 2 x NVIDIA H200 | 40 | 3 | 1 | 2.11.0 | 580.1 | 2026-11-22 | c0ffee0 (with changes) | `benchmarks/" in said
    )


def test_every_feature_has_a_page_with_the_ledger_of_every_seam() -> None:
    features, matrix = discover().features.values(), load()
    assert features
    for feature in features:
        page = (ROOT / "docs" / "features" / f"{feature.name}.md").read_text()
        for seam in feature.seams:
            for said in (seam.module, seam.qualname, seam.why, seam.upstream, seam.remove_when):
                assert said in page
            assert seam.kind is not Kind.CLOSURE or f"- a closure because: {seam.closure_because}" in page
        for row in matrix.of(feature.framework):
            if feature.ability in row.cells:
                assert f"\n| {row.version} | {row.cells[feature.ability].verdict.value} | " in page


def test_links_of_documents_lead_to_files() -> None:
    documents = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    links = [(path, link) for path in documents for link in LINK.findall(path.read_text()) if "toyvideo" not in link]
    assert any(link == "docs/how-to/decode.md" for _, link in links)
    assert [f"{path.name}: {link}" for path, link in links if not (path.parent / link).exists()] == []


def test_numbers_in_sentences_are_those_of_the_records(generate: ModuleType) -> None:
    """Tables are made from the records; a sentence that says a number again is held against them here."""
    from writers import measured

    def times(name: str) -> float:
        return measured.result("sequence_training_480p_1xH200")["median"] / measured.result(name)["median"]

    two, four = (times(f"sequence_training_480p_{count}xH200") for count in (2, 4))
    said = f"{two:.1f} times as fast on two GPUs and {four:.1f} times on four"
    for page in ("README.md", "docs/measured/training.md"):
        assert said in " ".join((ROOT / page).read_text().split()), page
    lanes = [measured.result(f"model_split_lanes_{count}xH200")["lanes"]["8"]["speed_up"] for count in (2, 4)]
    gains = f"up to {lanes[0]:.1f} times the speed of one GPU on two, {lanes[1]:.1f} times on four"
    assert gains in (ROOT / "docs/how-to/train_large_model.md").read_text()
    predicted = re.search(r"cuda:0: [\d.]+ GiB", "".join(measured.result("sequence_training_480p_2xH200")["plan"]))
    assert predicted is not None
    assert predicted[0] in (ROOT / "docs/how-to/train_on_several_gpus.md").read_text()


def test_changed_record_makes_the_picture_of_the_gain_stale(checkout: Path) -> None:
    path = checkout / "benchmarks" / "results" / "sequence_training_480p_4xH200.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "median": 1.23}))
    result = run(checkout, "--check")
    assert result.returncode == 1
    for look in ("light", "dark"):
        assert f"--- docs/images/gain_{look}.svg" in result.stdout


def test_every_variable_is_explained_and_nothing_else() -> None:
    from wanshim import settings
    from wanshim.select import variables

    own = {field for field, variable in settings.VARIABLES.items() if not variable.foreign}
    assert variables.VARIABLES.keys() == own
    assert {variable.task for variable in variables.VARIABLES.values()} == variables.TASKS.keys()
    assert [page for page in variables.TASKS.values() if not (ROOT / "docs" / page).is_file()] == []


def test_every_example_of_a_variable_is_a_value_that_it_takes() -> None:
    from wanshim import settings
    from wanshim.select import variables

    for field, variable in variables.VARIABLES.items():
        name = settings.names_of(field)[0]
        assert field in settings.read({name: variable.example}).sources, name


def test_variables_and_features_that_pages_name_exist() -> None:
    from wanshim import hand_over, settings

    known = {name for field in settings.VARIABLES for name in settings.names_of(field)} | {hand_over.INHERITED}
    features = discover().features.keys()
    frameworks = {name.partition(".")[0] for name in features}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").iterdir())]:
        text = path.read_text(encoding="utf-8")
        named = {name for name in re.findall(r"\bWANSHIM_[A-Z_]+[A-Z]\b", text) if not name.startswith("WANSHIM_TEST_")}
        assert named <= known, path
        switched = re.findall(r"(?:-f |WANSHIM_FEATURES=)(\w+\.\w+)", text)
        assert {name for name in switched if name.partition(".")[0] in frameworks} <= features, path


COMMAND = re.compile(r"(?:^|[`\s])wanshim (run|doctor|features|matrix|monitor|demo)\b([^`\n|]*)", re.MULTILINE)


def options_of_commands(text: str) -> list[str]:
    """`wanshim doctor --json` and the like, of every command in a page; what follows -- is another program's."""
    found = []
    for name, rest in COMMAND.findall(text.replace("\\\n", " ")):
        own = rest.partition(" -- ")[0]
        words = {"demo": "generate|decode|resume"}.get(name, "(?!)")
        below = re.match(rf"\s+({words})\b", own)
        command = f"wanshim {name}" + (f" {below[1]}" if below else "")
        found += [f"{command} {option}" for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", own)]
    return found


def test_options_of_commands_in_pages_exist() -> None:
    public = json.loads((ROOT / "tests/contract/public_names.json").read_text())["options"]
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    used = {option: path.name for path in pages for option in options_of_commands(path.read_text(encoding="utf-8"))}
    assert {"wanshim run --gpus", "wanshim doctor -f"} <= used.keys()
    assert {option: page for option, page in used.items() if option not in public} == {}


def test_python_in_pages_is_python() -> None:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^( *)```python\n(.*?)^ *```$", path.read_text(), re.MULTILINE | re.DOTALL):
            compile(textwrap.dedent(block[1]), str(path), "exec")


def test_glossary_has_ten_words() -> None:
    lines = (ROOT / "docs/reference/glossary.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 11  # and the head


def test_every_promise_of_the_reliability_page_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "reference" / "reliability.md").read_text(encoding="utf-8")
    written = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    named = set(re.findall(r"::(test_\w+\*?)", text))
    assert len(named) > 150
    assert [name for name in named if f"def {name.removesuffix('*')}" not in written] == []
    assert [file for file in set(re.findall(r"tests/[\w/]+\.py", text)) if not (ROOT / file).is_file()] == []
