"""Writes what documents take from compat_matrix.yaml, the adapters and benchmarks/results: tables between the
markers that name them, and one page a feature under docs/features.

python docs/generate.py            write
python docs/generate.py --check    exit status 1 and a diff where a file is stale
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from itertools import groupby
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import decode_tables  # noqa: E402
import feature_pages  # noqa: E402
import measured  # noqa: E402

from wanshim import catalog  # noqa: E402
from wanshim.matrix import Matrix, Row, load  # noqa: E402

FILES = [
    "README.md",
    "docs/compat_matrix.md",
    "docs/vae_decode.md",
    "docs/vae_encode.md",
    "docs/vae_models.md",
    "docs/sequence.md",
    "docs/training_step.md",
    "docs/reliability.md",
]
SHORT = 4  # so many versions are named one by one


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
                link = f"[`{framework}.{ability}`](docs/features/{framework}.{ability}.md)"
                lines.append(f"| {link} | {_versions(members)} | {key} | {_tested(members, ability)} |")
    return "\n".join(lines)


def _key(row: Row, ability: str) -> str:
    cell = row.cells[ability]
    return f"{cell.verdict.value}: {cell.reason}" if cell.reason else cell.verdict.value


def _versions(rows: list[Row]) -> str:
    if len(rows) <= SHORT:
        return ", ".join(row.version for row in rows)
    return f"{rows[0].version} to {rows[-1].version} ({len(rows)} releases)"


def _tested(rows: list[Row], ability: str) -> str:
    parts = []
    for how in ("behaviour", "probe", "nothing"):
        versions = [row.version for row in rows if row.cells[ability].tested == how]
        if versions:
            named = ", ".join(versions) if len(versions) <= SHORT else f"the other {len(versions)}"
            parts.append(how if len(versions) == len(rows) else f"{how}: {named}")
    return "; ".join(parts)


def framework_table(matrix: Matrix) -> str:
    """What is declared, what was tested and what was seen, which are three things."""
    lines = ["| framework | declared | behaviour tested | newest seen | rows |", "|---|---|---|---|---|"]
    for name in matrix.declared:
        rows = list(matrix.of(name))
        tested = [row.version for row in rows if any(cell.tested == "behaviour" for cell in row.cells.values())]
        declared = f"`{matrix.declared[name]}`"
        lines.append(f"| {name} | {declared} | {', '.join(tested)} | {matrix.newest_seen[name]} | {len(rows)} |")
    return "\n".join(lines)


def environment_table(matrix: Matrix) -> str:
    """The exact versions in the environments that tests ran in, and what `make record` wrote of their last run."""
    lines = ["| row | environment | last recorded run |", "|---|---|---|"]
    for row in matrix.rows:
        if row.environment:
            versions = ", ".join(f"{name} {version}" for name, version in sorted(row.environment.items()))
            lines.append(f"| {row.framework} {row.version} | {versions} | {_recorded(row)} |")
    return "\n".join(lines)


def _recorded(row: Row) -> str:
    if not row.ran:
        return "none"
    passed = ", ".join(f"{ability} {cell.passed}" for ability, cell in sorted(row.cells.items()) if cell.passed)
    return f"{row.ran['date']}, commit {row.ran['commit'][:7]}; passed tests: {passed}"


def mutants_table() -> str:
    """Each room of tests/mutants/rooms.toml, with what its last run wrote down."""
    folder = ROOT / "tests/mutants"
    rooms = re.findall(r"^\[rooms\.(\w+)\]", (folder / "rooms.toml").read_text(encoding="utf-8"), re.MULTILINE)
    lines = ["| room | mutants killed | places that can be mutated | commit | survivors |", "|---|---|---|---|---|"]
    for room in rooms:
        path = folder / f"results/{room}.yaml"
        if not path.is_file():
            lines.append(f"| {room} | not run yet | | | |")
            continue
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        survivors = "; ".join(f"`{one['after'] or one['before']}`: {one['reason']}" for one in found["survivors"])
        lines.append(
            f"| {room} | {found['killed']} of {found['mutants']}, {found['score']:.0%} | {found['places']} | "
            f"{found['commit'][:7]} | {survivors.replace('|', chr(92) + '|') or 'none'} |"
        )
    return "\n".join(lines)


def overhead_table(matrix: Matrix) -> str:
    """The overhead benchmark, from its raw result."""
    result = json.loads((ROOT / "benchmarks/results/overhead.json").read_text(encoding="utf-8"))
    lines = ["| start | ms elapsed | ms of CPU | memory, KiB |", "|---|---|---|---|"]
    for name, cost in result["start"].items():
        memory = "no /proc" if cost["resident_KiB"] is None else f"{cost['resident_KiB']:.0f}"
        lines.append(f"| `{name}` | {cost['wall_ms']:.1f} | {cost['cpu_ms']:.1f} | {memory} |")
    lines += [
        "",
        "| seam | seams of adapters | plain ns | patched ns | adds ns of CPU | off again ns |",
        "|---|---|---|---|---|---|",
    ]
    for name, cost in result["seams"].items():
        plain, patched, again = (cost[part] for part in ("plain", "patched", "off again"))
        walls = [f"{part['wall_ns']:.0f}" for part in (plain, patched, again)]
        added = round(patched["cpu_ns"] - plain["cpu_ns"])
        lines.append(f"| {name} | {cost['used by'] or 'none'} | {walls[0]} | {walls[1]} | {added} | {walls[2]} |")
    load = result["load"]
    lines += [
        "",
        f"{result['cpu']}, Python {result['python']}, commit {measured.commit_of(result)}, load average "
        f"{load['before']:.1f} to {load['after']:.1f} during the run. Elapsed: the median of {result['repeats']} runs; "
        f"of the CPU: the least; memory: what the process held more afterwards: `{result['driver']}`.",
    ]
    return "\n".join(lines)


TABLES = {
    "features": feature_table,
    "frameworks": framework_table,
    "environments": environment_table,
    "overhead": overhead_table,
    "mutants": lambda _: mutants_table(),
    "gpu tests": lambda _: measured.gpu_tests_table(),
    "training measured": lambda _: measured.training_table(),
    "sequence training": lambda _: measured.sequence_table(),
    "training step": lambda _: measured.step_table(),
    "decode measured": lambda _: measured.decode_table(),
    "decode arms": lambda _: decode_tables.arms_tables(),
    "encode arms": lambda _: decode_tables.encode_tables(),
    "image decode arms": lambda _: decode_tables.image_table(),
    "decode ratios": lambda _: decode_tables.ratios_table(),
}


def render(text: str, matrix: Matrix, folder: str = "") -> str:
    """The text with every marked table made anew; links are those of a document in `folder`."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", f"\n<!-- end of table: {name} -->"
        if begin in text:
            head, rest = text.split(begin, 1)
            made = table(matrix).replace(f"]({folder}/", "](") if folder else table(matrix)
            text = head + begin + made + end + rest.split(end, 1)[1]
    return text


def documents(matrix: Matrix) -> dict[Path, str | None]:
    """What each file is to hold; None for a page whose feature is gone."""
    texts: dict[Path, str | None] = dict.fromkeys(feature_pages.FOLDER.glob("*.md"))
    for name in FILES:
        old = (ROOT / name).read_text(encoding="utf-8")
        texts[ROOT / name] = render(old, matrix, Path(name).parent.name)
    for feature in catalog.discover().features.values():
        texts[feature_pages.path_of(feature.name)] = feature_pages.page(feature, matrix)
    return texts


def difference(path: Path, new: str | None) -> str:
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = [text.splitlines(True) for text in (old, new or "")]
    return "".join(difflib.unified_diff(*lines, str(path.relative_to(ROOT)), "generated"))


def write(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main() -> int:
    texts = documents(load(ROOT / "compat_matrix.yaml"))
    stale = {path: text for path, text in texts.items() if difference(path, text)}
    if "--check" in sys.argv[1:]:
        sys.stdout.writelines(difference(path, text) for path, text in stale.items())
        return 1 if stale else 0
    for path, text in stale.items():
        write(path, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
