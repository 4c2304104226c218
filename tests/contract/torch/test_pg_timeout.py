"""`torch.pg_timeout` on the installed PyTorch, with gloo on one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, os, sys
import wanshim
order = sys.argv[1]
if order == "before":
    wanshim.activate("none,torch.pg_timeout")
import torch.distributed as dist
from torch.distributed import init_process_group, new_group
if order == "after":
    wanshim.activate("none,torch.pg_timeout")
    from torch.distributed import init_process_group, new_group
arguments = eval(sys.argv[2])
import torch
init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=0, world_size=1, **arguments)
further = new_group([0])
def has(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
row = next((row for row in wanshim.report().selected if row.feature == "torch.pg_timeout"), None)
print(json.dumps({
    "default": has(dist.group.WORLD),
    "further": has(further),
    "state": row.state if row else None,
    "reason": row.reason if row else None,
    "notes": list(row.notes) if row else [],
    "left": row.fallbacks if row else {},
    "wrapped": hasattr(dist.init_process_group, "__wanshim_state__"),
}))
"""


def run(tmp_path: Any, order: str = "before", arguments: str = "{}", **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, order, arguments, str(tmp_path / "rendezvous")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("order", ["before", "after"])
def test_timeout_reaches_the_groups_and_the_report_reads_it_back(tmp_path: Any, order: str) -> None:
    found = run(tmp_path, order, WANSHIM_PG_TIMEOUT_S="1234")
    assert (found["default"], found["further"]) == (1234.0, 1234.0)
    assert found["state"] == "exercised"
    assert any(note.startswith("init_process_group: the group waits") and "1234 s" in note for note in found["notes"])
    assert any(note.startswith("new_group: the group waits") and "1234 s" in note for note in found["notes"])


def test_timeout_of_the_caller_stays(tmp_path: Any) -> None:
    found = run(
        tmp_path, arguments="{'timeout': __import__('datetime').timedelta(seconds=55)}", WANSHIM_PG_TIMEOUT_S="99"
    )
    assert (found["default"], found["further"]) == (55.0, 99.0)
    assert found["left"] == {"the caller of init_process_group names a timeout": 1}
    assert any("55 s" in note for note in found["notes"]), "the report says what the group has, not what was asked"


def test_nccl_timeout_variable_changes_nothing(tmp_path: Any) -> None:
    found = run(tmp_path, "never", NCCL_TIMEOUT="7200", TORCH_NCCL_TIMEOUT="7200")
    assert found["default"] == 1800.0, "gloo's own default"
    assert not found["wrapped"]


def test_timeout_without_its_variable_is_refused_with_the_reason(tmp_path: Any) -> None:
    found = run(tmp_path)
    assert found["state"] == "refused"
    assert "WANSHIM_PG_TIMEOUT_S is not set" in found["reason"]
    assert found["default"] == 1800.0
