"""What documents say of the matrix is what the matrix says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
GENERATE = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]


def test_tables_in_documents_are_those_of_the_matrix() -> None:
    result = subprocess.run(GENERATE, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"run `make docs`:\n{result.stdout}{result.stderr}"


def test_stale_table_is_noticed(tmp_path: Path) -> None:
    """The check above can fail."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generate
    finally:
        sys.path.remove(str(ROOT / "docs"))
    from wanshim.matrix import load

    text = (ROOT / "README.md").read_text()
    assert generate.render(text.replace("| patch |", "| native |", 1), load()) == text
