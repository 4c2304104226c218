"""`wanshim demo encode`: two ranks of FastVideo hang on the negative prompt, and with the shim they do
not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from wanshim.core.shared.deadline import checked_seconds
from wanshim.demo import fastvideo_tree, umt5_checkpoint

RANKS = 2
FEATURE = "fastvideo.negative_prompt"
Result = list[dict[str, Any]]
console = Console()


def run(
    deadline: Annotated[float, typer.Option(help="Seconds to watch the hang.")] = 15.0,
    output: Annotated[Optional[Path], typer.Option(help="Keep checkpoint, cache and logs here.")] = None,  # noqa: UP045
) -> None:
    """Two ranks of FastVideo hang on the negative prompt; with wanshim they start, and again without an encoder."""
    # All three are FastVideo's own code on gloo and the CPU, with a tiny random UMT5.
    checked_seconds(deadline, "deadline")
    installed = fastvideo_tree.find_installed()
    folder = output or Path(tempfile.mkdtemp(prefix="wanshim-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not _show(installed, folder, deadline):
            raise typer.Exit(1)
    finally:
        if output is None:
            shutil.rmtree(folder, ignore_errors=True)


def _show(installed: Path, folder: Path, deadline: float) -> bool:
    from wanshim.demo import encode_ranks

    console.print(f"fastvideo   {installed}", highlight=False)
    console.print(
        "            with the rank-0-only encoding of commits bc27a032c to 9a8bbe18f put back\n", highlight=False
    )
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    fastvideo_tree.reproduce(tree)
    model = umt5_checkpoint.write(folder)
    job = {
        "task": "train_start",
        "world": RANKS,
        "sp": RANKS,
        "model": str(model),
        "environment": {"WANSHIM_CACHE_DIR": str(folder / "cache")},
    }
    shutil.rmtree(folder / "cache", ignore_errors=True)
    with encode_ranks.serving(tree, folder / "fastvideo.log") as ask:
        hung = ask({**job, "folder": str(folder / "hang"), "deadline": deadline})
        shim = {**job, "features": FEATURE, "deadline": 120}
        first = ask({**shim, "folder": str(folder / "first")})
        second = ask({**shim, "folder": str(folder / "second")})
    return all(
        [
            _tell_hang(hung, deadline),
            _tell_run("2  with the shim: one rank encodes, the other waits", first, {"encoded", "waited"}),
            _tell_run("3  again: no text encoder is loaded", second, {"cache"}),
        ]
    )


def _tell_hang(ranks: Result, deadline: float) -> bool:
    console.print("[bold]1  as it is: a hang[/bold]")
    for rank in ranks:
        stack = rank.get("hung")
        if stack is None:
            console.print(f"   rank {rank['rank']}  {rank.get('message', 'finished, which it should not')}")
        else:
            console.print(
                f"   rank {rank['rank']}  still waits after {deadline:g} s in {_where(stack)}", highlight=False
            )
    console.print()
    return all("hung" in rank for rank in ranks)


def _where(stack: list[str]) -> str:
    """The collective, and the step of start-up that called it."""
    steps = ("warmup_sequence_parallel_communication", "load_weights", "ensure_negative_conditioning")
    step = next((name for name in stack if name in steps), stack[-1])
    return f"{stack[0]}, in {step}"


def _tell_run(title: str, ranks: Result, expected: set[str]) -> bool:
    console.print(f"[bold]{title}[/bold]")
    notes: list[str] = []
    for rank in ranks:
        mine = [note for row in rank.get("features", []) for note in row["notes"]]
        notes += mine
        if "error" in rank:
            console.print(f"   rank {rank['rank']}  {rank['error']}: {rank['message']}", highlight=False)
        for note in mine:
            console.print(f"   rank {rank['rank']}  {note}", highlight=False)
    console.print()
    found = {name for name in ("encoded", "waited", "cache") for note in notes if f": {name}, " in note}
    return found == expected and not any("error" in rank for rank in ranks)
