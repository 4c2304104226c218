"""README's line for FastVideo, run twice: one rank encodes the negative prompt, and the second start encodes nothing.

FastVideo's training entry point needs a GPU; a script stands in its place that starts FastVideo's own model as that
entry point does, as far as the negative prompt.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.contract import readme
from tests.contract.fastvideo.conftest import needs_training
from tests.kit.pytest_tests import verdict_here
from wanshim.patching.verdict import Verdict

ENTRY = "-m fastvideo.train.entrypoint.train"
SCRIPT = """
import json, os, sys
from pathlib import Path
from tests.contract.fastvideo import encode_ranks

encode_ranks._import_fastvideo()
rank = int(os.environ["RANK"])
job = {"model": sys.argv[1], "world": 2, "sp": 2}
assert encode_ranks.TASKS["train_start"](job, rank, Path())["encoded"]
import wanshim
row = wanshim.report().row("fastvideo.prompt_cache")
Path(f"rank{rank}.json").write_text(json.dumps({"state": row.state, "notes": row.notes}))
"""
pytestmark = [
    needs_training,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        verdict_here("fastvideo.prompt_cache") is not Verdict.PATCH, reason="this FastVideo encodes on rank 0 alone"
    ),
]


def test_command_encodes_once_and_the_second_start_not_at_all(model: Path, tmp_path: Path) -> None:
    command = readme.commands()["FastVideo"]
    assert ENTRY in command
    assert importlib.util.find_spec(ENTRY.split()[1]) is not None
    (tmp_path / "train.py").write_text(SCRIPT)
    command = command.replace(ENTRY, "train.py").replace("...", str(model))
    variables = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for origins in ({"encoded", "waited"}, {"cache"}):
        readme.run(tmp_path, command, **variables)
        said = [path.read_text() for path in sorted(tmp_path.glob("rank?.json"))]
        assert len(said) == 2
        assert all('"exercised"' in one for one in said)
        found = {origin for one in said for origin in ("encoded", "waited", "cache") if f": {origin}, " in one}
        assert found == origins, said
    assert list((tmp_path / ".cache" / "wanshim" / "encoding").glob("*.safetensors"))
