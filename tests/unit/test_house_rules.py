"""Rules of the code that no linter knows, read from its source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted(path for room in ("adapters", "wanshim") for path in (ROOT / room).rglob("*.py"))
CORE = [path for path in SOURCES if path.is_relative_to(ROOT / "wanshim" / "core")]

# Where the environment is read, once a call, and why there. What is below takes the settings, or one of them.
ENTRY_POINTS = {
    "wanshim/activation.py:_activate": "activation, which hands them to each seam",
    "wanshim/launch/gpu_processes.py:_read": "the commands `wanshim run`, `wanshim doctor` and `wanshim generate`",
    "wanshim/cli/monitor.py:_serve": "a command",
    "wanshim/pipelines.py:parallelize_pipeline": "a call of the user's, which no activation preceded",
}

# What torch computes with a random generator, unless it is given one, and layers, which draw their weights.
DRAWS = {
    "bernoulli",
    "bernoulli_",
    "exponential_",
    "log_normal_",
    "multinomial",
    "normal",
    "normal_",
    "rand",
    "rand_like",
}
DRAWS |= {"randint", "randint_like", "randn", "randn_like", "random_", "randperm", "uniform_"}
LAYERS = {"Bilinear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "Linear", "MultiheadAttention"}
OWN_PROGRAMS = ("wanshim/cli/", "wanshim/demo/")  # no program's code runs in these processes

# A switch is a variable, an option of a command line, or the launcher that takes it.
SWITCH = re.compile(r"WANSHIM_|\baccelerate launch\b|\btorchrun\b|(?<![\w-])--[a-z][a-z0-9_-]+")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def untyped_calls(source: str) -> list[str]:
    """Functions that take a framework's call as a bare dictionary, `arguments: dict[str, Any]`."""
    found = []
    for function in functions(ast.parse(source)):
        for parameter in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
            kind = ast.unparse(parameter.annotation) if parameter.annotation is not None else ""
            if parameter.arg in ("arguments", "args") and kind.startswith(("dict", "Mapping", "MutableMapping")):
                found.append(f"{function.name}({parameter.arg})")
    return found


def readers(source: str) -> Counter[str]:
    """How often each function calls `settings.read()`, counted in the innermost one."""
    found: Counter[str] = Counter()

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("settings.read", "wanshim.settings.read"):
            found[function] += 1
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "module")
    return found


def draws(source: str) -> list[str]:
    """Calls that would take numbers from the generators of the program."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        owner = ast.unparse(node.func.value)
        is_layer = node.func.attr in LAYERS and owner in ("nn", "torch.nn") and given.get("device") != "'meta'"
        if is_layer or (node.func.attr in DRAWS and "generator" not in given and owner != "random"):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_number_is_drawn_from_the_generators_of_the_program() -> None:
    assert len(draws("torch.randn(3)\nx.normal_()\nnn.Linear(1, 1, device=device)")) == 3
    names = {path.relative_to(ROOT).as_posix(): path for path in SOURCES}
    found = {name: draws(path.read_text()) for name, path in names.items() if not name.startswith(OWN_PROGRAMS)}
    assert {name: each for name, each in found.items() if each} == {}


def test_no_function_takes_a_frameworks_call_as_a_bare_dictionary() -> None:
    found = {path.relative_to(ROOT).as_posix(): untyped_calls(path.read_text()) for path in SOURCES}
    assert {name: each for name, each in found.items() if each} == {}


def test_settings_are_read_once_in_each_entry_point_and_nowhere_else() -> None:
    found: Counter[str] = Counter()
    for path in SOURCES:
        source = path.read_text()
        assert "settings import read" not in source, f"{path} reads settings under another name"
        found.update({f"{path.relative_to(ROOT).as_posix()}:{name}": n for name, n in readers(source).items()})
    assert found == dict.fromkeys(ENTRY_POINTS, 1)


def test_core_names_no_variable_no_option_and_no_launcher() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in CORE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in SWITCH.finditer(line)
    ]
    assert named == []


def test_each_topic_of_an_error_of_core_has_advice_and_each_advice_a_topic() -> None:
    from wanshim.errors import ADVICE

    used = {name for path in CORE for name in re.findall(r"\btopic ?= ?\"(\w+)\"", path.read_text())}
    assert used == set(ADVICE)


@pytest.mark.parametrize(
    "text", ["set WANSHIM_PLAN", "by accelerate launch", "torchrun", "--use_x", "pass --fp8", "raise --shm-size"]
)
def test_a_switch_is_recognised(text: str) -> None:
    assert SWITCH.search(text)


@pytest.mark.parametrize("text", ["as accelerate does it", "# ---- stages", "a--b", "x -> y", "steps - -1"])
def test_plain_text_is_no_switch(text: str) -> None:
    assert not SWITCH.search(text)


def test_a_bare_dictionary_and_a_second_reading_are_recognised() -> None:
    assert untyped_calls("def plan(arguments: dict[str, Any]): ...") == ["plan(arguments)"]
    assert readers("def launch():\n    settings.read()\n    settings.read()") == {"launch": 2}


def test_no_test_file_is_imported_from_another() -> None:
    """What several use lies in a module of its own."""
    imported = re.compile(
        r"^\s*from (tests[\w.]*\.|\.+)(test_\w+) import|^\s*from tests[\w.]* import .*\btest_", re.MULTILINE
    )
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 150
    found = [path.name for path in files if imported.search(path.read_text(encoding="utf-8"))]
    assert found == []


ONCE = re.compile(r"\b(fcntl|os\.replace|pynvml|prctl|pidfd\w*)\b")  # a lock, a whole file, a GPU, a parent's death


def test_locks_whole_files_gpus_and_the_end_of_processes_are_in_core_shared_alone() -> None:
    shared = ROOT / "wanshim" / "core" / "shared"
    found = {
        path.relative_to(ROOT).as_posix(): sorted(set(ONCE.findall(path.read_text())))
        for path in SOURCES
        if not path.is_relative_to(shared)
    }
    assert {name: words for name, words in found.items() if words} == {}


MAKERS = re.compile(r"init_process_group|new_group|(Hash|File|TCP|Prefix)Store|ProcessGroup(Gloo|NCCL)")

# Groups and stores made outside core/ranks. The demo starts ranks of its own, as a framework does.
MADE_ELSEWHERE = {
    "adapters/diffsynth/splitting/data_parallel.py": ["new_group"],  # for accelerate's own collectives
    "wanshim/demo/decode.py": ["init_process_group"],
    "wanshim/demo/meeting.py": ["TCPStore"],
}


def made(source: str) -> list[str]:
    """The groups and stores of torch.distributed that a file makes, by what it calls."""
    calls = (ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [name for name in (call.rpartition(".")[2] for call in calls) if MAKERS.fullmatch(name)]


def test_groups_and_stores_are_made_in_core_ranks_alone() -> None:
    ranks = ROOT / "wanshim" / "core" / "ranks"
    found = {
        path.relative_to(ROOT).as_posix(): made(path.read_text()) for path in SOURCES if not path.is_relative_to(ranks)
    }
    assert {name: calls for name, calls in found.items() if calls} == MADE_ELSEWHERE


def test_a_group_and_a_store_are_recognised() -> None:
    source = 'store = dist.PrefixStore("x", FileStore("y", -1))\npeers = dist.ProcessGroupNCCL(store, 0, 2)'
    assert sorted(made(source)) == ["FileStore", "PrefixStore", "ProcessGroupNCCL"]
    assert made("group = dist.ProcessGroup | None\nnew_group = join(group)") == []
