"""What wanshim costs: import and activate in time and memory, and a call through each kind of seam.

python benchmarks/overhead.py

rewrites benchmarks/results/overhead.json; `make docs` puts it into docs/measured/overhead.md.

Import and activate are measured in fresh interpreters, the peers (`import wrapt`, `import yaml`) beside them. Memory is
what Linux reports of that process before and after (VmRSS, and its peak VmHWM): a child inherits `ru_maxrss` from its
parent. A call is timed against the same call unpatched, in one process: the difference is what a seam adds. Elapsed
time is the median, on a machine as busy as the load says. CPU time is the least of all runs, which other processes
disturbed least.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import timeit
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkout

import wanshim
from wanshim.patching import Kind, Seam, SeamState, transaction
from wanshim.select import catalog

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "overhead.json"
# What is measured, and what runs before it, unmeasured.
STARTS = {
    "import wanshim": ("import wanshim", ""),
    "activate('none')": ("wanshim.activate('none')", "import wanshim"),
    "activate()": ("wanshim.activate()", "import wanshim"),
    "activate('all')": ("wanshim.activate('all')", "import wanshim"),
    # What the first decision adds, when the framework is imported or a report is read.
    "matrix.load()": ("from wanshim import matrix; matrix.load()", "import wanshim; wanshim.activate()"),
    "import wrapt": ("import wrapt", ""),
    "import yaml": ("import yaml", ""),
}
MEASURED = """
import time

def kibibytes():
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            found = dict(line.split(":", 1) for line in status)
    except OSError:
        return None
    return [int(found[name].split()[0]) for name in ("VmRSS", "VmHWM")]

{before}
kibibytes()
at_first = kibibytes()
begin, cpu = time.perf_counter(), time.process_time()
{code}
elapsed, spent, after = time.perf_counter() - begin, time.process_time() - cpu, kibibytes()
import json
print(json.dumps([elapsed, spent, at_first and [b - a for a, b in zip(at_first, after)]]))
"""
SOURCE = """
class Block:
    def method(self, x):
        return x

    def graph(self, x):
        return x

    def stacked(self, x):
        return x

    def host(self, x):
        return x

def function(x):
    return x

LIST = ["a"]
block = Block()
"""
NUMBER = 100_000


def in_fresh_interpreters(code: str, before: str, repeats: int) -> dict[str, float | None]:
    """Over `repeats` interpreters: median elapsed and least CPU milliseconds, median growth of the resident memory and
    of its peak in KiB; None without /proc."""
    # The first start compiles what has no bytecode yet, and is left out.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", MEASURED.format(before=before, code=code)]
    runs = []
    for _ in range(repeats + 1):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        runs.append(json.loads(done.stdout))
    times, memory = runs[1:], [run[2] for run in runs[1:] if run[2] is not None]
    return {
        "wall_ms": 1e3 * statistics.median(run[0] for run in times),
        "cpu_ms": 1e3 * min(run[1] for run in times),
        "resident_KiB": statistics.median(m[0] for m in memory) if memory else None,
        "peak_KiB": statistics.median(m[1] for m in memory) if memory else None,
    }


def closure(original: Any, seam: SeamState) -> Any:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        return original(*args, **kwargs)

    return replacement


def in_graph(original: Any, seam: SeamState) -> Any:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not seam.enter_graph():
            return original(*args, **kwargs)
        return original(*args, **kwargs)

    return replacement


def value(original: Any, seam: SeamState) -> Any:
    return [*original, "b"]


def toy_seam(name: str, replace: Any, kind: Kind = Kind.CLOSURE, **flags: bool) -> Seam:
    return Seam(f"toytarget:{name}", replace, "measured", "", "", kind, **flags)


# name -> (the call, the seams put in one over the other, the kind as `kinds_of` names it)
CALLS = {
    "closure on a method": ("block.method(1)", [toy_seam("Block.method", closure)], "closure on a method"),
    "closure on a function": ("function(1)", [toy_seam("function", closure)], "closure on a function"),
    "closure in a graph, called eagerly": (
        "block.graph(1)",
        [toy_seam("Block.graph", in_graph, in_graph=True)],
        "closure in a graph",
    ),
    "two features on one method": (
        "block.stacked(1)",
        [toy_seam("Block.stacked", closure, Kind.WRAPT), toy_seam("Block.stacked", closure, Kind.WRAPT, stacks=True)],
        "wrapt that stacks",
    ),
    "two features on one function": (
        "function(1)",
        [toy_seam("function", closure), toy_seam("function", closure, stacks=True)],
        "closure that stacks",
    ),
    "value": ("'a' in LIST", [toy_seam("LIST", value, Kind.VALUE)], "value"),
    "wrapt on a method": ("block.host(1)", [toy_seam("Block.host", closure, Kind.WRAPT)], "wrapt"),
}
NEEDS = {
    "closure in a graph, called eagerly": "torch",
    "two features on one method": "wrapt",
    "wrapt on a method": "wrapt",
}


def make_target() -> types.ModuleType:
    module = types.ModuleType("toytarget")
    module.__file__ = "toytarget.py"
    exec(compile(SOURCE, "toytarget.py", "exec"), vars(module))
    sys.modules["toytarget"] = module
    return module


def nanoseconds(statement: str, names: dict[str, Any], repeats: int) -> dict[str, float]:
    """A call's median elapsed and least CPU time."""
    timer = timeit.Timer(statement, globals=names)
    wall, cpu = [], []
    for _ in range(repeats):
        begin = time.process_time()
        wall.append(timer.timeit(NUMBER))
        cpu.append(time.process_time() - begin)
    return {"wall_ns": statistics.median(wall) / NUMBER * 1e9, "cpu_ns": min(cpu) / NUMBER * 1e9}


