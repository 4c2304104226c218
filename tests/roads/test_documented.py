"""No command of README or the documents is on no road."""

from __future__ import annotations

from . import documented
from .roads import ELSEWHERE, ROADS, SAME_AS


def test_every_command_of_the_documents_is_on_a_road() -> None:
    known = {road.command for road in ROADS}
    lost = [
        f"{page}: {command}"
        for command, page in documented.commands().items()
        if SAME_AS.get(command, command) not in known and not any(part in command for part in ELSEWHERE)
    ]
    assert lost == []


def test_every_test_that_runs_a_command_elsewhere_is_there() -> None:
    assert [path for path in ELSEWHERE.values() if not (documented.ROOT / path).is_file()] == []


def test_everything_named_elsewhere_is_still_in_the_documents() -> None:
    commands = documented.commands()
    assert [part for part in ELSEWHERE if not any(part in command for command in commands)] == []
    assert [command for command in SAME_AS if command not in commands] == []


def test_a_command_of_the_documents_that_is_on_no_road_is_found() -> None:
    """The reader sees a command in a block, continued, and one in a cell of a table."""
    found = list(
        documented._commands("```\nWANSHIM_X=1 wanshim run -- \\\n  python a.py\n```\n| a | `wanshim run b` |")
    )
    assert found == ["WANSHIM_X=1 wanshim run -- python a.py", "wanshim run b"]
