"""Which engine of cuDNN is the fastest for a convolution on this GPU, kept on disk from process to process.

One small JSON file for each convolution, in a folder of this user alone. A file names numbers that cuDNN checks, and
no code. What cannot be read or written is searched for again: the store never fails a decode.

The package brings what was learned on GPUs that its authors could measure, one table for each kind of GPU
(benchmarks/engine_table.py writes it). It serves as what is known of other sizes does: as what is tried first.

The next writer removes what one that was killed has left: no clock is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from math import inf, log2, prod
from pathlib import Path
from typing import Any, TypeAlias

from wanshim.core.shared.files import NotOwn, OwnFolder, read_file

from .cudnn_graph import Engine

Facts: TypeAlias = dict[str, Any]  # what a convolution is: values that JSON has


Entry: TypeAlias = tuple[Facts, Engine | None]

_LAYER = ("weight", "stride", "padding", "by")  # what makes a layer, whatever the size of its input
_NEAR = 3.0  # binary orders of magnitude between the areas of two pictures
_TRIED = 3
_UNLIKE = {"dtype": 1.0, "batch": 0.5, "cudnn": 0.5, "driver": 0.1, "length": 0.25, "outputs": 0.25}  # as such orders
_DAMAGED = (OSError, NotOwn, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class EngineStore:
    """Engines by the facts of their convolution.

    Args:
        folder: made with mode 0700 at the first write; None: nothing is kept.
        table: what is known of this kind of GPU, without having been learned on it.
    """

    def __init__(self, folder: Path | None, table: Sequence[Entry] = ()) -> None:
        self.folder = folder
        self._table = table

    def get(self, facts: Facts) -> tuple[Engine | None, bool]:
        """The engine kept for `facts` (None: torch's own choice is the fastest), and whether anything is kept."""
        try:
            if self.folder is None:
                return None, False
            entry = json.loads(read_file(self.folder, _name(facts)))
            if entry["facts"] != _plain(facts):
                return None, False
            return _engine(entry["engine"]), True
        except _DAMAGED:
            return None, False

    def near(self, facts: Facts) -> list[Engine | None]:
        """Engines of the same layer at other sizes, the nearest first; None: there torch's own choice is the fastest.

        Nothing behind a None is of use. The GPU is the same, or of the table's kind.
        """
        wanted = _plain(facts)
        known = sorted(((_apart(wanted, of), engine) for of, engine in self._known), key=lambda pair: pair[0])
        found: list[Engine | None] = []
        for apart, engine in known:
            if apart > _NEAR or len(found) == _TRIED or None in found:
                break
            if engine not in found:
                found.append(engine)
        return found

    @cached_property
    def _known(self) -> list[Entry]:
        """Records of earlier processes, and the table."""
        return [*_kept(self.folder), *self._table]

    def put(self, facts: Facts, engine: Engine | None) -> None:
        """Keep the engine of `facts`, if the folder can be written."""
        kept = None if engine is None else {"number": engine.number, "knobs": dict(engine.knobs)}
        text = json.dumps({"facts": _plain(facts), "engine": kept}, indent=1) + "\n"
        if self.folder is not None:
            with suppress(OSError, NotOwn, RuntimeError), OwnFolder(self.folder) as folder:
                folder.remove_abandoned()
                folder.write(_name(facts), text.encode())


def _plain(facts: Facts) -> Any:
    """The facts as JSON gives them back."""
    return json.loads(json.dumps(facts))


def _name(facts: Facts) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32] + ".json"


def _kept(folder: Path | None) -> Iterator[Entry]:
    if folder is None or not folder.is_dir():
        return
    for path in sorted(folder.glob("*.json")):
        with suppress(*_DAMAGED):
            entry = json.loads(read_file(folder, path.name))
            yield dict(entry["facts"]), _engine(entry["engine"])


def _engine(kept: Any) -> Engine | None:
    if kept is None:
        return None
    return Engine(int(kept["number"]), {str(name): int(value) for name, value in kept["knobs"].items()})


def _apart(wanted: Facts, known: Facts) -> float:
    """The distance of a known case from the wanted one; infinite for another layer."""
    same = all(wanted.get(name) == known.get(name) for name in _LAYER) and ("equal" in wanted) == ("equal" in known)
    if not same or known.get("gpu", wanted.get("gpu")) != wanted.get("gpu"):
        return inf
    try:
        areas = [prod(map(int, facts["input"][1:])) for facts in (wanted, known)]
    except (KeyError, TypeError, ValueError):
        return inf
    if min(areas) < 1:
        return inf
    return abs(log2(areas[0] / areas[1])) + sum(
        value for name, value in _UNLIKE.items() if wanted.get(name) != known.get(name)
    )


def engine_table(capability: tuple[int, int]) -> list[Entry]:
    """The package's own records for GPUs of this compute capability."""
    path = Path(__file__).with_name(f"engines_sm{capability[0]}{capability[1]}.json")
    if not path.is_file():
        return []
    table = json.loads(path.read_text(encoding="utf-8"))
    about = {name: table[name] for name in ("driver", "cudnn")}
    return [(about | entry["facts"], _engine(entry["engine"])) for entry in table["convolutions"]]
