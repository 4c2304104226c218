"""What doctor says of the installed code where no row knows it, or where it is not what its row knows."""

from __future__ import annotations

from tests.contract.unlisted import UnlistedCode


class TestUnlistedDiffusers(UnlistedCode):
    framework = "diffusers"
