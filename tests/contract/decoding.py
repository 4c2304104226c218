"""What every `vae_decode` and `vae_encode` is held to, on gloo ranks of the real framework with a tiny VAE."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.distributed.decoding.ranks import Start, made_together, run_ranks, values
from wanshim.core.decoding import parallelize_decode, parallelize_encode

DIFFERENT = {"decode": "the ranks decode different latents", "encode": "the ranks encode different videos"}
PARALLELIZE = {"decode": parallelize_decode, "encode": parallelize_encode}
VARIABLES = {"decode": "WANSHIM_VAE_MODE", "encode": "WANSHIM_VAE_ENCODE"}


@dataclass(frozen=True)
class Subject:
    """One framework's VAE, by names that a fresh process can import.

    Args:
        feature: what is switched on.
        target: class whose method is patched, `module:Class.method`.
        module: where `make_vae(layout, dtype)` and `decode(vae, latent, tiled)` or `encode(vae, video, tiled)` are, and
            LATENT_CHANNELS by layout; default: `tests.contract.FRAMEWORK.vae`.
        tiles: does the framework's method make tiles where its VAE is told to?
    """

    feature: str
    target: str
    module: str = ""
    tiles: bool = True

    @property
    def made(self) -> Any:
        """The module."""
        return importlib.import_module(self.module or f"tests.contract.{self.feature.partition('.')[0]}.vae")

    @property
    def verb(self) -> str:
        return self.feature.rpartition("_")[2]


@dataclass(frozen=True)
class Case:
    layout: str
    dtype: str
    frames: int  # of the latent
    batch: int = 1
    tiled: bool = False
    apart: bool = False  # the ranks hold different latents or videos
    mode: str = "auto"
    fast: bool = False

    @property
    def plain(self) -> Case:
        """The same by the framework alone."""
        return replace(self, tiled=False, mode="auto", fast=False)

    @property
    def exact(self) -> bool:
        """Is the framework's own untiled result to be met bit for bit?"""
        return not (self.tiled or self.fast or self.mode == "spatial")


@dataclass(frozen=True)
class Seen:
    equal: bool
    difference: float
    state: str
    notes: str


def check_shared(
    subject: Subject, cases: list[Case], size: int = 2, seconds: float = 280, start: Start | None = None
) -> None:
    """Every case equals the framework's own result, or is within 1e-5 of it where bits are not promised.

    Args:
        start: as that of `run_ranks`.
    """
    for seen_by_rank in values(run_ranks(_run_cases, size, subject, cases, seconds=seconds, start=start)):
        for told, seen in seen_by_rank:
            case = told if subject.tiles else replace(told, tiled=False)
            assert seen.state == ("ineffective" if case.apart else "exercised"), f"{case}: {seen}"
            if case.exact:
                assert seen.equal, f"{case}: {seen}"
            else:
                assert seen.difference <= 1e-5, f"{case}: {seen}"
            if case.apart:
                assert DIFFERENT[subject.verb] in seen.notes, f"{case}: {seen}"
            elif case.exact and not case.fast:
                assert "strict, compared" in seen.notes, f"{case}: {seen}"
            if not case.apart and (case.tiled or case.mode != "auto"):
                assert f"{'spatial' if case.tiled else case.mode} " in seen.notes, f"{case}: {seen}"


def check_removed(subject: Subject, start: Start | None = None) -> None:
    """After `deactivate` the class holds the very function it held before."""
    before, after = values(run_ranks(_activate_and_back, 1, subject, seconds=120, start=start))[0]
    assert before
    assert after


def check_handle(subject: Subject, layout: str, given: torch.Tensor) -> None:
    """A handle gives the framework's own result, and leaves nothing on the VAE when it is removed."""
    made = subject.made
    vae, call = made.make_vae(layout, given.dtype), getattr(made, subject.verb)
    expected, before = call(vae, given, False), set(vars(vae))
    handle = PARALLELIZE[subject.verb](vae)
    assert torch.equal(call(vae, given, False), expected)
    assert handle.plan.claim == "strict, compared"
    handle.remove()
    assert set(vars(vae)) == before


