"""How many processes a launcher's command line starts on this machine, read without running the launcher.

Which options take a value is read from the source of the launcher that is installed, so that the script's own options
are not mistaken for the launcher's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wanshim import settings
from wanshim.launch import gpus
from wanshim.launch.interpreter_options import is_python, program_at
from wanshim.patching.probe import SourceTree

FLAGS = ("store_true", "store_false", "store_const", "count", "help", "version", "check_env")
ACCELERATE = ("accelerate", "commands/launch.py")
TORCHRUN = ("torch", "distributed/run.py")
# what is started -> package and file with its options, and the arguments that must come first
LAUNCHERS: Mapping[str, tuple[tuple[str, str], tuple[str, ...]]] = {
    "accelerate": (ACCELERATE, ("launch",)),
    "accelerate.commands.accelerate_cli": (ACCELERATE, ("launch",)),
    "accelerate-launch": (ACCELERATE, ()),
    "accelerate.commands.launch": (ACCELERATE, ()),
    "torchrun": (TORCHRUN, ()),
    "torch.distributed.run": (TORCHRUN, ()),
    "torch.distributed.launch": (TORCHRUN, ()),
}


@dataclass(frozen=True)
class Launch:
    """One launcher's command line.

    Args:
        command: the whole command.
        options_at: where its own options begin.
        processes: how many it starts on this machine; None where the command does not say.
        is_default: the command leaves the number to the launcher's default, a process for each GPU.
        machines: how many machines take part.
        engine: one of `settings.ENGINES` that the parameters are given to.
    """

    command: tuple[str, ...]
    options_at: int
    processes: int | None
    is_default: bool = False
    machines: int = 1
    engine: str | None = None

    @property
    def option(self) -> str:
        """The option that gives one process to each machine."""
        return f"--num_processes {self.machines}"

    def with_one_process(self) -> list[str]:
        """The command with `option`; for a launch whose number is the default."""
        return [*self.command[: self.options_at], *self.option.split(), *self.command[self.options_at :]]


def launch_of(command: Sequence[str]) -> Launch | None:
    """What `command` starts, if it is `accelerate launch` or torchrun, by name or through `python -m`."""
    program = program_at(command)
    place = _place_of_script(command, program) if is_python(command[program]) else program
    if place is None:
        return None
    source, first = LAUNCHERS.get(Path(command[place]).name, (None, ()))
    at = place + 1 + len(first)
    if source is None or tuple(command[place + 1 : at]) != first:
        return None
    root = SourceTree.of_installed(source[0]).root
    file = root / source[1] if root is not None else None
    if file is None or not file.is_file():
        return None
    given = dict(_given(command[at:], _options(ast.parse(file.read_text(encoding="utf-8")))))
    return _accelerate(command, at, given) if source is ACCELERATE else _torchrun(command, at, given)


def _place_of_script(command: Sequence[str], python: int) -> int | None:
    """Where a command whose word of that place is `python` names its script, or its module behind -m."""
    rest = iter(range(python + 1, len(command)))
    for place in rest:
        if command[place] == "-c":
            return None
        if command[place] == "-m":
            return next(rest, None)
        if command[place] in ("-W", "-X"):
            next(rest, None)
        elif not command[place].startswith("-"):
            return place
    return None


def _options(tree: ast.AST) -> dict[str, bool]:
    """Every option of an argparse parser in the source, and whether it takes a value."""
    options: dict[str, bool] = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            action = next((keyword.value for keyword in call.keywords if keyword.arg == "action"), None)
            name = getattr(action, "value", getattr(action, "id", None))  # "store_true", or a class
            names = (str(argument.value) for argument in call.args if isinstance(argument, ast.Constant))
            options |= {_normal(option): name not in FLAGS for option in names if option.startswith("-")}
    return options


def _given(arguments: Sequence[str], options: Mapping[str, bool]) -> Iterator[tuple[str, str]]:
    """The launcher's own options on the command line, with their values; the script ends them."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            return
        name, equals, value = argument.partition("=")
        name = _normal(name)
        if not equals and options.get(name, False):
            value = next(rest, "")
        yield name, value


def _normal(option: str) -> str:
    return "--" + option[2:].replace("-", "_") if option.startswith("--") else option


def _accelerate(command: Sequence[str], at: int, given: Mapping[str, str]) -> Launch:
    config = {} if "--cpu" in given and "--config_file" not in given else _config(given.get("--config_file"))
    launch = partial(Launch, tuple(command), at, engine=_engine(given, config))
    machines = _whole(given.get("--num_machines", config.get("num_machines"))) or 1
    total = _whole(given.get("--num_processes", config.get("num_processes")))
    if total is None and "--multi_gpu" in given:
        total = max(gpus.in_sight() or 2, 2)  # accelerate takes no less with this option
    elif total is None and config:
        total = machines if config.get("distributed_type") == "NO" else None  # accelerate asks for the number
    elif total is None:
        return launch(None, is_default="--tpu" not in given, machines=machines)
    return launch(-(-total // machines) if total else None, machines=machines)


def _engine(given: Mapping[str, str], config: Mapping[str, Any]) -> str | None:
    """What accelerate gives the parameters to: the command says it, else the configuration."""
    if "--cpu" in given:
        return None
    kinds = ("--multi_gpu", "--tpu", "--use_megatron_lm")
    named = next((name for name in settings.ENGINES if f"--use_{name.lower()}" in given), None)
    if named is not None or any(kind in given for kind in kinds):
        return named
    return next((name for name in settings.ENGINES if config.get("distributed_type") == name.upper()), None)


def _config(path: str | None) -> dict[str, Any]:
    """accelerate's configuration file: the one named, else the one that `accelerate config` wrote."""
    import yaml

    file = Path(path) if path is not None else settings.accelerate_config()
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}  # accelerate itself says what is wrong with it
    return found if isinstance(found, dict) else {}


def _torchrun(command: Sequence[str], at: int, given: Mapping[str, str]) -> Launch:
    named = given.get("--nproc_per_node", settings.foreign().get("PET_NPROC_PER_NODE", "1"))
    return Launch(tuple(command), at, gpus.in_sight() if named in ("gpu", "auto") else _whole(named))


def _whole(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() and int(text) > 0 else None
