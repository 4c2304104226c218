"""Checks that the requirements of a `pip install` line are met here: `python -m ... REQUIREMENT ...`."""

from __future__ import annotations

import sys
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement


def check(requirement: Requirement) -> None:
    assert requirement.specifier.contains(version(requirement.name), prereleases=True), str(requirement)
    for extra in requirement.extras:
        for line in requires(requirement.name) or ():
            part = Requirement(line)
            if part.marker is not None and part.marker.evaluate({"extra": extra}) and not part.marker.evaluate():
                check(part)


# A folder that the guide installs from stands for the release that is installed.
CHECKOUTS = {"DiffSynth-Studio": "diffsynth", "wanshim": "wanshim"}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path, bracket, extras = argument.partition("[")
        if not Path(path).is_dir():
            check(Requirement(argument))
        elif CHECKOUTS[Path(path).name] == "wanshim":
            check(Requirement(f"wanshim{bracket}{extras}"))
        else:
            version(CHECKOUTS[Path(path).name])
