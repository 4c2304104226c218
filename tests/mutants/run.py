"""Breaks the code of a room in many small ways, by cosmic-ray, and lists which of them its tests do not see.

make mutants                        every room of rooms.toml
make mutants ROOM=offload           one room, or several: ROOM="offload streaming"
make mutants ROOM=offload SAMPLE=0  every mutant of it; by default a sample

Each room's score and survivors go into results/ROOM.yaml. A reason that a person gives a survivor there stays as long
as the same mutant survives. The code is mutated in a copy of the checkout. The exit status is 1 where a room's score is
below `LEAST`.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toml
import yaml
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RESULTS = HERE / "results"
LEAST = 0.85
LEAST_TIMEOUT_S = 30.0  # a mutant that hangs is killed by it; one that only passes slowly must not be
NO_REASON = "none given yet"
Place = tuple[int, int]  # line, column


@dataclass(frozen=True)
class Survivor:
    """A mutant that no test failed on: where, and the line without and with it."""

    file: str
    line: int
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.before, self.after


def run(name: str, room: Mapping[str, Any], settings: Mapping[str, Any], sample: int, seed: int) -> float:
    """Mutate and test one room, write its result, and return its score."""
    source: dict[str, Any] = {
        "commit": _git("rev-parse", "HEAD"),
        "clean_tree": not _git("status", "--porcelain", "--", *room["paths"], *room["tests"]),
    }
    with tempfile.TemporaryDirectory(prefix=f"mutants-{name}-") as folder:
        copy, session = Path(folder, "checkout"), Path(folder, "session.sqlite")
        copy_checkout(copy)
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
        command = [sys.executable, "-m", "pytest", *options, *room["tests"]]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        begin = time.monotonic()
        # The tests pass on the code as it is. Their run leaves bytecode for the others: cosmic-ray's write none.
        subprocess.run(command, cwd=copy, env={**environment, "PYTHONDONTWRITEBYTECODE": ""}, check=True)
        config = {
            "module-path": room["paths"],
            "timeout": LEAST_TIMEOUT_S + 3 * (time.monotonic() - begin),
            "excluded-modules": [],
            "test-command": shlex.join(command),
            "distributor": {"name": "local"},
        }
        (copy / "session.toml").write_text(toml.dumps({"cosmic-ray": config}), encoding="utf-8")

        def cosmic_ray(*arguments: str) -> None:
            subprocess.run(
                [Path(sys.executable).with_name("cosmic-ray"), *arguments], cwd=copy, env=environment, check=True
            )

        cosmic_ray("init", "session.toml", str(session))
        with use_db(str(session), WorkDB.Mode.open) as database:
            places = keep_sample(database, copy, sample, seed, settings["equivalent"])
        cosmic_ray("exec", "session.toml", str(session))
        with use_db(str(session), WorkDB.Mode.open) as database:
            specs = {item.job_id: item.mutations[0] for item in database.work_items}
            tested = [(job, found) for job, found in database.results if found.worker_outcome is WorkerOutcome.NORMAL]
    survived = [(specs[job], found) for job, found in tested if found.test_outcome is TestOutcome.SURVIVED]
    survivors = [survivor_of(spec, str(found.diff)) for spec, found in survived]
    source["timed_out"] = sum(found.output == "timeout" for _, found in tested)  # of those that were killed
    write(name, room, source, places, len(tested), seed, survivors)
    return 1 - len(survivors) / len(tested)


def copy_checkout(folder: Path) -> None:
    """The files that git tracks, as they are on disk."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def keep_sample(database: WorkDB, copy: Path, sample: int, seed: int, equivalent: Iterable[str]) -> int:
    """Leave one mutant at each of `sample` places pending (0: at each of all), and return how many places there are.

    Annotations are no code that runs, and are left out.
    """
    same = re.compile("|".join(equivalent))
    annotations: dict[Path, list[tuple[Place, Place]]] = {}
    items = []
    for item in database.pending_work_items:
        spec = item.mutations[0]
        spans = annotations.setdefault(spec.module_path, list(annotated(copy / spec.module_path)))
        inside = any(start <= spec.start_pos < end for start, end in spans)
        if not inside and not same.fullmatch(spec.operator_name):
            items.append(item)
    items.sort(key=_order)  # cosmic-ray's own numbers are drawn anew in each run
    random.Random(seed).shuffle(items)
    at_place: dict[tuple[Path, Place], WorkItem] = {}
    for item in items:
        spec = item.mutations[0]
        at_place.setdefault((spec.module_path, spec.start_pos), item)
    kept = {item.job_id for item in list(at_place.values())[: sample or None]}
    for item in list(database.pending_work_items):
        if item.job_id not in kept:
            database.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
    return len(at_place)


def _order(item: WorkItem) -> tuple[str, Place, str, int]:
    spec = item.mutations[0]
    return str(spec.module_path), spec.start_pos, spec.operator_name, spec.occurrence


def annotated(path: Path) -> Iterator[tuple[Place, Place]]:
    """Where the annotations of a file begin and end."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for name in ("annotation", "returns"):
            note = getattr(node, name, None)
            if isinstance(note, ast.expr):
                yield (note.lineno, note.col_offset), (note.end_lineno or 0, note.end_col_offset or 0)


def survivor_of(spec: MutationSpec, diff: str) -> Survivor:
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    before, after = (" / ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return Survivor(str(spec.module_path), spec.start_pos[0], before, after)


def write(
    name: str,
    room: Mapping[str, Any],
    source: Mapping[str, Any],
    places: int,
    tested: int,
    seed: int,
    survivors: Sequence[Survivor],
) -> None:
    """results/NAME.yaml, with the reasons that an earlier one gives the same survivors."""
    path = RESULTS / f"{name}.yaml"
    old = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {"survivors": []}
    reasons = {(one["file"], one["before"], one["after"]): one["reason"] for one in old["survivors"]}
    killed = tested - len(survivors)
    record = {
        "room": name,
        "score": round(killed / tested, 3),
        "killed": killed,
        "mutants": tested,
        "places": places,
        "seed": seed,
        **source,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "paths": list(room["paths"]),
        "tests": list(room["tests"]),
        "survivors": [
            {"file": s.file, "line": s.line, "before": s.before, "after": s.after,
             "reason": reasons.get(s.key, NO_REASON)}
            for s in sorted(survivors, key=lambda s: (s.file, s.line))
        ],
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")
    print(f"{name}: {killed} of {tested} mutants killed, {killed / tested:.0%}; {path.relative_to(ROOT)}", flush=True)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: list[str]) -> int:
    settings = toml.loads((HERE / "rooms.toml").read_text(encoding="utf-8"))
    rooms = settings["rooms"]
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("room", nargs="*", choices=[*rooms, []], help=f"of {', '.join(rooms)}; default: all")
    parser.add_argument("--sample", type=int, default=settings["sample"], help="mutants of a room; 0: all")
    asked = parser.parse_args(arguments)
    names = asked.room or list(rooms)
    scores = [run(name, rooms[name], settings, asked.sample, settings["seed"]) for name in names]
    return int(any(score < LEAST for score in scores))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
