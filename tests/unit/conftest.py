"""A framework made for one test: real files on sys.path, with the metadata of an installed distribution."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from wanshim.patching import Framework, SourceTree

NAME = "fakewan"


class FakeFramework:
    """`write` makes the files, `install` the dist-info; nothing is imported until the test asks for it."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.framework = Framework(NAME, NAME)
        self.tree = SourceTree(NAME, site / NAME)

    def install(self, version: str) -> None:
        for old in self.site.glob("*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        info = self.site / f"{NAME}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n")
        importlib.invalidate_caches()

    def write(self, **modules: str) -> None:
        """Source by module name below the package; `__init__` is made where it is not given."""
        folder = self.site / NAME
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in {"__init__": "", **modules}.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(source))
        self.tree = SourceTree(NAME, folder)
        importlib.invalidate_caches()

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{NAME}.{name}")

    def digests(self, *targets: str) -> dict[str, str | None]:
        return {target: self.tree.fingerprint(target) for target in targets}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFramework]:
    # A rewritten file must be compiled again although its size and second of change are the same.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    yield FakeFramework(site)
    for name in [n for n in sys.modules if n == NAME or n.startswith(NAME + ".")]:
        del sys.modules[name]
