"""`wanshim doctor --prove`: one optimizer step of a training command with kept attention and blocks, one without, and
what differs. Both promise the same bits."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.errors import ProofFailed
from wanshim.launch import start
from wanshim.launch.boot.recorded_step import FILE

if TYPE_CHECKING:
    import torch

KEPT = "diffsynth.kept_attention"
PARTS = {"losses": "losses", "gradients": "gradients", "weights": "weights after the step"}


def prove(
    command: Sequence[str], features: str | None, gpus: int | None, asked: str, say: Callable[[str], object]
) -> bool:
    """Whether one step of `command` is the same bit for bit with and without what is kept.

    Args:
        features: the WANSHIM_FEATURES grammar.
        gpus: as for `wanshim run`.
        asked: the value of WANSHIM_KEEP.
        say: takes each line of the comparison.

    Raises:
        ProofFailed: a run ended before its first optimizer step, nothing was kept, or the command does not compute the
            same twice by itself.
    """
    keep = asked if asked in ("attention", "blocks") else "blocks"

    def run(value: str) -> dict[str, Any]:
        print(f"wanshim: one step with {settings.KEEP}={value}", file=sys.stderr, flush=True)
        return _step(command, features, gpus, value)

    kept, plain = run(keep), run("off")
    state, outcome = kept["outcomes"].get(KEPT, ("off", "off"))
    if state != "exercised":
        raise ProofFailed(f"{settings.KEEP}={keep} had no effect, so there is nothing to compare: {KEPT} is {outcome}")
    compared = {part: _compare(kept[part], plain[part]) for part in PARTS}
    same = all(different == 0 for different, *_ in compared.values())
    if not same and any(_compare(again, plain[part])[0] for part, again in run("off").items() if part in PARTS):
        raise ProofFailed(
            "two runs of this command without what is kept differ, so there is nothing to compare with",
            hint="Seed what the script draws, and see torch.use_deterministic_algorithms",
        )
    say(f"one optimizer step with {settings.KEEP}={keep} beside one with {settings.KEEP}=off:")
    for part, (different, count, largest) in compared.items():
        result = "equal bit for bit" if not different else f"{different} differ, by {largest:.1e} of their norm at most"
        say(f"  {PARTS[part]}: {count}, {result}")
    return same


def _step(command: Sequence[str], features: str | None, gpus: int | None, keep: str) -> dict[str, Any]:
    import torch

    options = [
        *(["--gpus", str(gpus)] if gpus is not None else []),
        *(["-f", features] if features is not None else []),
    ]
    with tempfile.TemporaryDirectory(prefix="wanshim-proof-") as folder:
        environment = {**start.environment(), settings.KEEP: keep, settings.RECORDED_STEP: folder}
        run = [sys.executable, "-m", "wanshim", "run", "--no-report", *options, "--", *command]
        status = subprocess.run(run, env=environment, check=False).returncode
        file = Path(folder) / FILE
        if not file.is_file():
            raise ProofFailed(
                f"the run with {settings.KEEP}={keep} ended with status {status} before its first optimizer step",
                hint="Run the command by itself first: wanshim run -- ...",
            )
        step: dict[str, Any] = torch.load(file, weights_only=True)
        return step


def _compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> tuple[int, int, float]:
    """How many tensors differ, of how many, and by how much of their norm at most."""
    import torch

    if len(found) != len(expected):
        return abs(len(found) - len(expected)), max(len(found), len(expected)), float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True) if not torch.equal(a, b)]
    largest = max((((a - b).norm() / b.norm()).item() for a, b in pairs), default=0.0)
    return len(pairs), len(expected), largest
