"""The number of processes that a launcher has resolved, looked at before it starts them.

torchrun and whatever stands on it, accelerate's launcher for several GPUs and `notebook_launcher` among them, end in
`launch_agent`. accelerate makes the variables of what it starts, one process or several, in functions of
`accelerate.utils.launch`. So no command line is read, and no wrapper hides one.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from wanshim import activation, hand_over, settings
from wanshim.errors import FeatureUnavailable
from wanshim.launch.boot.rank import refusal, refuse
from wanshim.patching.hooks import ImportHook
from wanshim.process_report import say

AGENT, ACCELERATE, STORE = "torch.distributed.launcher.api", "accelerate.utils.launch", "torch.distributed.rendezvous"
JOB = "torch.distributed.distributed_c10d"
OF_ACCELERATE = ("prepare_simple_launcher_cmd_env", "prepare_multi_gpu_env", "prepare_deepspeed_cmd_env")
OFF = ("", "0", "no", "false", "none", "default")  # values of a variable that says nothing
THREADS = ("OMP_", "KMP_")  # which `wanshim run --gpus` sets by itself
_hook = ImportHook()
Call = Callable[..., Any]


def watch() -> None:
    """Wrap the functions when their modules are imported."""
    rank = hand_over.run_rank()
    names = [AGENT, ACCELERATE, *([STORE, JOB] if rank else []), *(["accelerate"] if rank and rank[0] == 0 else [])]
    _hook.watch(names, _imported)


def _imported(module: ModuleType) -> None:
    import wrapt

    wrappers: dict[str, tuple[tuple[str, ...], Call]] = {
        AGENT: (("launch_agent",), _start_agent),
        ACCELERATE: (OF_ACCELERATE, _prepare_accelerate),
        STORE: (("_create_c10d_store", "TCPStore"), _make_store),
        JOB: (("init_process_group",), _join),
    }
    if module.__name__ == "accelerate":
        _say_what_is_lost()
        return
    names, wrapper = wrappers[module.__name__]
    for name in names:
        if hasattr(module, name):
            wrapt.wrap_function_wrapper(module, name, wrapper)


def _start_agent(original: Call, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    count = (args[0] if args else kwargs["config"]).nproc_per_node
    if hand_over.is_rank():
        refuse(refusal(f"torch's launcher, which starts {_processes(count)} itself"))
    if (sentence := _why_not(count, settings.engine_of(launched=True))) is not None:
        refuse(sentence)
    return original(*args, **kwargs)


def _prepare_accelerate(original: Call, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = args[0] if args else kwargs["args"]
    if hand_over.is_rank():
        refuse(_why_not(1, _engine(given)) or _refusal_of_accelerate(given, original(*args, **kwargs)))
    machines = given.num_machines or 1
    processes = max(1, -(-(given.num_processes or 1) // machines))
    sentence = _why_not(processes, _engine(given))
    if sentence is not None and (_why_not(1, _engine(given)) is not None or not _is_default(given)):
        refuse(sentence)
    if sentence is not None:
        given.num_processes, one = machines, f"--num_processes {machines}"
        say(f"{one} added: accelerate would start a process for each GPU, and a split is one over all")
    return original(*args, **kwargs)


def _why_not(processes: int, engine: str | None) -> str | None:
    """Why so many processes of one machine cannot have what the user named, in words; None: they can."""
    read = activation.CURRENT.settings
    if read.disable:
        return None
    selection = activation.CURRENT.select(hand_over.inherited(), read)
    try:
        activation.CURRENT.check_launch(
            selection, replace(read, local_world_size=processes, local_rank=0, engine=engine)
        )
    except FeatureUnavailable as error:
        return str(error)
    return None


def _engine(given: Any) -> str | None:
    """One of `settings.ENGINES` that accelerate gives the parameters to."""
    if given.cpu:
        return None
    return next((name for name in settings.ENGINES if getattr(given, f"use_{name.lower()}", False)), None)


def _is_default(given: Any) -> bool:
    """Whether the number of processes is accelerate's own: neither the command nor a configuration gave it."""
    from accelerate.commands.config.config_args import default_config_file

    said: set[str] | None = getattr(given, "nondefault", None)  # accelerate before 0.22 does not know it
    configured = given.config_file is not None or (Path(default_config_file).is_file() and not given.cpu)
    return said is not None and not said & {"num_processes", "multi_gpu"} and not configured


