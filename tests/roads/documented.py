"""The commands that README, the how-to pages and the explanations give, as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/how-to/*.md", "docs/explanation/*.md")
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
STARTS = re.compile(r"wanshim (run|demo|generate|warm|doctor --) ?|(WANSHIM_\w+=\S+ )+(wanshim|vllm)|srun wanshim")
CALLS = re.compile(r"wanshim\.(parallelize_\w+|shard_sequence|split_model|encode_once)\(")


def commands() -> dict[str, str]:
    """Command, its continued lines joined, to the first page that gives it."""
    found: dict[str, str] = {}
    for page in _pages():
        for command in _commands(page.read_text(encoding="utf-8")):
            found.setdefault(command, str(page.relative_to(ROOT)))
    return found


def python_calls() -> dict[str, str]:
    """What blocks of Python call on a model of the user's own, to the first page that does."""
    found: dict[str, str] = {}
    for page in _pages():
        for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language == "python":
                for name in CALLS.findall(block):
                    found.setdefault(name, str(page.relative_to(ROOT)))
    return found


def _pages() -> Iterator[Path]:
    for pattern in PAGES:
        yield from sorted(ROOT.glob(pattern))


def _commands(text: str) -> Iterator[str]:
    for language, block in BLOCK.findall(text):
        if language in ("", "bash", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                command = " ".join(line.partition(" #")[0].removeprefix("$ ").split())
                if STARTS.match(command):
                    yield command
    for span in SPAN.findall(BLOCK.sub("", text)):
        if STARTS.match(span) and not span.endswith(("--", "wanshim run", "wanshim demo")):
            yield " ".join(span.split())
