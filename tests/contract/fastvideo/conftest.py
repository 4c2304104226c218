"""A tiny UMT5 checkpoint, and ranks of FastVideo on gloo: as installed, with the fault, and of a checkout."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.contract.fastvideo import encode_ranks, fastvideo_tree, umt5_checkpoint

TASKS = "tests.contract.fastvideo.tasks"
Result = list[dict[str, Any]]
# A source tree of FastVideo at an affected commit, for those who have one: the folder that holds
# `fastvideo/`. Read here, at import: a fixture takes every WANSHIM_ variable out of the environment of a
# test.
CHECKOUT = os.environ.get("WANSHIM_TEST_FASTVIDEO_TREE", "")


class Ranks:
    """Runs jobs of several ranks, each in a folder of its own."""

    def __init__(
        self, run: Callable[[dict[str, Any]], Result], model: Path, folder: Path, verdict: str = "native"
    ) -> None:
        self._run, self._model, self._folder, self._count = run, model, folder, 0
        self.verdict = verdict  # what this FastVideo is to fastvideo.negative_prompt

    def __call__(
        self, task: str = "train_start", *, cache: Path | None = None, expected: tuple[str, ...] = (), **job: Any
    ) -> Result:
        """Run one job and return the ranks' reports; `embeds` and `mask` are added where a rank has them.

        Args:
            expected: names of errors that the test looks at; any other fails it.
        """
        self._count += 1
        folder = self._folder / str(self._count)
        environment = {} if cache is None else {"WANSHIM_CACHE_DIR": str(cache)}
        defaults = {"model": str(self._model), "deadline": 60, "world": 2, "environment": environment}
        reports = self._run({**defaults, "task": task, "folder": str(folder), **job})
        for report in reports:
            tensors = folder / f"{report['rank']}.safetensors"
            report["log"] = (folder / f"{report['rank']}.log").read_text()
            report.update(load_file(tensors) if tensors.is_file() else {})
            assert report.get("error") in (None, *expected), report["log"][-3000:]
        return reports


def has_training() -> bool:
    if importlib.util.find_spec("fastvideo") is None:
        return False
    try:
        fastvideo_tree.find_installed()
    except Exception:
        return False
    return True


def is_affected() -> bool:
    """Whether the installed FastVideo is one of the affected commits itself."""
    return has_training() and not (fastvideo_tree.find_installed() / "train/utils/negative_prompt.py").is_file()


needs_per_rank = pytest.mark.skipif(
    is_affected(), reason="the installed FastVideo encodes on rank 0 only; fastvideo.negative_prompt is what it gets"
)
needs_training = pytest.mark.skipif(
    not has_training(), reason="FastVideo with fastvideo.train (0.2.0 or later) is not installed here"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return umt5_checkpoint.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def installed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks of the installed FastVideo."""
    folder = tmp_path_factory.mktemp("installed")
    with encode_ranks.serving(None, folder / "log", TASKS) as run:
        yield Ranks(run, model, folder)


@pytest.fixture(scope="session", params=["reproduction", "checkout"])
def affected(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks of a FastVideo in which rank 0 alone encodes."""
    folder = tmp_path_factory.mktemp("affected")
    (folder / "tree").mkdir()
    tree, verdict = None, "patch"
    if request.param == "reproduction" and not is_affected():
        # Code that no row knows and that fits by structure: patched with a warning.
        tree, verdict = fastvideo_tree.reproduce(folder / "tree"), "unknown"
    elif request.param == "checkout" and CHECKOUT:
        tree = folder / "tree"
        (tree / "fastvideo").symlink_to(Path(CHECKOUT, "fastvideo"), target_is_directory=True)
        fastvideo_tree.name_version(tree)
    elif request.param == "checkout":
        pytest.skip("no checkout of an affected commit: name one with WANSHIM_TEST_FASTVIDEO_TREE")
    with encode_ranks.serving(tree, folder / "log", TASKS) as run:
        yield Ranks(run, model, folder, verdict)


@pytest.fixture(scope="session")
def upstream(installed: Ranks) -> dict[str, Any]:
    """Embeddings and mask of FastVideo's own `encode_negative_prompt`."""
    # One rank alone has nobody to wait for, so rank-0-only encoding tells its numbers too.
    (report,) = installed("train_start" if is_affected() else "upstream", world=1)
    return report
