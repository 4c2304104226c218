"""One optimizer step of a training command with kept attention and blocks, one without, compared: the same bits.

python tools/prove.py -- python train.py ...    --gpus and -f as for `wanshim run`; WANSHIM_KEEP as for the command
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wanshim import settings
from wanshim.cli.main import FOREIGN_OPTIONS, command_line, entry, features, gpus
from wanshim.errors import WanshimError

if TYPE_CHECKING:
    import torch

KEPT = "diffsynth.kept_attention"
KEEP_VARIABLE = settings.names_of("keep")[0]
PARTS = {"losses": "losses", "gradients": "gradients", "weights": "weights after the step"}
RECORD = Path(__file__).parent / "record"  # its sitecustomize records the step
STEP_FILE = "PROVE_STEP_FILE"  # the variable that it reads


class ProofFailed(WanshimError, RuntimeError):
    """Nothing to compare: a run failed, or the command does not compute the same twice."""


@click.command(context_settings=FOREIGN_OPTIONS)
@command_line
@features
@gpus
def main(command: list[str], features: str | None, gpus: int | None) -> None:
    """Run one step of the command with and without what is kept, and compare. Exit status 1 if the bits differ."""
    if not prove(command, features, gpus, os.environ.get(KEEP_VARIABLE, ""), click.echo):
        raise SystemExit(1)


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
        print(f"wanshim: one step with {KEEP_VARIABLE}={value}", file=sys.stderr, flush=True)
        return _step(command, features, gpus, value)

    kept, plain = run(keep), run("off")
    state, outcome = kept["outcomes"].get(KEPT, ("off", "off"))
    if state != "exercised":
        raise ProofFailed(f"{KEEP_VARIABLE}={keep} had no effect, so there is nothing to compare: {KEPT} is {outcome}")
    compared = {part: _compare(kept[part], plain[part]) for part in PARTS}
    same = all(different == 0 for different, *_ in compared.values())
    if not same and any(_compare(again, plain[part])[0] for part, again in run("off").items() if part in PARTS):
        raise ProofFailed(
            "two runs of this command without what is kept differ, so there is nothing to compare with",
            hint="Seed what the script draws, and see torch.use_deterministic_algorithms",
        )
    say(f"one optimizer step with {KEEP_VARIABLE}={keep} beside one with {KEEP_VARIABLE}=off:")
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
        file = Path(folder) / "step.pt"
        path = os.pathsep.join(filter(None, [str(RECORD), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, KEEP_VARIABLE: keep, STEP_FILE: str(file)}
        run = [sys.executable, "-m", "wanshim", "run", "--no-report", *options, "--", *command]
        status = subprocess.run(run, env=environment, check=False).returncode
        if not file.is_file():
            raise ProofFailed(
                f"the run with {KEEP_VARIABLE}={keep} ended with status {status} before its first optimizer step",
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


if __name__ == "__main__":
    entry(main)
