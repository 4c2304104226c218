"""Writes what documents take from compat_matrix.yaml, the adapters and benchmarks/results: tables between the
markers that name them, one page a feature under docs/features, and the pictures.

python docs/generate.py            write
python docs/generate.py --check    exit status 1 and a diff where a file is stale
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from writers import (  # noqa: E402
    command_pages,
    decode_tables,
    feature_pages,
    first_calls,
    gain_picture,
    generation_tables,
    loss_picture,
    measured,
    measured_split,
    memory_tables,
    pictures,
    readme_tables,
)
from writers.markdown import table  # noqa: E402

from wanshim.cli import matrix as in_words  # noqa: E402
from wanshim.select import catalog  # noqa: E402
from wanshim.select.matrix import Matrix, Row, load  # noqa: E402

# Those with tables between markers, which a page may have or not.
FILES = [
    "README.md",
    *sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if path.parent != feature_pages.FOLDER
    ),
]


def feature_table(matrix: Matrix) -> str:
    """One line a feature and framework, the versions grouped by verdict in ascending order."""
    lines = []
    frameworks = sorted({row.framework for row in matrix.rows})
    for framework in frameworks:
        rows = list(matrix.of(framework))
        for ability in sorted({ability for row in rows for ability in row.cells}):
            for members in matrix.spans(framework, ability):
                key = _key(members[0], ability)
                link = f"[`{framework}.{ability}`](docs/features/{framework}.{ability}.md)"
                lines.append((link, in_words.releases(members), key, in_words.tested(members, ability)))
    return table("feature | versions | verdict | tested", lines)


def _key(row: Row, ability: str) -> str:
    cell = row.cells[ability]
    return f"{cell.verdict.value}: {cell.reason}" if cell.reason else cell.verdict.value


def framework_table(matrix: Matrix) -> str:
    """What is declared, what was tested and what was seen, which are three things."""
    lines = []
    for name in matrix.declared:
        rows = list(matrix.of(name))
        tested = [row.version for row in rows if any(cell.tested == "behaviour" for cell in row.cells.values())]
        declared = f"`{matrix.declared[name]}`"
        lines.append((name, declared, ", ".join(tested), matrix.newest_seen[name], len(rows)))
    return table("framework | declared | behaviour tested | newest seen | rows", lines)


def environment_table(matrix: Matrix) -> str:
    """The exact versions in the environments that tests ran in, and what `make record` wrote of their last run."""
    lines = []
    for row in matrix.rows:
        if row.environment:
            versions = ", ".join(f"{name} {version}" for name, version in sorted(row.environment.items()))
            lines.append((f"{row.framework} {row.version}", versions, _recorded(row)))
    return table("row | environment | last recorded run", lines)


def _recorded(row: Row) -> str:
    if not row.ran:
        return "none"
    passed = ", ".join(f"{ability} {cell.passed}" for ability, cell in sorted(row.cells.items()) if cell.passed)
    return f"{row.ran['date']}, commit {row.ran['commit'][:7]}; passed tests: {passed}"


def mutants_table() -> str:
    """Each room of tests/mutants/rooms.toml, with what its last run wrote down."""
    folder = ROOT / "tests/mutants"
    rooms = re.findall(r"^\[rooms\.(\w+)\]", (folder / "rooms.toml").read_text(encoding="utf-8"), re.MULTILINE)
    lines: list[tuple[object, ...]] = []
    for room in rooms:
        path = folder / f"results/{room}.yaml"
        if not path.is_file():
            lines.append((room, "not run yet", "", "", ""))
            continue
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        survivors = "; ".join(f"`{one['after'] or one['before']}`: {one['reason']}" for one in found["survivors"])
        killed = f"{found['killed']} of {found['mutants']}, {found['score']:.0%}"
        lines.append((room, killed, found["places"], found["commit"][:7], survivors.replace("|", "\\|") or "none"))
    return table("room | mutants killed | places that can be mutated | commit | survivors", lines)


def overhead_table(matrix: Matrix) -> str:
    """The overhead benchmark, from its raw result."""
    result = json.loads((ROOT / "benchmarks/results/overhead.json").read_text(encoding="utf-8"))
    starts, seams = [], []
    for name, cost in result["start"].items():
        memory = "no /proc" if cost["resident_KiB"] is None else f"{cost['resident_KiB']:.0f}"
        starts.append((f"`{name}`", f"{cost['wall_ms']:.1f}", f"{cost['cpu_ms']:.1f}", memory))
    for name, cost in result["seams"].items():
        plain, patched, again = (cost[part] for part in ("plain", "patched", "off again"))
        walls = [f"{part['wall_ns']:.0f}" for part in (plain, patched, again)]
        added = round(patched["cpu_ns"] - plain["cpu_ns"])
        seams.append((name, cost["used by"] or "none", *walls[:2], added, walls[2]))
    load = result["load"]
    note = (
        f"{result['cpu']}, Python {result['python']}, commit {measured.commit_of(result)}, load average "
        f"{load['before']:.1f} to {load['after']:.1f} during the run. Elapsed: the median of {result['repeats']} runs; "
        f"of the CPU: the least; memory: what the process held more afterwards: `{result['driver']}`."
    )
    heads = "seam | seams of adapters | plain ns | patched ns | adds ns of CPU | off again ns"
    return f"{table('start | ms elapsed | ms of CPU | memory, KiB', starts)}\n\n{table(heads, seams, note)}"


DEPLOYED = {"Dockerfile": "dockerfile", "slurm.sh": "bash", "kubernetes.yaml": "yaml"}


def _file(name: str, kind: str, _: Matrix) -> str:
    return f"```{kind}\n{(ROOT / name).read_text(encoding='utf-8').rstrip()}\n```"


TABLES = {
    "first": lambda _: readme_tables.first_lines(),
    "gain": lambda _: readme_tables.gain_table(),
    "tasks": lambda _: readme_tables.task_table(),
    "variables": lambda _: readme_tables.variable_table(),
    "feature list": lambda _: readme_tables.feature_list(),
    "support": readme_tables.support_table,
    **{f"deploy/{name}": partial(_file, f"deploy/{name}", kind) for name, kind in DEPLOYED.items()},
    "commands": lambda _: command_pages.reference(),
    "features": feature_table,
    "frameworks": framework_table,
    "environments": environment_table,
    "overhead": overhead_table,
    "mutants": lambda _: mutants_table(),
    "gpu tests": lambda _: measured.gpu_tests_table(),
    "training measured": lambda _: measured.training_table(),
    "sequence training": lambda _: measured.sequence_table(),
    "sequence long": lambda _: measured.sequence_table("720p"),
    "end to end": lambda _: measured.end_to_end_table(),
    "minimax h3": lambda _: measured.loop_table(measured.MINIMAX_H3),
    "training step": lambda _: measured.step_table(),
    "eight-bit step": lambda _: measured.distance_table("training_step_eight_bit_1xH200"),
    "kept blocks": lambda _: measured.distance_table("training_step_blocks_1xH200"),
    "held step": lambda _: measured.held_table(),
    "loss overlay": lambda _: measured.loss_table(),
    "pipeline": lambda _: measured_split.pipeline_table(),
    "pipeline offload": lambda _: measured_split.pipeline_offload_table(),
    "capacity": lambda _: measured_split.capacity_table(),
    "offload": lambda _: measured_split.offload_table(),
    "streaming": lambda _: measured_split.streaming_table(),
    "sequence model": lambda _: measured_split.model_table(),
    "prompt encoding": lambda _: measured_split.prompt_table(),
    "decode measured": lambda _: measured.decode_table(),
    "decode share": lambda _: generation_tables.share_table(),
    "first calls": lambda _: first_calls.first_call_table(),
    "first calls, dry run": lambda _: first_calls.dry_run_table(),
    "twenty sizes": lambda _: first_calls.service_table(),
    "strict proof": lambda _: first_calls.proof_table(),
    "resume cost": lambda _: first_calls.resume_table(),
    "generation": lambda _: generation_tables.generation_table(),
    "generation whole": lambda _: generation_tables.whole_table(),
    "generation blocks": lambda _: generation_tables.blocks_table(),
    "generation fast": lambda _: generation_tables.fast_table(),
    "generation offload": lambda _: generation_tables.offload_table(generation_tables.OFFLOAD),
    "generation limits": lambda _: generation_tables.limits_table(),
    "generation host copy": lambda _: generation_tables.host_copy_table(),
    "generation minimax h3": lambda _: generation_tables.offload_table(generation_tables.MINIMAX_H3),
    "generation script": lambda _: generation_tables.script_table(),
    "generation small": lambda _: generation_tables.small_table(),
    "generation workers": lambda _: generation_tables.worker_table(),
    "decode arms": lambda _: decode_tables.arms_tables(),
    "engine arms": lambda _: decode_tables.engine_tables(),
    "winograd arms": lambda _: decode_tables.winograd_tables(),
    "encode arms": lambda _: decode_tables.encode_tables(),
    "encode engine arms": lambda _: decode_tables.encode_engine_tables(),
    "vae memory": lambda _: memory_tables.memory_table(),
    "image decode arms": lambda _: decode_tables.image_table(),
    "vllm-omni on one gpu": lambda _: decode_tables.vllm_omni_table(),
    "decode ratios": lambda _: decode_tables.ratios_table(),
}


def render(text: str, matrix: Matrix, folder: str = "") -> str:
    """The text with every marked table made anew; links are those of a document in `folder`."""
    for name, made in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", f"\n<!-- end of table: {name} -->"
        if begin in text:
            head, rest = text.split(begin, 1)
            text = head + begin + _relinked(made(matrix), folder) + end + rest.split(end, 1)[1]
    return text


def _relinked(text: str, folder: str) -> str:
    """Links from the root of the checkout, as links of a document in `folder`."""
    if not folder:
        return text
    return re.sub(r"\]\((docs/[^)#]+)", lambda found: f"]({Path(os.path.relpath(found[1], folder)).as_posix()}", text)


def documents(matrix: Matrix) -> dict[Path, str | None]:
    """What each file is to hold; None for a page whose feature is gone."""
    texts: dict[Path, str | None] = dict.fromkeys(feature_pages.FOLDER.glob("*.md"))
    for name in FILES:
        old = (ROOT / name).read_text(encoding="utf-8")
        folder = Path(name).parent.as_posix()
        texts[ROOT / name] = render(old, matrix, "" if folder == "." else folder)
    for feature in catalog.discover().features.values():
        texts[feature_pages.path_of(feature.name)] = feature_pages.page(feature, matrix)
    for name, draw in {**pictures.PICTURES, **gain_picture.PICTURES, **loss_picture.PICTURES}.items():
        texts[ROOT / "docs" / "images" / f"{name}.svg"] = draw()
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
