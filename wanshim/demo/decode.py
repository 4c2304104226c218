"""`wanshim demo decode`: a real clip, encoded by a tiny Wan VAE, decoded by one process and by several."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wanshim.demo import clip
from wanshim.demo.meeting import served_store
from wanshim.errors import WanshimError


def run(
    *,
    frames: int = 17,
    ranks: int = 2,
    mode: str = "auto",
    fast: bool = False,
    output: Path = Path("demo-output"),
    video: Path | None = None,
    console: Console | None = None,
) -> bool:
    """Decode alone and together, print plan, times and difference, write the frames.

    Args:
        frames: of the clip, 4n + 1.
        ranks: processes; on as many GPUs where there are enough, else on the CPU, one thread each.
        mode: auto, temporal, spatial or tile.
        fast: the fast operators instead of the strict ones.
        output: folder for decoded.mp4.

    Returns:
        whether the result keeps the plan's promise: equal bit for bit, or within tolerance.

    Raises:
        WanshimError: no clip, a frame count that Wan does not take, or diffusers is missing.
    """
    console = console or Console()
    _check(frames, ranks)
    source = clip.find(video)
    output.mkdir(parents=True, exist_ok=True)
    console.print(f"clip        {source}", highlight=False)
    console.print(f"processes   1 and {ranks}, {'fast' if fast else 'strict'} operators\n", highlight=False)
    result = _decode(source, frames, ranks, mode, fast, output)
    console.print(result["plan"] + "\n", highlight=False)
    console.print(_table(result, ranks))
    console.print(f"\nframes      {result['video']}", highlight=False)
    return bool(result["kept"])


def _decode(source: Path, frames: int, ranks: int, mode: str, fast: bool, output: Path) -> dict[str, Any]:
    import torch.multiprocessing as processes

    from wanshim.demo import decode_ranks

    with tempfile.TemporaryDirectory(prefix="wanshim-demo-") as folder, served_store() as variables:
        answer = Path(folder, "answer.json")
        job = decode_ranks.Job(
            clip=str(source),
            frames=frames,
            ranks=ranks,
            mode=mode,
            fast=fast,
            video=str(output / "decoded.mp4"),
            answer=str(answer),
            variables=variables,
        )
        processes.spawn(decode_ranks.work, args=(job,), nprocs=ranks)
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return result


def _table(result: dict[str, Any], ranks: int) -> Table:
    table = Table("decode", "seconds", "times as fast", "largest difference")
    table.add_row("each process alone, diffusers", f"{result['alone']:.2f}", "", "")
    table.add_row(
        f"{ranks} processes, wanshim",
        f"{result['together']:.2f}",
        f"{result['alone'] / result['together']:.2f}",
        "0, bit for bit" if result["difference"] == 0 else f"{result['difference']:.1e}",
    )
    return table


def _check(frames: int, ranks: int) -> None:
    import importlib.util

    if frames < 1 or frames % 4 != 1:
        raise WanshimError(
            f"--frames {frames}", expected="4n + 1, such as 9 or 17: the Wan VAE takes one and then fours"
        )
    if ranks < 1:
        raise WanshimError(f"--ranks {ranks}", expected="1 or more processes")
    for package in ("diffusers", "av"):
        if importlib.util.find_spec(package) is None:
            raise WanshimError(f"{package} is not installed", hint="pip install 'wanshim[demo]'")
