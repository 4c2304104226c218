"""What each environment variable is for, in the words of README, the reference and `wanshim features`.

`wanshim.settings.VARIABLES` says which there are and reads them; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from wanshim import settings
from wanshim.patching.feature import Feature
from wanshim.patching.probe import SourceTree


@dataclass(frozen=True)
class Variable:
    """One variable, for people.

    Args:
        task: what a user wants to do; a key of TASKS.
        example: a value that can be typed as it stands.
        meaning: what it does; the values it takes are named.
        read_by: abilities that read it, beside those that it switches on.
    """

    task: str
    example: str
    meaning: str
    read_by: tuple[str, ...] = ()


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
# By the field of wanshim.settings.Settings. Variables of other projects that wanshim reads are not here.
VARIABLES = {
    "plan": Variable(
        "train one sample on several GPUs",
        "sequence",
        "How a DiffSynth training job uses its GPUs. `sequence`, or `sequence:4` for groups of four processes: each "
        "group trains one sample together; `wanshim run --gpus 2` sets it, and `--gpus 1` sets `auto`. `split`: one "
        "process, blocks over its GPUs. "
        "`pipeline`: a split that trains several micro-batches at once. `stream`, or `stream:20` for 20 blocks: one "
        "process a GPU, frozen weights wait in host memory. `auto`: the report says which was chosen and why.",
    ),
    "devices": Variable(
        "train a model that fits no GPU",
        "cuda:0,cuda:1",
        "The GPUs that one process splits the model over, in the order of the blocks. Switches `model_split` on.",
    ),
    "split_at": Variable(
        "train a model that fits no GPU",
        "20",
        "The first block of each GPU after the first, such as `20` or `10,20,30`. Default: balanced by bytes.",
        read_by=("model_split",),
    ),
    "base": Variable(
        "use less memory in training",
        "float8",
        "`float8` or `int8`: the frozen weights of a split, or of sequence parallel, are stored in eight bits.",
        read_by=("model_split",),
    ),
    "pipeline": Variable(
        "train a model that fits no GPU",
        "0",
        "`0`: a split trains one micro-batch at a time, without a pipeline.",
        read_by=("model_split",),
    ),
    "offload": Variable(
        "use less memory in training",
        "on",
        "Gradient checkpoints wait in host memory: `on` always, `off` as DiffSynth does it, `auto` (the default) if "
        "DiffSynth's `--use_gradient_checkpointing_offload` asks for it or the step does not fit otherwise.",
    ),
    "chunk": Variable(
        "use less memory in training",
        "2048",
        "Parts of a block run in chunks of so many tokens; `off` never, `auto` (the default) if the step does not fit "
        "otherwise.",
        read_by=("model_split",),
    ),
    "keep": Variable(
        "make a training step faster",
        "blocks",
        "`attention`: backward does not compute self-attention again; `blocks`: nor the last blocks, as many as fit. "
        "No bit changes. `auto` (the default) keeps both in a planned run as far as there is room, `off` nothing.",
    ),
    "compile": Variable(
        "make a training step faster",
        "1",
        "`1`: the blocks of a Wan DiT train as one compiled graph; bits change.",
    ),
    "compute": Variable(
        "make a training step faster",
        "float8",
        "`float8` or `int8`: the frozen base of a Wan DiT multiplies in eight bits; bits change. "
        "`off` (the default): in its own dtype.",
    ),
    "fast": Variable(
        "make a training step faster",
        "1",
        "`1`: all that is faster and changes bits, wherever it is available: `WANSHIM_COMPILE=1`, "
        "`WANSHIM_COMPUTE=float8`, `WANSHIM_VAE_MODE=auto`, `WANSHIM_VAE_ENCODE=auto`, `WANSHIM_VAE_FAST=1`. Each of "
        "these still has its own say, as `0` or `off` too. `wanshim run --fast` sets it.",
        read_by=("compiled_blocks", "eight_bit_compute", "vae_decode", "vae_encode"),
    ),
    "generate": Variable(
        "generate on all GPUs",
        "2",
        "Over how many GPUs one process's pipeline denoises; `wanshim generate --gpus` sets it. Switches `generate` "
        "on. `cfg:2`: guidance alone, its two forwards at once, with equal bits; `sequence:3`: the tokens of each "
        "forward over three GPUs; `cfg:2,sequence:2`: both, over four.",
    ),
    "resume": Variable(
        "resume a training run",
        "auto",
        "A DiffSynth run saves its state and, started again, goes on from it: `auto` in the folder training_state of "
        "the output folder, or a folder; `new` begins anew beside what is there. `auto,+learning_rate` goes on with "
        "that difference from the state.",
    ),
    "save_every": Variable(
        "resume a training run",
        "10m",
        "When a state is saved: after so many optimizer steps, `500`, or so long, `90s`, `10m` (the default), `2h`; "
        "and at the end of each epoch.",
        read_by=("resume",),
    ),
    "vae_mode": Variable(
        "decode and encode on all GPUs",
        "auto",
        "How ranks share a decode: `auto`, `temporal`, `spatial`, `tile`, `off`. Switches `vae_decode` on.",
        read_by=("vae_decode", "vae_allowlist"),  # vLLM-Omni's, which it does not switch on
    ),
    "vae_encode": Variable(
        "decode and encode on all GPUs",
        "auto",
        "How ranks share an encode: `auto`, `temporal`, `spatial`, `off`. Switches `vae_encode` on.",
        read_by=("vae_encode",),
    ),
    "vae_fast": Variable(
        "decode and encode on all GPUs",
        "1",
        "`1`: fast operators, whose results are close to the framework's; otherwise strict ones, equal bit for bit.",
        read_by=("vae_decode", "vae_encode"),
    ),
    "vae_engines": Variable(
        "decode and encode on all GPUs",
        "0",
        "`0`: convolutions run by the engine that torch takes; by default cuDNN's engines are timed once on this GPU.",
        read_by=("vae_decode", "vae_encode"),
    ),
    "cache_dir": Variable(
        "encode prompts once",
        "~/.cache/wanshim/encoding",
        "Where encoded prompts are kept: a folder that only you can write. Switches `fastvideo.prompt_cache` on.",
    ),
    "encode_on": Variable(
        "encode prompts once",
        "most_free",
        "Where prompts are encoded: `auto` or `local` (the rank's own device), `cpu`, `most_free`, or a device.",
        read_by=("negative_prompt", "prompt_cache"),
    ),
    "encode_on_cpu": Variable(
        "use less memory in training",
        "1",
        "`1`, with a model split: DiffSynth's text encoder stays on the CPU and works there.",
        read_by=("model_split",),
    ),
    "encode_timeout_s": Variable(
        "wait longer, or not so long",
        "1800",
        "Seconds that ranks wait for the rank that encodes.",
        read_by=("negative_prompt", "prompt_cache"),
    ),
    "vae_timeout_s": Variable(
        "wait longer, or not so long",
        "600",
        "Seconds that a rank waits for the others to make the same decode or encode; 120 by default.",
        read_by=("vae_decode", "vae_encode"),
    ),
    "pg_timeout_s": Variable(
        "wait longer, or not so long",
        "3600",
        "The timeout, in seconds, of process groups whose caller names none. Switches `torch.pg_timeout` on.",
    ),
    "progress_dir": Variable(
        "watch a run",
        "training_logs",
        "Where a training run is logged for `wanshim monitor`. Switches `progress` on.",
    ),
    "monitor_token": Variable(
        "watch a run",
        "a-long-secret",
        "What `wanshim monitor --serve` asks for on another address than 127.0.0.1.",
    ),
    "features": Variable(
        "choose what is on",
        "auto,-diffsynth.fp8_lora",
        "Which features are on: `auto` (the default), `all` or `none`, then names, each with `-` to leave it out.",
    ),
    "disable": Variable("choose what is on", "1", "`1`: nothing at all happens."),
    "strict": Variable(
        "choose what is on", "1", "`1`: a selected feature that is unavailable ends the program with the error."
    ),
    "report": Variable(
        "choose what is on",
        "1",
        "`1`: each process reports on standard error what is on and what ran; `wanshim run` sets it.",
    ),
}


# Of a split, where the plan gives each process one device.
OF_A_SPLIT = ("split_at", "pipeline", "devices")


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
        if getattr(read, field) in (None, False) and any(field in feature.switches for feature in readers):
            continue  # it is to be off
        here = [feature for feature in readers if _is_here(feature)]
        if readers and not here:
            lines.append(f"{variable} has no effect, since no package {readers[0].framework} is installed here")
        elif here and not any(feature.name in selected for feature in here):
            off = " and ".join(feature.name for feature in here)
            ways = " or ".join(dict.fromkeys(way for feature in here for way in turn_on(feature)))
            lines.append(f"{variable} has no effect, since {off} is off. Turn on: {ways}")
        elif field in OF_A_SPLIT and read.plan is not None and read.plan.name in ("stream", "sequence"):
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


def names(field: str) -> list[str]:
    """The variables that set a field, wanshim's own first, then the aliases of the upstream pull requests."""
    aliases = [settings.DUAL_GPU] if field == "devices" else []
    return [*settings.VARIABLES[field][0], *aliases]


def assignment(field: str) -> str:
    """`WANSHIM_DEVICES=cuda:0,cuda:1`: what a user types to turn on what the field turns on."""
    return f"{names(field)[0]}={VARIABLES[field].example}"


def turn_on(feature: Feature) -> list[str]:
    """What a user types for a feature that is off: each of its variables, or else its name."""
    return [assignment(field) for field in feature.switches] or [f"wanshim run -f {feature.name} -- ..."]
