"""A command for one GPU on N: what is checked before `wanshim run --gpus N` starts it once for each of them, to train
by a plan, and before `wanshim generate --gpus N` starts it once, with a pipeline that uses all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wanshim import hand_over, settings
from wanshim.core.shared import gpus
from wanshim.doctor import diagnosis
from wanshim.errors import FeatureUnavailable, SettingInvalid, WanshimError
from wanshim.launch import start
from wanshim.launch.boot.rank import no_program
from wanshim.launch.interpreter_options import is_python, is_shell, skipping_option
from wanshim.patching.verdict import Verdict
from wanshim.process_report import say

DATA_PARALLEL = ("auto", "sequence", "stream")  # plans of one process a GPU
ON_ONE = ("auto", "stream")
# Refused before they start processes, on other machines too; any other launcher is seen by what it starts here.
LAUNCHERS = {"colossalai", "deepspeed", "horovodrun", "mpiexec", "mpirun", "orterun", "srun"}
UNAVAILABLE = (Verdict.REFUSE.value, Verdict.ABSENT.value)


def settings_of_ranks(
    command: Sequence[str], count: int | None, features: str | None, *, fast: bool = False
) -> settings.Settings:
    """The settings as each of `count` processes reads them. If WANSHIM_PLAN is not set, the plan is `sequence`, or
    `auto` on one GPU.

    Args:
        command: the program and its arguments; empty if it is not known.
        count: None: without `--gpus`, so the settings as they are.
        fast: as WANSHIM_FAST=1.

    Raises:
        WanshimError: the command has several steps, or is not reached by wanshim.
        SettingInvalid: fewer GPUs are in sight, or another variable asks for one process.
        FeatureUnavailable: no selected feature carries the plan out, so that each process would train by itself.
    """
    option, read = _read(count, fast)
    if count is None or read.disable:
        return read
    if read.devices is not None:
        raise SettingInvalid(
            f"{option} and {read.sources['devices']}",
            expected="one of the two: a process for each GPU, or one process over all devices",
        )
    plans = DATA_PARALLEL if count > 1 else ON_ONE
    if read.plan_name not in (None, *plans):
        raise SettingInvalid(
            f"{option} and {read.sources['plan']}={read.plan_name}",
            expected=f"no plan, or a plan of one process for each GPU: {', '.join(plans)}",
        )
    if read.plan_name == "sequence" and count % (read.plan_count or count):
        raise SettingInvalid(
            f"{option} and {read.sources['plan']}=sequence:{read.plan_count}",
            expected=f"a number of processes that is a multiple of {read.plan_count}",
        )
    _check_in_sight(count)
    if command:
        _check_command(command, option, "run")
    if command and count > 1:
        _check_one_program(command, count)
    ranks = replace(
        read,
        local_world_size=count,
        local_rank=0,
        plan=read.plan or settings.WantedPlan(start.plan_of(count)),
        sources={"plan": option, **read.sources},
    )
    _check_selected(
        features,
        ranks,
        "plan",
        "--gpus plans a training for so many GPUs, and no selected feature carries such a plan out",
        "Select it: wanshim run --gpus N -f diffsynth.model_split; to generate: wanshim generate --gpus N",
    )
    return ranks


def settings_of_generation(
    command: Sequence[str], count: int, features: str | None, *, fast: bool = False
) -> settings.Settings:
    """The settings as the one process of `wanshim generate` reads them.

    Args:
        fast: as WANSHIM_FAST=1.

    Raises:
        WanshimError: the command is not reached by wanshim.
        SettingInvalid: fewer GPUs are in sight.
        FeatureUnavailable: no selected feature carries it out, so that the pipeline would use one GPU, or none is
            faster although that was asked for.
    """
    option, read = _read(count, fast)
    if read.disable:
        return read
    _check_in_sight(count)
    _check_command(command, option, "generate")
    read = replace(read, generate=settings.WantedGeneration(count), sources={**read.sources, "generate": option})
    _check_selected(
        features,
        read,
        "generate",
        "no selected feature runs a pipeline on several GPUs",
        "Select it: wanshim generate --gpus N -f generate; to train: wanshim run --gpus N",
    )
    if fast and (read.compile or read.compute):
        _check_selected(
            features,
            read,
            "compile",
            "--fast, and no selected feature makes a forward of generation faster",
            "Select it: wanshim generate --gpus N --fast -f fast_blocks",
            along_with="generate",
        )
    return read


def _read(count: int | None, fast: bool = False) -> tuple[str, settings.Settings]:
    """The option in words, and the settings."""
    option, read = f"--gpus {count}", settings.read(fast=fast)
    if count is not None and hand_over.is_rank():
        raise WanshimError(f"{option} in a rank of another --gpus", expected="the number of GPUs once")
    return option, read


def _check_in_sight(count: int) -> None:
    present = None if settings.runs_on_cpu() else gpus.in_sight(settings.visible_gpus())
    if present is not None and present < count:
        raise SettingInvalid(
            f"--gpus {count} with {present} GPUs in sight",
            expected=f"at most {present}" if present else "a GPU",
            hint="Check nvidia-smi and CUDA_VISIBLE_DEVICES; with ACCELERATE_USE_CPU=true the processes run on the CPU",
        )


def _check_command(command: Sequence[str], option: str, verb: str) -> None:
    skipping = skipping_option(command[1:]) if is_python(command[0]) else ""
    if skipping:
        raise WanshimError(
            f"{option} with {skipping}, which makes Python pass over wanshim",
            hint=f"Leave it out: wanshim {verb} {option} -- python program.py",
        )


def _check_one_program(command: Sequence[str], count: int) -> None:
    program = command[0]
    module = command[2] if is_python(program) and command[1:2] == ["-m"] and len(command) > 2 else ""
    launcher = {Path(program).name, module.partition(".")[0]} & LAUNCHERS
    if launcher:
        raise no_program(count, f"{launcher.pop()}, which starts processes itself")
    if not is_python(program) and is_shell(program):  # a Python of pyenv is a shell script that becomes it
        raise WanshimError(
            f"--gpus {count} with {program}, a shell script, would run each of its steps once for each GPU",
            expected="one program",
            hint="Write wanshim run --gpus N -- before the step in it that trains",
        )


def _check_selected(
    features: str | None, read: settings.Settings, switch: str, found: str, hint: str, *, along_with: str = ""
) -> None:
    """Without a feature that `switch` turns on, the command would do something else than was asked for."""
    from wanshim.select import catalog

    known = catalog.discover().features.items()
    names = [name for name, one in known if switch in one.switches and one.along_with == along_with]
    first = None
    for row in diagnosis.selected_rows(read, features, names):
        if row.verdict not in UNAVAILABLE:  # one is enough, and the files of the others are not read
            return
        first = first or row
    if first is None:
        raise FeatureUnavailable(found, hint=hint)
    if switch == "plan" and read.local_world_size == 1 and not read.strict:  # one process, as without the option
        say(
            f"--gpus 1 plans a training, and {first.feature} is unavailable: {first.reason}; the program runs with "
            "the other features. To generate on several GPUs: wanshim generate --gpus N"
        )
        return
    raise FeatureUnavailable(f"{first.feature} is unavailable: {first.reason}", hint=first.next_step)