def seam_costs(repeats: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each kind of seam: a call plain, patched and unpatched again, and how many seams of the adapters are of it."""
    names = vars(make_target())
    used = Counter(kind for feature in catalog.discover().features.values() for kind in kinds_of(feature.seams))
    for name, (statement, seams, kind) in CALLS.items():
        package = NEEDS.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            print(f"{name}: not measured, {package} is not installed")
            continue
        if package is not None:
            importlib.import_module(package)
        plain = nanoseconds(statement, names, repeats)
        states = [SeamState(seam) for seam in seams]
        for state in states:
            transaction.put_in([state])
        patched = nanoseconds(statement, names, repeats)
        for state in reversed(states):
            transaction.take_out(state)
        again = nanoseconds(statement, names, repeats)
        yield name, {"used by": used[kind], "plain": plain, "patched": patched, "off again": again}


def kinds_of(seams: tuple[Seam, ...]) -> Iterator[str]:
    for seam in seams:
        place = "method" if "." in seam.qualname else "function"
        yield f"closure on a {place}" if seam.kind is Kind.CLOSURE else seam.kind.value
        if seam.in_graph:
            yield f"{seam.kind.value} in a graph"
        if seam.stacks:
            yield f"{seam.kind.value} that stacks"


def measure(repeats: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    return {
        "driver": "python benchmarks/overhead.py",
        "wanshim": wanshim.__version__,
        **checkout.state(),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "repeats": repeats,
        "start": {name: in_fresh_interpreters(*snippet, repeats) for name, snippet in STARTS.items()},
        "seams": dict(seam_costs(repeats)),
        "load": {"before": load, "after": os.getloadavg()[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    result = measure(options.repeats)
    for name, cost in result["start"].items():
        memory = "no /proc" if cost["resident_KiB"] is None else f"{cost['resident_KiB']:.0f} KiB"
        print(f"{name:<36} {cost['wall_ms']:7.1f} ms, {cost['cpu_ms']:.1f} of CPU, {memory}")
    for name, cost in result["seams"].items():
        parts = [f"{part} {cost[part]['wall_ns']:.0f}/{cost[part]['cpu_ns']:.0f}" for part in PARTS]
        print(f"{name:<36} {', '.join(parts)} ns (elapsed/CPU), used by {cost['used by']}")
    print(f"load {result['load']['before']:.1f} to {result['load']['after']:.1f}")
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


PARTS = ("plain", "patched", "off again")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    names = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
