"""Writes the toy framework, its distribution and a third party's adapters for it into a folder."""

from __future__ import annotations

import re
from pathlib import Path

from wanshim.patching.probe import SourceTree

# Without torch, so that a fresh process costs nothing; `tensors` is the part that torch.compile reaches.
FRAMEWORK = """
class Block:
    def __init__(self):
        self.calls = 0

    def forward(self, x):
        return x + 1


class Other:
    def forward(self, x):
        return x + 2


def scale(x):
    return x * 2


def unused(x):
    return x
"""
USES = """
from toyframe.blocks import scale


def twice(x):
    return scale(scale(x))
"""
TENSORS = """
import torch


class Block(torch.nn.Module):
    def forward(self, x):
        return x + 1
"""
CALLS = """
def block():
    from toyframe import blocks

    return blocks.Block()


def call():
    return block().forward(1)


def both_objects():
    from toyframe import blocks

    return blocks.Block(), blocks.Other()


def both():
    return [found.forward(1) for found in both_objects()]


def scaled():
    from toyframe import blocks

    return blocks.scale(1)


def scaled_twice():
    from toyframe import uses

    return uses.twice(1)


def tensor_block():
    from toyframe import tensors

    return tensors.Block()


def tensor_call():
    import torch

    return torch.nn.Sequential(tensor_block())(torch.zeros(3))


def to_compile():
    import torch

    return torch.nn.Sequential(tensor_block()), (torch.zeros(3),)
"""
HEAD = """
from wanshim.patching import Feature, Kind, Seam

TEXTS = {"why": "w", "upstream": "u", "remove_when": "r"}


def plus_ten(original, seam):
    def replacement(*args, **kwargs):
        if not (seam.enter_graph() if seam.seam.in_graph else seam.enter()):
            return original(*args, **kwargs)
        return original(*args, **kwargs) + 10

    return replacement
"""
TARGET = re.compile(r'Seam\("([^"]+)"')


def feature(ability: str, *targets: str, replace: str = "plus_ten", extra: str = "") -> str:
    seams = "".join(f'Seam("{target}", {replace}, {extra} **TEXTS), ' for target in targets)
    return f'FEATURE = Feature("toyframe.{ability}", "toy", ({seams}))\n'


def write(folder: Path, adapters: dict[str, str]) -> Path:
    """Make `folder` a site with toyframe 1.0, the calls and the adapters (file name -> source)."""
    package = folder / "toyframe"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "blocks.py").write_text(FRAMEWORK)
    (package / "uses.py").write_text(USES)
    (package / "tensors.py").write_text(TENSORS)
    (folder / "toycalls.py").write_text(CALLS)
    info = folder / "toyframe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toyframe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[wanshim.adapters]\ntoy = toy_adapters\n")
    house = folder / "toy_adapters" / "toyframe"
    house.mkdir(parents=True)
    (folder / "toy_adapters" / "__init__.py").touch()
    (house / "__init__.py").write_text(
        'from wanshim.patching import Framework\n\nFRAMEWORK = Framework("toyframe", "toyframe")\n'
    )
    for name, source in adapters.items():
        (house / f"{name}.py").write_text(HEAD + source)
    _write_matrix(folder, adapters)
    return folder


def _write_matrix(folder: Path, adapters: dict[str, str]) -> None:
    """A row of the third party's own for every feature, on the code as it is."""
    source = SourceTree("toyframe", folder / "toyframe")
    lines = ["schema: 1", "frameworks:", "  toyframe:", '    declared: "==1.0"', '    newest_seen: "1.0"', "    rows:"]
    lines += ['      - version: "1.0"', "        features:"]
    for name, text in adapters.items():
        lines += [f"          {name}:", "            verdict: patch", "            tested: behaviour"]
        lines += ["            seams:"]
        for target in TARGET.findall(text):
            digest = source.fingerprint(target)
            lines += [f"              {target}: " + ("null" if digest is None else f'"{digest}"')]
    (folder / "toy_adapters" / "compat_matrix.yaml").write_text("\n".join(lines) + "\n")
