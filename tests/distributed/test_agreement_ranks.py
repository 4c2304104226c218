from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from wanshim.cli.demo.meeting import served_store

RANK = Path(__file__).with_name("agreement_rank.py")


def run(folder: Path, *features: str) -> list[str]:
    """What each rank met."""
    results = [folder / f"rank{rank}" for rank in range(len(features))]
    with served_store() as variables:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(RANK), str(rank), str(len(features)), feature, str(result)],
                env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
            )
            for rank, (feature, result) in enumerate(zip(features, results, strict=True))
        ]
        assert [rank.wait(timeout=90) for rank in ranks] == [0] * len(ranks)
    return [result.read_text(encoding="utf-8") for result in results]


def seconds(output: str) -> float:
    return float(output.rsplit("seconds ", 1)[1])


def test_ranks_with_one_patch_set_agree(tmp_path: Path) -> None:
    outputs = run(tmp_path, "torch.pg_timeout=ab", "torch.pg_timeout=ab")
    assert [output.splitlines()[0] for output in outputs] == ["agreed", "agreed"]


def test_ranks_with_two_patch_sets_raise_the_same_table_within_30_s(tmp_path: Path) -> None:
    outputs = run(tmp_path, "torch.pg_timeout=ab", "torch.pg_timeout=cd")
    messages = [output.rsplit("seconds ", 1)[0] for output in outputs]
    assert messages[0] == messages[1]
    assert "different patch sets" in messages[0]
    assert "node-0" in messages[0]
    assert "node-1" in messages[0]
    assert max(map(seconds, outputs)) < 30
