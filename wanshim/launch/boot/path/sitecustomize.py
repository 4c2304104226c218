"""Python imports this at start-up because `wanshim run` put its folder first on PYTHONPATH.

It activates wanshim, then gives way to the sitecustomize that would have run without it.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator

HERE = os.path.dirname(os.path.abspath(__file__))
# What every installation of wanshim has in this folder, and nobody else's start-up has: another wanshim's would
# give way to this one, and this one to it, for ever.
OWN = os.path.join("wanshim", "launch", "boot", "path")
# Written in Python, and of an installation of their own: they start the Python of the project.
PROJECT_TOOLS = ("conda", "hatch", "pdm", "pipenv", "poetry")


def _activate() -> None:
    """A program starts although wanshim cannot, except where WANSHIM_STRICT is set, the launch contradicts what the
    user named, or it is a rank of `wanshim run --gpus`, which would train by itself."""
    expected = os.environ.get("WANSHIM_RUN_PREFIX", sys.prefix)
    is_own = os.path.realpath(expected) == os.path.realpath(sys.prefix)  # one environment may have several names
    if not is_own and _script() in PROJECT_TOOLS:
        return
    try:
        if not is_own:
            text = f"`wanshim run` belongs to the Python of {expected}, this is {sys.prefix}"
            raise RuntimeError(f"{text}: install wanshim here, and start its own `wanshim run`")
        from wanshim import activation, hand_over
        from wanshim.launch.boot import launchers, loops, rank

        rank.enter()
        if hand_over.is_rank():
            rank.leave_job_at_exit()  # behind the report, whose exit handler comes later
        loops.watch()
        launchers.watch()  # first: what a feature puts over the same functions is found in its place
        with _beside_program():
            activation.activate(hand_over.inherited())
        if hand_over.is_rank():
            from wanshim.launch.boot import made_folders

            rank.record_failure()
            made_folders.share()
    except Exception as error:
        if sys.stderr is not None:  # `print` to a closed one goes to standard output
            text = f"wanshim: not active in process {os.getpid()}: {type(error).__name__}: {error}"
            print(text, file=sys.stderr, flush=True)
        if _is_strict() or _is_rank() or type(error).__name__ == "FeatureUnavailable":
            os._exit(2)  # Python reports an exception of this module and goes on; nothing of the program has run yet
        _say_reached()


@contextlib.contextmanager
def _beside_program() -> Iterator[None]:
    """Python puts the folder of what it runs first on sys.path after this module: a framework that lies there is the
    one that the program imports."""
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        yield
        return
    folder = sys.argv[0] if os.path.isdir(sys.argv[0]) else ""  # of -c, -m and standard input: the current one
    if os.path.isfile(sys.argv[0]):
        folder = os.path.dirname(os.path.realpath(sys.argv[0]))
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _script() -> str:
    """The name of what this Python runs, behind its options."""
    return os.path.basename(next((word for word in sys.orig_argv[1:] if not word.startswith("-")), ""))


def _is_strict() -> bool:
    """As `wanshim.settings` reads it, which may be what could not be imported. WANSHIM_DISABLE comes first."""
    no = ("", "0", "false", "no", "off")
    strict, disable = (os.environ.get(name, "").strip().lower() for name in ("WANSHIM_STRICT", "WANSHIM_DISABLE"))
    return strict not in no and disable in no


def _is_rank() -> bool:
    """Whether this process may be the program of a rank: no Python with wanshim has started it."""
    return "WANSHIM_RUN_RANK" in os.environ and "WANSHIM_INHERITED" not in os.environ


def _say_reached() -> None:
    """To `wanshim run`, which need not say at its end that wanshim is not here: this process has just said why."""
    if failure := os.environ.get("WANSHIM_RUN_FAILURE"):
        with contextlib.suppress(OSError):
            open(f"{failure}.reached", "a").close()


def _is_a_boot_folder(path: str) -> bool:
    try:
        real = os.path.realpath(path or os.curdir)
    except OSError:  # a relative one, and the working directory was deleted
        return False
    return real == os.path.realpath(HERE) or real.endswith(os.sep + OWN)


def _run_the_users_own() -> None:
    elsewhere = [path for path in sys.path if not _is_a_boot_folder(path)]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_activate()
_run_the_users_own()
