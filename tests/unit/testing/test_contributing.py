"""CONTRIBUTING.md, followed: its files written, its changes applied, its commands run, in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RELEASED = re.compile(r"(toyvideo/\S+) of (\S+)")
CONTRACT_TESTS = "python -m pytest -q tests/contract/toyvideo"
# What `make test` asks of every row and feature.
RULES = "tests/unit/test_matrix.py tests/contract/test_kit_cases.py"
IGNORED = shutil.ignore_patterns("*.png", "*.svg")  # compiled files go along: every command would compile anew


@dataclass
class Copy:
    """A copy of the checkout, a site for the toy, and a `wanshim` that is the copy's."""

    root: Path
    site: Path

    def follow(self, language: str, text: str) -> None:
        if language == "console":
            for command in text.removeprefix("$ ").split("\n$ "):
                self.run(*command.rstrip("\n").split("\n"))
            return
        title, body = text.split("\n", 1)
        path = title.removeprefix("# ")
        released = RELEASED.fullmatch(path)
        if language == "diff":
            self.change(self.root / path, body)
        elif released is not None:
            self.release(*released.groups(), body)
        else:
            self.write(self.root / path, body)

    def run(self, command: str, *said: str) -> None:
        environment = {
            **os.environ,
            "PATH": f"{self.site / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{self.root}{os.pathsep}{self.site}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "200",
        }
        result = subprocess.run(
            ["bash", "-c", command], cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        heard = result.stdout + result.stderr
        assert result.returncode == 0, f"$ {command}\n{heard}"
        for line in said:
            assert line in heard, f"$ {command}\n{heard}"

    def change(self, path: Path, diff: str) -> None:
        """Put the lines marked + in place of those marked -; FINGERPRINT stands for any."""
        lines = diff.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        pattern = re.escape(old).replace("FINGERPRINT", "[0-9a-f]{16}")
        text, count = re.subn(pattern, lambda match: new, path.read_text())
        assert count == 1, f"{path.name} holds this {count} times:\n{old}"
        path.write_text(text)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def release(self, path: str, version: str, text: str) -> None:
        """Install a file of a version of the toy, beside those of the same version, and leave its wheel in the
        checkout."""
        information = f"toyvideo-{version}.dist-info/METADATA"
        if not (self.site / information).exists():
            for old in self.site.glob("toyvideo*"):
                shutil.rmtree(old)
            metadata = f"Metadata-Version: 2.1\nName: toyvideo\nVersion: {version}\n"
            self.write(self.site / information, metadata)
            self.write(self.site / "toyvideo" / "__init__.py", "")
        self.write(self.site / path, text)
        with zipfile.ZipFile(self.root / f"toyvideo-{version}-py3-none-any.whl", "w") as wheel:
            for file in self.site.glob("toyvideo*/*"):
                wheel.write(file, file.relative_to(self.site))


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    root, site = tmp_path / "checkout", tmp_path / "site"
    for name in ("wanshim", "adapters", "tools", "docs", "deploy", "tests", "benchmarks/results"):
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=IGNORED)
    for name in ("README.md", "compat_matrix.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    (site / "bin").mkdir(parents=True)
    for name, module in (("wanshim", "-m wanshim "), ("python", "")):
        program = site / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        program.chmod(0o755)
    return Copy(root, site)


# Each step and check is a fresh process; every check of the kit takes a minute of them.
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("checks", ["scale_is_applied", pytest.param("", id="all")])
def test_page_followed_step_by_step_gives_what_it_says(copy: Copy, checks: str) -> None:
    page = PAGE.read_text()
    assert CONTRACT_TESTS in page
    blocks = BLOCK.findall(page.replace(CONTRACT_TESTS, f"{CONTRACT_TESTS} -k '{checks}'"))
    assert {language for language, _ in blocks} == {"python", "diff", "console"}
    for language, text in blocks:
        copy.follow(language, text)
    copy.run("wanshim doctor --all -f toyvideo.scale", "toyvideo 1.1", "Tested: behaviour")
    copy.run("python docs/generate.py --check")
    copy.run(f"python -m pytest -q {RULES} -k 'own_matrix or every_feature'")


def test_each_recipe_is_within_a_page() -> None:
    recipes = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    titles = [recipe.split("\n")[0] for recipe in recipes]
    assert titles == ["A framework", "A feature", "A variable", "A test", "A verdict", "A version", "A VAE"]
    for recipe in recipes:
        assert len(recipe.splitlines()) <= 80, recipe.split("\n")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('-    declared: "none yet"', '-    declared: "elsewhere"'),
        pytest.param("2 rows read, 0 differences", "3 rows read", marks=pytest.mark.sweep),
        pytest.param("$ python docs/generate.py", "$ python docs/generated.py", marks=pytest.mark.sweep),
    ],
)
def test_page_that_went_stale_is_noticed(copy: Copy, right: str, wrong: str) -> None:
    text = PAGE.read_text().replace(right, wrong)
    assert text != PAGE.read_text()

    def follow() -> None:
        for language, block in BLOCK.findall(text):
            if CONTRACT_TESTS not in block:
                copy.follow(language, block)

    with pytest.raises(AssertionError, match=r"rows read|holds this 0 times|generated\.py"):
        follow()
