"""A framework of a few lines, and features for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import wanshim
from tests.unit.conftest import FakeFramework
from wanshim import activation
from wanshim.patching import Feature, Kind, Seam, SeamState
from wanshim.patching.probe import Verdict
from wanshim.select.catalog import Catalog
from wanshim.select.matrix import Cell, Matrix, Row

DIT = """
def forward(x):
    return ["original", x]
"""


VAE = """
def decode(x):
    return ["original", x]
MODES = ["plain"]
"""


def ours(original: Any, seam: SeamState) -> Callable[..., Any]:
    def replacement(x: int) -> Any:
        if not seam.enter():
            return original(x)
        return ["ours", *original(x)]

    return replacement


def fails(original: Any, seam: SeamState) -> Callable[..., Any]:
    raise RuntimeError("the factory fails")


def a_seam(target: str, replace_with: Callable[..., Any] = ours, **options: Any) -> Seam:
    return Seam(f"fakewan.{target}", replace_with, why="w", upstream="u", remove_when="r", **options)


REPAIR = Feature("fakewan.repair", "fixes forward", seams=(a_seam("dit:forward"),), auto=True)


DECODE = Feature(
    "fakewan.decode",
    "decode and its modes",
    seams=(a_seam("vae:decode"), a_seam("vae:MODES", lambda v, seam: [*v, "fast"], kind=Kind.VALUE)),
    switched_on_by="vae_mode",
)


class Fake:
    """wanshim with a catalog and a matrix of the test's own."""

    def __init__(self, framework: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> None:
        self.framework = framework
        self.monkeypatch = monkeypatch
        framework.write(dit=DIT, vae=VAE)
        framework.install("1.0")
        self.offer(REPAIR, DECODE)

    def offer(self, *features: Feature, verdict: Verdict = Verdict.PATCH, reason: str = "") -> None:
        current = activation.CURRENT
        frameworks = {"fakewan": self.framework.framework}
        cells = {f.ability: Cell(verdict, "behaviour", reason, self.framework.digests(*f.targets)) for f in features}
        self.monkeypatch.setattr(current, "catalog", Catalog(frameworks, {f.name: f for f in features}, ()))
        self.monkeypatch.setattr(current, "matrix", Matrix((Row("fakewan", "1.0", cells),), {}, {}))

    def dit(self) -> Any:
        return self.framework.module("dit")

    def vae(self) -> Any:
        return self.framework.module("vae")


@pytest.fixture
def wan(fake: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Fake(fake, monkeypatch)
    wanshim.deactivate()
