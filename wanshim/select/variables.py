"""Environment variables by what a user wants to do, and those that have no effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from wanshim import settings
from wanshim.patching.feature import Feature
from wanshim.patching.probe import SourceTree

# task -> the page of docs/ that explains it, in the order of README.
TASKS = {
    "train one sample on several GPUs": "how-to/train_on_several_gpus.md",
    "train a model that fits no GPU": "how-to/train_large_model.md",
    "make a training step faster": "explanation/training_step.md",
    "use less memory in training": "how-to/train_large_model.md",
    "generate on all GPUs": "how-to/generate.md",
    "decode and encode on all GPUs": "how-to/decode.md",
    "encode prompts once": "how-to/fastvideo.md",
    "resume a training run": "how-to/resume.md",
    "watch a run": "how-to/watch.md",
    "wait longer, or not so long": "explanation/prompt_encoding.md",
    "choose what is on": "reference/variables.md",
}
# By field; other projects' variables are not here.
VARIABLES = {field: variable for field, variable in settings.VARIABLES.items() if variable.task}


def without_effect(read: settings.Settings, selected: Collection[str], known: Mapping[str, Feature]) -> list[str]:
    """A sentence for each variable that is set and that nothing reads in this combination.

    Args:
        selected: the features that are on.
        known: all features by name.
    """
    lines = []
    for field in VARIABLES.keys() & read.sources.keys():
        variable, readers = read.sources[field], _readers(field, known)
        if field != "fast" and variable == settings.FAST:
            continue  # what the word set is no variable of the user's
        if not read.is_on(field):
            continue  # it is off already where nothing reads it
        here = [feature for feature in readers if _is_here(feature)]
        if readers and not here:
            lines.append(f"{variable} has no effect, since no package {readers[0].framework} is installed here")
        elif here and not any(feature.name in selected for feature in here):
            off = " and ".join(feature.name for feature in here)
            if any(feature.switched(read) or feature.is_auto(read) for feature in here):
                lines.append(f"{variable} has no effect, since WANSHIM_FEATURES, -f or activate() leaves out {off}")
                continue
            ways = " or ".join(dict.fromkeys(way for feature in here for way in turn_on(feature)))
            lines.append(f"{variable} has no effect, since {off} is off. Turn on: {ways}")
        elif VARIABLES[field].only_split and read.plan_name in ("stream", "sequence"):
            lines.append(f"{variable} has no effect with {read.sources['plan']}: it is for a split")
    return sorted(lines)


def _readers(field: str, known: Mapping[str, Feature]) -> list[Feature]:
    """The features that read it. A switch reports by itself that its framework is not installed."""
    abilities = VARIABLES[field].read_by
    readers = [one for one in known.values() if one.ability in abilities or field in one.switches]
    is_switch = any(field in one.switches for one in readers)
    return [one for one in readers if _is_here(one) or not is_switch]


def _is_here(feature: Feature) -> bool:
    return SourceTree.of_installed(feature.framework).root is not None


def assignment(field: str) -> str:
    """`WANSHIM_DEVICES=cuda:0,cuda:1`: what a user types to turn on what the field turns on."""
    return settings.assigned(field, VARIABLES[field].example)


def turn_on(feature: Feature) -> list[str]:
    """The text that a user types for a feature that is off: each of its variables, or else its name."""
    beside = f"{assignment(feature.along_with)} " if feature.along_with else ""
    switches = (*feature.switches, *filter(None, (feature.auto_with,)))
    return [beside + assignment(field) for field in switches] or [f"wanshim run -f {feature.name} -- ..."]
