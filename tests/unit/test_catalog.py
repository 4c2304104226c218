"""Adapters are found, none of them by name, and nothing heavy is imported on the way."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import wanshim
from wanshim import activation
from wanshim.patching import Kind
from wanshim.select import catalog

FRAMEWORK = """
from wanshim.patching import Framework
FRAMEWORK = Framework(name="{name}", distribution="{name}")
"""
FEATURE = """
from wanshim.patching import Feature, Seam
FEATURE = Feature(
    name="{name}",
    summary="a feature of a third party",
    seams=(Seam("{framework}.leaf:f", lambda original, seam: original, why="w", upstream="u", remove_when="r"),),
)
"""
Adapter = Callable[..., Path]


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adapter]:
    """Installs an adapter package: files by path below it, registered under the entry-point group."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def install(package: str, **files: str) -> Path:
        for name, source in {"__init__": "", **files}.items():
            path = tmp_path / package / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{catalog.GROUP}]\n{package} = {package}\n")
        made.append(package)
        return tmp_path / package

    yield install
    for name in [n for n in sys.modules if n.split(".")[0] in made]:
        del sys.modules[name]


def a_framework(name: str, ability: str = "speed") -> dict[str, str]:
    return {
        f"{name}__in____init__": FRAMEWORK.format(name=name),
        f"{name}__in__{ability}": FEATURE.format(name=f"{name}.{ability}", framework=name),
    }


def test_adapters_are_never_imported_a_second_time_by_their_folders_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    with pytest.raises(ImportError, match=r"adapters is wanshim\.adapters"):
        importlib.import_module("adapters.torch.pg_timeout")


def test_own_adapters_are_found_without_a_third_party() -> None:
    found = catalog.discover()
    assert "diffsynth" in found.frameworks
    assert {"diffsynth.patchify", "diffsynth.model_split"} <= set(found.features)
    assert found.matrices == ()


def test_every_seam_of_the_own_features_has_its_ledger() -> None:
    for feature in catalog.discover().features.values():
        assert feature.summary
        for seam in feature.seams:
            assert seam.why, seam.target
            assert seam.upstream, seam.target
            assert seam.remove_when, seam.target
            needs_a_reason = seam.kind is Kind.CLOSURE and not seam.in_graph
            assert bool(seam.closure_because) is needs_a_reason, seam.target


def test_feature_of_a_third_party_is_found_with_its_matrix(adapter: Adapter) -> None:
    folder = adapter("wanshim_otherwan", **a_framework("otherwan"))
    (folder / "compat_matrix.yaml").write_text("schema: 1\n")
    found = catalog.discover()
    assert found.frameworks["otherwan"].distribution == "otherwan"
    assert found.features["otherwan.speed"].summary == "a feature of a third party"
    assert found.matrices == (folder / "compat_matrix.yaml",)
    assert "diffsynth.patchify" in found.features


def test_third_party_may_add_a_feature_to_a_framework_of_wanshim(adapter: Adapter) -> None:
    files = a_framework("diffsynth")
    files["diffsynth__in____init__"] = ""
    adapter("wanshim_more", **files)
    assert "diffsynth.speed" in catalog.discover().features


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"otherwan__in____init__": "import no_such_module_anywhere"},
            "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
        ),
        ({"otherwan__in____init__": "raise SystemExit(3)"}, "SystemExit: 3"),
        ({"otherwan__in____init__": "FRAMEWORK = 'otherwan'"}, "wanshim_broken offers a str. Expected a Framework."),
        (
            {**a_framework("otherwan"), "otherwan__in____init__": ""},
            "otherwan.speed belongs to no framework. Expected one of ",
        ),
        (
            {
                "diffsynth__in____init__": "",
                "diffsynth__in__patchify": FEATURE.format(name="diffsynth.patchify", framework="diffsynth"),
            },
            "wanshim_broken offers 'diffsynth.patchify', which another adapter package offers too.",
        ),
    ],
    ids=["import", "exit", "type", "no_framework", "rival"],
)
def test_broken_third_party_is_left_out_with_its_distribution_named_and_all_others_stay(
    adapter: Adapter, caplog: pytest.LogCaptureFixture, files: dict[str, str], reason: str
) -> None:
    adapter("wanshim_broken", **files)
    adapter("wanshim_good", **a_framework("goodwan"))
    found = catalog.discover()
    assert {"diffsynth.patchify", "goodwan.speed"} <= set(found.features)
    assert "otherwan.speed" not in found.features
    assert "otherwan" not in found.frameworks
    (left_out,) = found.left_out
    assert left_out.startswith(f"the adapters of wanshim_broken 1.0 (wanshim_broken) are left out: {reason}")
    assert [record.getMessage() for record in caplog.records] == [f"wanshim: {left_out}"]
    assert found.origins == {"goodwan.speed": "wanshim_good 1.0"}


def test_second_of_two_packages_that_offer_one_framework_is_left_out(adapter: Adapter) -> None:
    adapter("wanshim_one", **a_framework("otherwan"))
    adapter("wanshim_two", **a_framework("otherwan", ability="size"))
    found = catalog.discover()
    assert found.origins == {"otherwan.speed": "wanshim_one 1.0"}
    assert "wanshim_two offers 'otherwan'" in found.left_out[0]


@pytest.mark.slow
def test_report_names_the_distribution_of_a_feature_and_what_was_left_out(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = adapter("wanshim_good", **a_framework("goodwan"))
    (folder / "compat_matrix.yaml").write_text("schema: [")
    adapter("wanshim_broken", otherwan__in____init__="import no_such_module_anywhere")
    current = activation.Activation()
    monkeypatch.setattr(activation, "CURRENT", current)
    wanshim.activate()
    report = wanshim.report()
    assert report.row("goodwan.speed").origin == "wanshim_good 1.0"
    assert report.row("diffsynth.patchify").origin == ""
    assert "goodwan.speed (goodwan -, from wanshim_good 1.0): absent" in str(report)
    assert str(report).startswith("the adapters of wanshim_broken 1.0 (wanshim_broken) are left out: ")
    assert report.row("diffsynth.patchify").verdict in ("patch", "absent")
    assert any("the matrix of a third party's adapters is left out: " in r.getMessage() for r in caplog.records)


def test_folder_without_init_and_stray_files_are_passed_over(adapter: Adapter) -> None:
    folder = adapter("wanshim_otherwan", **a_framework("otherwan"))
    (folder / "notes").mkdir()
    (folder / "README.md").write_text("text")
    (folder / "otherwan" / "helper.py").write_text("VALUE = 1\n")
    assert "otherwan.speed" in catalog.discover().features


DISCOVER = """
import sys
{first}
from wanshim.select import catalog
found = catalog.discover()
assert len(found.features) > 1
heavy = {{"torch", "rich", "click", "wrapt", *found.frameworks}}
print(*sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("first", "expected"), [("", ""), ("import wrapt", "wrapt")], ids=["alone", "proof_that_it_can_fail"]
)
def test_discovering_imports_neither_torch_nor_a_framework(first: str, expected: str) -> None:
    program = [sys.executable, "-c", DISCOVER.format(first=first)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == expected
