"""One process and several, compared in a table; and what a demo needs before it starts."""

from __future__ import annotations

import importlib.util

from rich.table import Table

from wanshim.errors import WanshimError


class Comparison(Table):
    """Seconds and largest difference of several processes beside those of one."""

    def __init__(self, what: str, alone: str, seconds: float) -> None:
        super().__init__(what, "seconds", "times as fast", "largest difference")
        self._seconds = seconds
        self.add_row(alone, f"{seconds:.2f}", "", "")

    def add(self, title: str, seconds: float, difference: float) -> None:
        shown = "0, bit for bit" if difference == 0 else f"{difference:.1e}"
        self.add_row(title, f"{seconds:.2f}", f"{self._seconds / seconds:.2f}", shown)


def check_installed(*packages: str) -> None:
    """Whether the demo's packages are there.

    Raises:
        WanshimError: one is missing.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise WanshimError(f"{package} is not installed", hint="pip install 'wanshim[demo]'")
