"""Stands in for `modelscope download`: the hub holds a tiny model, and gives out what it is asked for."""

from __future__ import annotations

import argparse
import shutil
from fnmatch import fnmatch
from pathlib import Path

from tests.contract.diffsynth.guide import tiny_ti2v

HUB = Path(".hub")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["download"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--include", nargs="+", required=True)
    parser.add_argument("--local_dir", type=Path, required=True)
    args = parser.parse_args()
    if not HUB.is_dir():
        tiny_ti2v.write(HUB)
    repository = HUB / args.model
    names = [path.relative_to(repository) for path in repository.rglob("*") if path.is_file()]
    for pattern in args.include:
        found = [name for name in names if fnmatch(name.as_posix(), pattern)]
        assert found, f"{args.model} has nothing called {pattern}, but {names}"
        for name in found:
            (args.local_dir / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, args.local_dir / name)


if __name__ == "__main__":
    main()
