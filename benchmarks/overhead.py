"""What wanshim costs: import and activate time, a call through each kind of seam, memory.

python benchmarks/overhead.py --output benchmarks/results/overhead.json

Import and activate are timed in fresh interpreters, the peers (`import wrapt`, `import yaml`) beside them. A call
is timed against the same function unpatched, in one process: the difference is what a seam adds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import timeit
import types
from pathlib import Path
from typing import Any

import wanshim
from wanshim.patching import Kind, Seam, SeamState, transaction

SNIPPETS = {
    "import wanshim": "import wanshim",
    "activate()": "import wanshim; begin = now(); cpu = time.process_time(); wanshim.activate()",
    "activate('all')": "import wanshim; begin = now(); cpu = time.process_time(); wanshim.activate('all')",
    "import wrapt": "import wrapt",
    "import yaml": "import yaml",
}
TIMED = """
import time, resource, sys
now = time.perf_counter
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = now()
cpu = time.process_time()
{code}
print(now() - begin, time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
SOURCE = """
class Block:
    def forward(self, x):
        return x

    def bound(self, x):
        return x

    def host(self, x):
        return x

def function(x):
    return x

LIST = ["a"]
"""


def in_fresh_interpreters(code: str, repeats: int) -> dict[str, float]:
    """Over `repeats` interpreters: median elapsed milliseconds, the least of the CPU, which others on the machine
    disturb least, and the median KiB by which the peak grew."""
    # Installed packages are compiled; the first start compiles what is not, and counts for nothing.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = []
    for _ in range(repeats + 1):
        command = [sys.executable, "-c", TIMED.format(code=code)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        runs.append(done.stdout.split())
    del runs[0]
    return {
        "milliseconds": 1e3 * statistics.median(float(run[0]) for run in runs),
        "cpu_milliseconds": 1e3 * min(float(run[1]) for run in runs),
        "KiB": statistics.median(int(run[2]) for run in runs),
    }


def closure(original: Any, seam: SeamState) -> Any:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        return original(*args, **kwargs)

    return replacement


def bound(original: Any, seam: SeamState) -> Any:
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        return original(*args, **kwargs)

    return replacement


def through_wrapt(original: Any, seam: SeamState) -> Any:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seam.enter()
        return wrapped(*args, **kwargs)

    return wrapper


def make_target() -> types.ModuleType:
    module = types.ModuleType("toytarget")
    module.__file__ = "toytarget.py"
    exec(compile(SOURCE, "toytarget.py", "exec"), vars(module))
    module.block = module.Block()  # type: ignore[attr-defined]
    sys.modules["toytarget"] = module
    return module


def nanoseconds(call: Any, repeats: int) -> float:
    number = 200_000
    timer = time.process_time  # of the CPU: a busy machine does not lengthen it
    return min(timeit.repeat(lambda: call(1), timer=timer, number=number, repeat=repeats)) / number * 1e9


def seam_costs(repeats: int) -> dict[str, dict[str, float]]:
    """Plain, patched and unpatched again, nanoseconds a call."""
    module: Any = make_target()
    kinds = {
        "closure on a method": (
            Seam("toytarget:Block.forward", closure, "w", "u", "r"),
            lambda x: module.block.forward(x),
        ),
        "closure on a function": (Seam("toytarget:function", closure, "w", "u", "r"), lambda x: module.function(x)),
        "bound on an instance": (
            Seam("toytarget:block.bound", bound, "w", "u", "r", Kind.BOUND),
            lambda x: module.block.bound(x),
        ),
        "wrapt on a method": (
            Seam("toytarget:Block.host", through_wrapt, "w", "u", "r", Kind.WRAPT),
            lambda x: module.block.host(x),
        ),
    }
    result = {}
    for name, (seam, call) in kinds.items():
        plain = nanoseconds(call, repeats)
        state = SeamState(seam)
        transaction.put_in([state])
        patched = nanoseconds(call, repeats)
        transaction.take_out(state)
        again = nanoseconds(call, repeats)
        result[name] = {"plain": plain, "patched": patched, "added": patched - plain, "off again": again}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "driver": "python benchmarks/overhead.py",
        "wanshim": wanshim.__version__,
        "commit": commit,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "start": {name: in_fresh_interpreters(code, options.repeats) for name, code in SNIPPETS.items()},
        "repeats": options.repeats,
        "load": os.getloadavg()[0],
        "seams_ns": seam_costs(options.repeats),
    }
    for name, cost in result["start"].items():
        print(
            f"{name:<24} {cost['milliseconds']:7.1f} ms ({cost['cpu_milliseconds']:.1f} of CPU), {cost['KiB']:.0f} KiB"
        )
    for name, cost in result["seams_ns"].items():
        line = ", ".join(f"{key} {value:.0f} ns" for key, value in cost.items())
        print(f"{name:<24} {line}")
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores"


if __name__ == "__main__":
    main()
