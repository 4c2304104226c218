"""Writes the tables that README.md takes from compat_matrix.yaml, between the markers that name them.

python docs/generate.py            write
python docs/generate.py --check    exit status 1 and a diff where a file is stale
"""

from __future__ import annotations

import difflib
import json
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from wanshim.matrix import Matrix, Row, load  # noqa: E402 - the checkout's own reader of the table

FILES = ["README.md"]


def feature_table(matrix: Matrix) -> str:
    """One line a feature and framework, the versions grouped by verdict in ascending order."""
    lines = ["| feature | versions | verdict | tested |", "|---|---|---|---|"]
    frameworks = sorted({row.framework for row in matrix.rows})
    for framework in frameworks:
        rows = list(matrix.of(framework))
        for ability in sorted({ability for row in rows for ability in row.cells}):
            having = [row for row in rows if ability in row.cells]
            for key, group in groupby(having, key=lambda row: _key(row, ability)):
                members = list(group)
                lines.append(
                    f"| `{framework}.{ability}` | {_versions(members)} | {key} | {_tested(members, ability)} |"
                )
    return "\n".join(lines)


def _key(row: Row, ability: str) -> str:
    cell = row.cells[ability]
    return f"{cell.verdict.value}: {cell.reason}" if cell.reason else cell.verdict.value


def _versions(rows: list[Row]) -> str:
    return ", ".join(row.version for row in rows)


def _tested(rows: list[Row], ability: str) -> str:
    parts = []
    for how in ("behaviour", "probe", "nothing"):
        versions = [row.version for row in rows if row.cells[ability].tested == how]
        if versions:
            parts.append(how if len(versions) == len(rows) else f"{how}: {', '.join(versions)}")
    return "; ".join(parts)


def split_measured(matrix: Matrix) -> str:
    """The split's benchmark, from its raw result."""
    result = json.loads((ROOT / "benchmarks/results/model_split_2xh200.json").read_text(encoding="utf-8"))
    lines = ["| 14B DiT, LoRA r=32, 480x832x49, one micro-batch | seconds | peak GiB a GPU |", "|---|---|---|"]
    for title, arm in result["arms"].items():
        peaks = " / ".join(str(peak) for peak in arm["peak_GiB"].values())
        lines.append(f"| {title} | {arm['median']:.2f} | {peaks} |")
    lines += [
        "",
        f"Ratio {result['ratio_split_to_one_gpu']:.3f}; with deterministic kernels the loss is equal and "
        f"{result['gradients_equal']} LoRA gradients are equal bit for bit. {result['gpu']}, torch {result['torch']}, "
        f"commit {result['commit'][:7]}: `{result['driver']}`.",
    ]
    return "\n".join(lines)


TABLES = {"features": feature_table, "model split measured": split_measured}


def render(text: str, matrix: Matrix) -> str:
    """The text with every marked table made anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", f"\n<!-- end of table: {name} -->"
        if begin in text:
            head, rest = text.split(begin, 1)
            text = head + begin + table(matrix) + end + rest.split(end, 1)[1]
    return text


def main() -> int:
    matrix = load(ROOT / "compat_matrix.yaml")
    stale = False
    for name in FILES:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = render(old, matrix)
        if "--check" in sys.argv[1:]:
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "generated"))
            stale |= old != new
        else:
            path.write_text(new, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
