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


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if Path(argument.split("[")[0]).is_dir():  # a checkout: the release that is installed stands for it
            version("diffsynth")
        else:
            check(Requirement(argument))
