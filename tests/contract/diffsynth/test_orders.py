"""Orders of activation and import, and versions other than the one tested, each in a fresh process."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.contract.fresh import fresh

# Scenarios run where this module is imported first: it must stay free of wanshim and diffsynth.

DIT = "diffsynth.models.wan_video_dit"


def import_dit() -> ModuleType:
    return importlib.import_module(DIT)


def look(dit: ModuleType) -> dict[str, Any]:
    """What a user of `WanModel.forward` finds: whose function, what a call does, what the report says."""
    import torch

    import wanshim

    forward = vars(dit.WanModel)["forward"]
    sizes = {"dim": 24, "ffn_dim": 16, "text_dim": 8, "freq_dim": 8, "num_heads": 1, "num_layers": 1}
    model = dit.WanModel(in_dim=4, out_dim=4, eps=1e-6, patch_size=(1, 2, 2), has_image_input=False, **sizes).eval()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            answer: Any = tuple(model(torch.zeros(1, 4, 1, 4, 4), torch.ones(1), torch.zeros(1, 2, 8)).shape)
    except ValueError as error:
        answer = str(error)
    row = wanshim.report().row("diffsynth.patchify")
    return {
        "original": forward.__code__.co_filename == dit.__file__,
        "wrapped_once": forward.__closure__ is not None
        and getattr(forward, "__wrapped__", forward).__code__.co_filename == dit.__file__,
        "answer": answer,
        "state": row.state,
        "verdict": row.verdict,
        "calls": row.calls,
        "reason": row.reason,
    }


WORKS = (1, 4, 1, 4, 4)
FAILS = re.compile("unpack")


def is_patched(found: dict[str, Any], calls: int = 1) -> bool:
    facts = [found[name] for name in ("original", "wrapped_once", "answer", "state", "calls")]
    return facts == [False, True, WORKS, "exercised", calls]


def is_untouched(found: dict[str, Any]) -> bool:
    return found["original"] and not found["wrapped_once"] and bool(FAILS.search(found["answer"]))


# -- orders of the installed DiffSynth -----------------------------------------------------------------


def before_import() -> dict[str, Any]:
    import wanshim

    wanshim.activate("none,diffsynth.patchify")
    return look(import_dit())


def test_activate_before_import_patches() -> None:
    assert is_patched(found := fresh(before_import)), found


def after_import() -> tuple[bool, dict[str, Any]]:
    dit = import_dit()
    import wanshim

    wanshim.activate("none,diffsynth.patchify")
    return dit.WanModel is sys.modules[DIT].WanModel, look(dit)


def test_activate_after_import_patches_in_place() -> None:
    same_class, found = fresh(after_import)
    assert same_class
    assert is_patched(found), found


def twice_and_off_and_on() -> dict[str, Any]:
    import wanshim

    wanshim.activate("none,diffsynth.patchify")
    dit = import_dit()
    once = dit.WanModel.forward
    wanshim.activate("none,diffsynth.patchify")
    seen: dict[str, Any] = {"same": dit.WanModel.forward is once, "twice": look(dit)}
    wanshim.deactivate()
    original = dit.WanModel.forward
    seen["off"] = look(dit)
    wanshim.activate("none,diffsynth.patchify")
    seen["on"] = look(dit)
    wanshim.deactivate()
    wanshim.deactivate()
    seen["back"] = dit.WanModel.forward is original
    return seen


def test_activate_twice_wraps_once_and_deactivate_gives_the_original_back() -> None:
    seen = fresh(twice_and_off_and_on)
    assert seen["same"]
    assert is_patched(seen["twice"]), seen
    assert is_untouched(seen["off"]), seen
    assert seen["off"]["state"] == "off"
    assert is_patched(seen["on"]), seen
    assert seen["back"]


def two_threads() -> tuple[list[str], dict[str, Any]]:
    import wanshim

    start, errors = threading.Barrier(3), []

    def work(act: Callable[[], Any]) -> None:
        try:
            start.wait(60)
            act()
        except BaseException as error:
            errors.append(repr(error))

    acts = [lambda: wanshim.activate("none,diffsynth.patchify")] * 2 + [import_dit]
    threads = [threading.Thread(target=work, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return errors, look(import_dit())


def test_two_threads_that_activate_while_a_third_imports_patch_once() -> None:
    errors, found = fresh(two_threads)
    assert errors == []
    assert is_patched(found), found


def nothing_selected() -> tuple[list[str], dict[str, Any]]:
    finders = [type(finder).__module__ for finder in sys.meta_path]
    import wanshim

    wanshim.activate("none")
    found = look(import_dit())
    return [m for f in sys.meta_path if (m := type(f).__module__) not in finders and m.startswith("wanshim")], found


def test_nothing_selected_leaves_the_original_objects() -> None:
    finders, found = fresh(nothing_selected)
    assert finders == []
    assert is_untouched(found), found
    assert found["state"] == "off"


# -- other versions: copies of the files that the seams lie in -----------------------------------------

NEEDED = (
    "models/wan_video_dit.py",
    "models/wan_video_camera_controller.py",
    "models/wantodance.py",
    "core/gradient/__init__.py",
    "core/gradient/gradient_checkpoint.py",
    "utils/xfuser/xdit_context_parallel.py",
)
UNPACKS = "x, (f, h, w) = self.patchify(x)"
# Upstream's own fix, as its later code does it.
FIXED = "x = self.patchify(x)\n        f, h, w = x.shape[2:]\n        x = rearrange(x, 'b c f h w -> b (f h w) c')"
UNDECIDED = "embedded = self.patchify(x)\n        x, (f, h, w) = embedded"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., str]:
    """A DiffSynth of a version of our choice: the files of the installed one, with some lines rewritten."""
    spec = importlib.util.find_spec("diffsynth")
    assert spec is not None
    assert spec.origin is not None

    def make(number: str, *changes: tuple[str, str]) -> str:
        package = tmp_path / "diffsynth"
        for path in (Path(spec.origin).parent / name for name in NEEDED):
            if path.is_file():  # some came with later versions
                copy = package / path.relative_to(Path(spec.origin).parent)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
        (package / "__init__.py").write_text("")
        dit = package / NEEDED[0]
        source = dit.read_text()
        for old, new in changes:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        dit.write_text(source)
        info = tmp_path / f"diffsynth-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: diffsynth\nVersion: {number}\n")
        return str(tmp_path)

    return make


def of_the_copy(folder: str, features: str = "auto") -> dict[str, Any]:
    sys.path.insert(0, folder)
    import wanshim

    wanshim.activate(features)
    dit = import_dit()
    if not str(dit.__file__).startswith(folder):
        raise AssertionError(dit.__file__)
    return look(dit)


INSTALLED = version("diffsynth")
UNKNOWN = "99.0"


def test_unknown_version_whose_code_is_known_is_patched(copied: Callable[..., str]) -> None:
    found = fresh(of_the_copy, copied(UNKNOWN))
    assert is_patched(found), found
    assert found["verdict"] == "unknown"
    assert re.fullmatch(r"no row for 99\.0, but its code is that of 2\.\d+\.\d+", found["reason"])


def test_unknown_version_whose_code_is_new_but_fits_is_patched(copied: Callable[..., str]) -> None:
    found = fresh(of_the_copy, copied(UNKNOWN, (UNPACKS, "del kwargs\n        " + UNPACKS)))
    assert is_patched(found), found
    assert found["verdict"] == "unknown"
    assert found["reason"] == "WanModel.forward unpacks a pair from patchify, which returns one tensor"


def test_unknown_version_whose_probe_does_not_match_is_refused(copied: Callable[..., str]) -> None:
    found = fresh(of_the_copy, copied(UNKNOWN, (UNPACKS, UNDECIDED)))
    assert is_untouched(found), found
    assert (found["verdict"], found["state"]) == ("refuse", "refused")
    assert found["reason"] == "no row for 99.0, and its code is unlike that of any version in the matrix"


def test_rewritten_body_under_a_known_version_is_refused(copied: Callable[..., str]) -> None:
    found = fresh(of_the_copy, copied(INSTALLED, (UNPACKS, "del kwargs\n        " + UNPACKS)))
    assert is_untouched(found), found
    assert (found["verdict"], found["state"]) == ("refuse", "refused")
    assert found["reason"].startswith(f"{DIT}:WanModel.forward differs from the code of {INSTALLED} (found ")


@pytest.mark.parametrize("number", [INSTALLED, UNKNOWN])
def test_code_that_upstream_has_mended_is_native_and_untouched(copied: Callable[..., str], number: str) -> None:
    found = fresh(of_the_copy, copied(number, (UNPACKS, FIXED)))
    assert (found["original"], found["answer"]) == (True, WORKS)
    assert (found["verdict"], found["state"]) == ("native", "native")
    assert found["reason"] == "WanModel.forward no longer unpacks a pair from patchify"


def raising(folder: str) -> tuple[str, str, dict[str, Any]]:
    sys.path.insert(0, folder)
    import wanshim

    wanshim.activate("none,diffsynth.patchify")
    try:
        import_dit()
        error = "none"
    except OSError as caught:
        error = str(caught)
    state = wanshim.report().row("diffsynth.patchify").state
    source = Path(folder, "diffsynth", NEEDED[0])
    source.write_text(source.read_text().replace("raise OSError('no driver')\n", ""))
    importlib.invalidate_caches()
    return error, state, look(import_dit())


def test_framework_that_fails_to_import_fails_as_without_wanshim_and_is_patched_when_it_works(
    copied: Callable[..., str],
) -> None:
    folder = copied(INSTALLED, ("class WanModel(", "raise OSError('no driver')\nclass WanModel("))
    error, state, found = fresh(raising, folder)
    assert (error, state) == ("no driver", "registered")
    assert is_patched(found), found
