"""Wheels of a framework that nobody has: real wheel files, a few lines of source each."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from wanshim.patching import Feature, Framework, Seam
from wanshim.select.catalog import Catalog

FRAMEWORK = Framework("toyvideo", "toy-video")
BLOCK = "toyvideo.models.dit:Block.forward"
LOAD = "toyvideo.loading:load"
DIT = '''
class Block:
    def forward(self, x, scale=1):
        """Scale x."""
        return x * scale
'''
LOADING = "def load(path):\n    return open(path)\n"


def _unused(original: Any, seam: Any) -> Any:
    return original


def feature() -> Feature:
    seams = [Seam(target, _unused, why="w", upstream="u", remove_when="r") for target in (BLOCK, LOAD)]
    return Feature("toyvideo.fix", "a fix", tuple(seams))


def catalog() -> Catalog:
    return Catalog({"toyvideo": FRAMEWORK}, {"toyvideo.fix": feature()}, ())


def wheel(folder: Path, version: str, files: dict[str, str] | None = None, package: str = "toyvideo") -> Path:
    """Write a wheel; `files` replaces modules by path, None for a text leaves one out."""
    texts = {"models/__init__.py": "", "models/dit.py": DIT, "loading.py": LOADING, **(files or {})}
    path = folder / f"toy_video-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            if text:
                archive.writestr(f"{package}/{name}", text)
        archive.writestr(f"{package}/__init__.py", "raise RuntimeError('imported')")
        metadata = f"Metadata-Version: 2.1\nName: toy-video\nVersion: {version}\n"
        archive.writestr(f"toy_video-{version}.dist-info/METADATA", metadata)
    return path
