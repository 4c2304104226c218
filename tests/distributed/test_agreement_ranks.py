from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from wanshim.cli.demo.ports import free_port

RANK = Path(__file__).with_name("agreement_rank.py")


def run(*features: str) -> list[str]:
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(len(features)), port, feature],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, feature in enumerate(features)
    ]
    return [rank.communicate(timeout=90)[0] for rank in ranks]


def seconds(output: str) -> float:
    return float(output.rsplit("seconds ", 1)[1])


def test_ranks_with_one_patch_set_agree() -> None:
    outputs = run("torch.pg_timeout=ab", "torch.pg_timeout=ab")
    assert [output.splitlines()[0] for output in outputs] == ["agreed", "agreed"]


def test_ranks_with_two_patch_sets_raise_the_same_table_within_30_s() -> None:
    outputs = run("torch.pg_timeout=ab", "torch.pg_timeout=cd")
    messages = [output.rsplit("seconds ", 1)[0] for output in outputs]
    assert messages[0] == messages[1]
    assert "different patch sets" in messages[0]
    assert "node-0" in messages[0]
    assert "node-1" in messages[0]
    assert max(map(seconds, outputs)) < 30