def _run_cases(rank: int, size: int, subject: Subject, cases: list[Case]) -> list[tuple[Case, Seen]]:
    import wanshim

    made = subject.made
    call, make_input = getattr(made, subject.verb), {"decode": _latent, "encode": _video}[subject.verb]

    def vae_of(case: Case) -> Any:
        return made.make_vae(case.layout, getattr(torch, case.dtype))

    def own_result(case: Case) -> torch.Tensor:
        result: torch.Tensor = call(vae_of(case), make_input(made, case, rank), False)
        return result

    shared = made_together((case.plain for case in cases if not case.apart), own_result)
    told = []
    for case in cases:
        vae, given = vae_of(case), make_input(made, case, rank)
        reference = own_result(case) if case.apart else shared[case.plain]
        os.environ.update({VARIABLES[subject.verb]: case.mode, "WANSHIM_VAE_FAST": str(int(case.fast))})
        wanshim.activate(f"none,{subject.feature}", strict=True)
        out = call(vae, given, case.tiled)
        row = wanshim.report().row(subject.feature)
        notes = "; ".join(_notes(row))
        wanshim.deactivate()
        difference = (out.float() - reference.float()).abs().max().item()
        told.append((case, Seen(torch.equal(out, reference), difference, _word(row.state), notes)))
    return told


def _activate_and_back(rank: int, size: int, subject: Subject) -> tuple[bool, bool]:
    import wanshim

    module, qualname = subject.target.split(":")
    owner, name = qualname.split(".")
    cls: Any = getattr(importlib.import_module(module), owner)
    original: Callable[..., Any] = cls.__dict__[name]
    wanshim.activate(f"none,{subject.feature}", strict=True)
    replaced = cls.__dict__[name] is not original
    wanshim.deactivate()
    return replaced, cls.__dict__[name] is original


def _latent(made: Any, case: Case, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank if case.apart else 7)
    shape = (case.batch, made.LATENT_CHANNELS[case.layout], case.frames, 5, 7)
    return torch.randn(shape, generator=generator).to(getattr(torch, case.dtype))


def _video(made: Any, case: Case, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank if case.apart else 7)
    pixels = 16 if case.layout.endswith("2.2") else 8
    shape = (case.batch, 3, 4 * case.frames - 3, 5 * pixels, 7 * pixels)
    return torch.rand(shape, generator=generator).mul(2).sub(1).to(getattr(torch, case.dtype))


def _word(state: Any) -> str:
    return str(getattr(state, "value", state))


def _notes(row: Any) -> list[str]:
    found = getattr(row, "notes", ()) or ()
    return [str(note) for note in found] or [str(getattr(row, "reason", ""))]


BOTH = [
    Case(layout, dtype, frames, batch)
    for layout in ("2.1", "2.2")
    for dtype, frames, batch in (("float32", 5, 2), ("bfloat16", 3, 1), ("float32", 1, 1))
]


def images_and_videos(layout: str) -> list[Case]:
    """What a VAE that is made for images is held to: its images in `spatial`, its videos in `temporal` too."""
    image = Case(layout, "float32", 1, mode="spatial")
    return [
        Case(layout, "float32", 1, batch=2),
        Case(layout, "bfloat16", 1),
        image,
        replace(image, fast=True),
        replace(image, tiled=True, mode="auto"),
        Case(layout, "float32", 3, batch=2, mode="temporal"),
        Case(layout, "bfloat16", 5, mode="temporal"),
        Case(layout, "float32", 3, mode="spatial"),
    ]


def on_several_ranks(test: Callable[[int], None]) -> Callable[[int], None]:
    """A sweep, for two, three and four ranks."""
    import pytest

    sizes, marks = pytest.mark.parametrize("size", [2, 3, 4]), (pytest.mark.slow, pytest.mark.sweep)
    for mark in (sizes, pytest.mark.timeout(900), *marks):
        test = mark(test)
    return test


def sweep(size: int) -> list[Case]:
    """What `make matrix` runs on `size` ranks: every promise in both layouts, splits that are never even."""
    frames = {2: (1, 2, 5, 7), 3: (2, 7, 21), 4: (1, 2, 5)}[size]
    found = []
    for layout in ("2.1", "2.2"):
        for count in frames:
            base = Case(layout, "float32", count, batch=2 if count in (2, 5) else 1, mode="temporal")
            found += [base, replace(base, dtype="bfloat16"), replace(base, mode="spatial")]
        short = Case(layout, "float32", 2, fast=True)
        found += [replace(short, mode="temporal"), replace(short, mode="spatial")]
    return found
