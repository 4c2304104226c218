"""Which processes wanshim would not reach from here, and what to do: a table of findings, each with its probe."""

from __future__ import annotations

import os
import site
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path

from packaging.version import Version

from wanshim import settings
from wanshim.patching.probe import SourceTree
from wanshim.select.decision import installed_version

PLUGIN = "wanshim"  # the entry point's name in both groups, which VLLM_PLUGINS goes by
STAGE_PROCESS = "vllm_omni.diffusion.stage_diffusion_proc"
RAY_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # noqa: S108 - Ray writes it there
RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the runtime environment of `ray job submit`, as JSON
LOADERS = ("load_omni_general_plugins", "load_general_plugins")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The facts that the probes look at; `here()` fills them in, a test by hand."""

    variables: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # of vllm and vllm_omni, where installed
    stage_process: str | None = None  # the source of vLLM-Omni's stage process, where it has one
    in_user_site: bool = False  # whether wanshim itself is installed there
    ray_cluster: str = ""  # the address of a running cluster that Ray would join; "" where it starts its own
    skipping_option: str = ""  # of this interpreter, handed on to spawned children: -I, -E or -S


@dataclass(frozen=True)
class Finding:
    """Processes that would run unpatched: which, why, and the remedy."""

    name: str
    found: str
    advice: str


def findings(environment: Environment | None = None) -> tuple[Finding, ...]:
    """Everything in the table that holds here."""
    environment = here() if environment is None else environment
    probed = ((name, probe(environment), advice) for name, (probe, advice) in TABLE.items())
    return tuple(Finding(name, found, advice) for name, found, advice in probed if found)


def here() -> Environment:
    """This environment. Nothing is imported; sources are read as text."""
    found = {name: installed_version(name) for name in ("vllm", "vllm_omni")}
    versions = {name: version for name, version in found.items() if version is not None}
    own = Path(__file__).resolve()
    return Environment(
        variables=settings.foreign(),
        versions=versions,
        stage_process=stage_process_of(SourceTree.of_installed("vllm_omni")) if "vllm_omni" in versions else None,
        in_user_site=own.is_relative_to(Path(site.getusersitepackages()).resolve()),
        ray_cluster=_ray_cluster() if util.find_spec("ray") is not None else "",
        skipping_option=_skipping_option(),
    )


def _skipping_option() -> str:
    """The option with which this Python reads no sitecustomize from PYTHONPATH; "" without one."""
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-S": sys.flags.no_site}
    return next((option for option, is_set in flags.items() if is_set), "")


def _ray_cluster() -> str:
    """The cluster to which `ray.init()` would go: RAY_ADDRESS, else the one that `ray start` left running here."""
    if settings.foreign().get("RAY_ADDRESS"):
        return settings.foreign()["RAY_ADDRESS"]
    try:
        return _first_line(RAY_CURRENT_CLUSTER)
    except OSError:
        return ""


def _first_line(path: Path) -> str:
    """The first line of a file that anybody on this machine could have made: no pipe is waited for, no link is
    followed, and no terminal escape is passed on."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        line = os.read(descriptor, 256) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)
    return "".join(filter(str.isprintable, line.decode("ascii", "ignore").partition("\n")[0])).strip()


def stage_process_of(source: SourceTree) -> str | None:
    """The text of the module that is vLLM-Omni's stage process; None where there is none."""
    file = source.file_of(STAGE_PROCESS)
    return None if file is None else file.read_text(encoding="utf-8")


def _hidden_by_vllm_plugins(seen: Environment) -> str:
    allowed = seen.variables.get("VLLM_PLUGINS")
    if "vllm_omni" not in seen.versions or allowed is None or PLUGIN in allowed.split(","):
        return ""
    return f"VLLM_PLUGINS={allowed!r} is a list of the only plugins that vLLM's workers load, and wanshim is not on it"


def _vllm_of_another_release(seen: Environment) -> str:
    vllm, omni = seen.versions.get("vllm"), seen.versions.get("vllm_omni")
    if omni is None:
        return ""
    if vllm is None:
        return f"vllm-omni {omni} is installed without vllm, and does not require it by itself"
    if Version(vllm).release[:2] == Version(omni).release[:2]:
        return ""
    return f"vllm {vllm} and vllm-omni {omni} do not belong together; vllm-omni only warns of it"


def _stage_process_loads_no_plugins(seen: Environment) -> str:
    if seen.stage_process is None or any(name in seen.stage_process for name in LOADERS):
        return ""
    return f"{STAGE_PROCESS} of vllm-omni {seen.versions.get('vllm_omni')} loads no plugins"


def _user_site_is_off(seen: Environment) -> str:
    if not (seen.in_user_site and seen.variables.get("PYTHONNOUSERSITE")):
        return ""
    return "PYTHONNOUSERSITE is set and wanshim is installed in the user site: no child can import it"


def _ray_workers_have_no_hook(seen: Environment) -> str:
    config = seen.variables.get(RAY_JOB_CONFIG, "")
    if not seen.ray_cluster or "wanshim" in config:
        return ""
    hook = (
        "another worker_process_setup_hook" if "worker_process_setup_hook" in config else "no setup hook of wanshim's"
    )
    return f"workers of the Ray cluster at {seen.ray_cluster} do not get this environment, and there is {hook}"


def _interpreter_skips_sitecustomize(seen: Environment) -> str:
    if not seen.skipping_option:
        return ""
    return f"this Python runs with {seen.skipping_option}, as its spawned children will: it reads no sitecustomize"


# name -> (probe: a sentence where it holds, else nothing; what to do)
TABLE: Mapping[str, tuple[Callable[[Environment], str], str]] = {
    "vllm_plugins_hides_wanshim": (_hidden_by_vllm_plugins, "Add wanshim to VLLM_PLUGINS, or unset it"),
    "vllm_of_another_release": (_vllm_of_another_release, "Install vllm and vllm-omni of the same major and minor"),
    "stage_process_loads_no_plugins": (
        _stage_process_loads_no_plugins,
        "Start the service with `wanshim run -- ...`, which reaches every Python child",
    ),
    "user_site_is_off": (_user_site_is_off, "Install wanshim into the environment, or unset PYTHONNOUSERSITE"),
    "ray_workers_have_no_hook": (
        _ray_workers_have_no_hook,
        'Give ray.init runtime_env={"worker_process_setup_hook": "wanshim.launch.boot.plugin.activate_in_worker", '
        '"env_vars": {"WANSHIM_FEATURES": ...}}, call it from your own hook, or start the nodes with '
        "`wanshim run -- ray start`",
    ),
    "interpreter_skips_sitecustomize": (
        _interpreter_skips_sitecustomize,
        "Leave the option out, or call wanshim.activate() in the program and in each child",
    ),
}