def _refusal_of_accelerate(given: Any, prepared: Any) -> str:
    lost = _set_by(prepared)
    found = f"accelerate's launcher, which starts {_processes(given.num_processes or 1)} itself"
    return refusal(f"{found}{f' and {_in_words(lost)}' * bool(lost)}", _hint(lost))


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count != 1)}"


def _set_by(prepared: Any) -> dict[str, str]:
    """Variables that accelerate would set in the processes that it starts, beside their ranks and threads."""
    made: Mapping[str, str] = prepared[1] if isinstance(prepared, tuple) else prepared
    changed = {name: value for name, value in made.items() if settings.differs(name, value)}
    return {
        name: value
        for name, value in changed.items()
        if value.lower() not in OFF and not name.startswith((*THREADS, "MASTER_"))
    }


def _in_words(lost: Mapping[str, str]) -> str:
    return "sets " + ", ".join(f"{name.removeprefix('ACCELERATE_').lower()}={value}" for name, value in lost.items())


def _hint(lost: Mapping[str, str]) -> str:
    keep = "".join(f"{name}={value} " for name, value in lost.items())
    what = "Leave the launcher out, and keep what it sets" if lost else "Leave the launcher out"
    return f"{what}: {keep}wanshim run --gpus N -- python train.py"


def _say_what_is_lost() -> None:
    """A line on what the user's configuration of accelerate would set and a program without its launcher does not
    get, before anything is loaded."""
    from accelerate.commands.config.config_args import default_config_file

    if not Path(default_config_file).is_file():
        return
    with suppress(Exception, SystemExit):  # accelerate's launcher says best what is wrong with the file
        from accelerate.commands import launch

        args = launch._validate_launch_command(launch.launch_command_parser().parse_args(["train.py"]))[0]
        lost = _set_by(getattr(launch.prepare_simple_launcher_cmd_env, "__wrapped__")(args))  # noqa: B009
        if (engine := _engine(args)) is not None:
            lost[settings.ENGINES[engine]] = "true"
        if lost:
            keep = " ".join(f"{name}={value}" for name, value in lost.items())
            say(
                f"accelerate's configuration {_in_words(lost)}, which its launcher alone gives to a program; "
                f"{default_config_file} has no effect here. To have it: {keep} wanshim run"
            )


# The store of a job on this machine


def _make_store(original: Call, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's functions behind `init_process_group`: their store listens on the loopback address if that is where the
    ranks look for it, and a job has the ranks that `--gpus` says."""
    is_store = original.__name__ == "TCPStore"  # whose second two arguments are others
    named = ("host_name", "port", "world_size", "is_master") if is_store else ("hostname", "port", "rank", "world_size")
    given = {**dict(zip(named, args, strict=False)), **kwargs}
    if "rank" in given:
        _check_job(given["rank"], given.get("world_size"))
    if given.get("is_master") and _is_loopback(given["host_name"]):
        with suppress(OSError):  # this process listens there already
            return original(*args, **kwargs, master_listen_fd=_listen(given["host_name"], given["port"]))
    return original(*args, **kwargs)


def _join(original: Call, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's `init_process_group`, however its ranks meet: by a file, a store of the program's own, variables."""
    import torch.distributed as dist

    given = {**dict(zip(("backend", "init_method", "timeout", "world_size", "rank"), args, strict=False)), **kwargs}
    if given.get("backend") == "fake":  # a job of one process, which traces what many would do
        return original(*args, **kwargs)
    if "rank" in given and "world_size" in given:  # before it waits for the others
        _check_job(given["rank"], given["world_size"])
    made = original(*args, **kwargs)
    _check_job(dist.get_rank(), dist.get_world_size())
    return made


def _check_job(rank: int, size: int | None) -> None:
    """End a process that joins another job than that of `--gpus`."""
    if size is not None and size > 1 and (rank, size) != (hand_over.run_rank() or (0, 1)):
        refuse(refusal(f"what starts processes itself: one joined a job as rank {rank} of {size}"))


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _listen(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(1024)
        return server.detach()
