"""Which feature a file of contract tests is about: a row runs the files of what it says `behaviour` of, and the closing
table of `make matrix` counts by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from wanshim.matrix import Cell

# Files that are named after a part of their feature; one that is not here is about the ability in its name, and one
# without an ability in its name about all of them.
NAMED_OTHERWISE: dict[str, dict[str, str]] = {
    "diffsynth": {
        "test_decode_sweep": "vae_decode",
        "test_host_link": "checkpoint_offload",
        "test_launchers": "patchify",
        "test_monitor_live": "progress",
        "test_orders": "patchify",
        "test_plan_choice": "model_split",
        "test_run_on_gpus": "model_split",
        "test_sequence*": "model_split",
        "test_split_*": "model_split",
        "test_weight_streaming": "model_split",
    },
    "diffusers": {"test_others": "vae_decode", "test_source_tree": "vae_decode"},
    "fastvideo": {
        "test_decode_sweep": "vae_decode",
        "test_executor": "vae_decode",
        "test_methods": "negative_prompt",
    },
}


def ability_of(framework: str, file: str, abilities: Iterable[str]) -> str | None:
    """The ability that `file`, a test module's name, is about; None for all of them."""
    for pattern, ability in NAMED_OTHERWISE.get(framework, {}).items():
        if fnmatchcase(file, pattern):
            return ability
    named = [ability for ability in abilities if file.startswith(f"test_{ability}")]
    return max(named, key=len, default=None)


def is_run(framework: str, file: str, cells: Mapping[str, Cell]) -> bool:
    """Whether a row with these cells runs `file`: what it is about is `behaviour` there, or it is of all features."""
    ability = ability_of(framework, file, cells)
    return ability is None or (ability in cells and cells[ability].tested == "behaviour")
