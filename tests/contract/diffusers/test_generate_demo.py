"""`wanshim demo generate` on the CPU: it prints the plans and the differences, and keeps what they promise."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from wanshim.demo import generate
from wanshim.errors import WanshimError


def shown(gpus: int) -> str:
    out = io.StringIO()
    assert generate.run(gpus=gpus, steps=2, console=Console(file=out, width=120))
    return out.getvalue()


def test_two_processes_have_the_same_frames() -> None:
    text = shown(2)
    assert "WanPipeline on cpu, cpu: guidance over 2, bit for bit the frames of one GPU" in text
    assert "0, bit for bit" in text


@pytest.mark.slow
def test_four_processes_have_them_within_rounding() -> None:
    assert "guidance over 2 x tokens over 2, the frames of one GPU up to rounding" in shown(4)


@pytest.mark.parametrize(("gpus", "steps"), [(1, 4), (2, 0)])
def test_numbers_that_compare_nothing_are_refused(gpus: int, steps: int) -> None:
    with pytest.raises(WanshimError, match=f"--gpus {gpus} --steps {steps}. Expected two or more processes"):
        generate.run(gpus=gpus, steps=steps)
