"""`wanshim demo generate` on the CPU: it prints the plans and the differences, and keeps what they promise."""

from __future__ import annotations

import pytest

from wanshim.demo import generate
from wanshim.errors import WanshimError


def test_two_processes_have_the_same_frames(capsys: pytest.CaptureFixture[str]) -> None:
    generate.run(gpus=2, steps=2)
    text = capsys.readouterr().out
    assert "WanPipeline on cpu, cpu: guidance over 2, bit for bit the frames of one GPU" in text
    assert "0, bit for bit" in text


@pytest.mark.slow
def test_four_processes_have_them_within_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    generate.run(gpus=4, steps=2)
    assert "guidance over 2 x tokens over 2, the frames of one GPU up to rounding" in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "steps"), [(1, 4), (2, 0)])
def test_numbers_that_compare_nothing_are_refused(gpus: int, steps: int) -> None:
    with pytest.raises(WanshimError, match=f"--gpus {gpus} --steps {steps}. Expected two or more processes"):
        generate.run(gpus=gpus, steps=steps)
