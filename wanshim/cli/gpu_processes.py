"""`wanshim run --gpus N`: a command for one GPU, started once for each of N GPUs by torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from wanshim import diagnosis, gpus, launchers, settings
from wanshim.errors import FeatureUnavailable, SettingInvalid, WanshimError
from wanshim.interpreter_options import is_python
from wanshim.verdict import Verdict

PLAN = "sequence"
DATA_PARALLEL = ("auto", "sequence", "stream")  # plans of one process a GPU


def per_gpu(command: Sequence[str], count: int, features: str | None) -> list[str]:
    """The command that starts `command` in `count` processes, joined by torch.distributed, as torchrun names them.

    WANSHIM_PLAN is set to `sequence` where it is not set.

    Raises:
        WanshimError: the command starts processes itself, or torchrun is not installed.
        SettingInvalid: fewer GPUs are in sight, or another variable asks for one process.
        FeatureUnavailable: no selected feature carries the plan out, so that each process would train by itself.
    """
    read = settings.read()
    if launchers.launch_of(command) is not None:
        raise WanshimError(
            f"--gpus {count} with {command[0]}, which starts processes itself",
            expected="the command that trains on one GPU",
            hint="Leave the launcher out: wanshim run --gpus N -- python train.py ...",
        )
    if read.devices is not None:
        raise SettingInvalid(
            f"--gpus {count} and {read.sources['devices']}",
            expected="one of the two: a process for each GPU, or one process over all devices",
        )
    if read.plan is not None and read.plan.name not in DATA_PARALLEL:
        raise SettingInvalid(
            f"--gpus {count} and {read.sources['plan']}={read.plan.name}",
            expected=f"no plan, or a plan of one process for each GPU: {', '.join(DATA_PARALLEL)}",
        )
    present = gpus.in_sight()
    if present is not None and 0 < present < count:
        raise SettingInvalid(f"--gpus {count}", expected=f"at most the {present} GPUs in sight")
    settings.set_plan(PLAN)
    _check_planned(features)
    return under_torchrun(command, count)


def under_torchrun(command: Sequence[str], count: int) -> list[str]:
    """`command` in `count` processes of this machine; a `.py` file is run by this Python."""
    python = command[0] if is_python(command[0]) else sys.executable
    program = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    own = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count), "--no_python"]
    return [python, *own, *program]


def _check_planned(features: str | None) -> None:
    """Processes without the plan would each train by themselves, which multiplies the samples of a step."""
    rows = [row for row in diagnosis.examine(features).rows if row.state == "selected" and _plans(row.feature)]
    if not rows:
        raise FeatureUnavailable(
            "--gpus starts a process for each GPU, and no selected feature trains one sample on all of them",
            hint="Select it: wanshim run --gpus N -f diffsynth.model_split -- ...",
        )
    installed = [row for row in rows if row.verdict != Verdict.ABSENT.value]
    refused = next((row for row in installed if row.verdict == Verdict.REFUSE.value), None)
    if refused is not None:
        raise FeatureUnavailable(f"{refused.feature} is unavailable: {refused.reason}", hint=refused.next_step)


def _plans(name: str) -> bool:
    from wanshim import catalog

    return "plan" in catalog.discover().features[name].switches
