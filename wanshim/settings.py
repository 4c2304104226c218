"""Every environment variable wanshim reads, read in this one place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from wanshim.errors import DeadlineInvalid, SettingInvalid

T = TypeVar("T")

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off", "")
BASES = ("float8", "int8")  # those of wanshim.core.model_split.quantize
COMPUTES = ("float8", "int8")  # those of wanshim.core.eight_bit
# Those of wanshim.core.strategy.job.Strategy, as a user names them.
PLANS = ("auto", "pipeline", "split", "stream", "sequence")
FEWEST = {"stream": 1, "sequence": 2}  # plans that take a number, and the smallest
OFFLOADS = ("auto", "on", "off")
KEEPS = ("auto", "attention", "blocks", "off")
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
VAE_MODES = ("auto", "temporal", "spatial", "tile", "off")
VAE_ENCODES = ("auto", "temporal", "spatial", "off")


@dataclass(frozen=True)
class WantedPlan:
    """How to train over several GPUs: one of PLANS.

    Args:
        count: of `stream:20`, the blocks that wait on the host; of `sequence:4`, the ranks of a group.
    """

    name: str
    count: int | None = None


@dataclass(frozen=True)
class WantedGeneration:
    """Over how many GPUs a pipeline denoises.

    Args:
        gpus: in all.
        at_most: over how many of them the forwards of guidance go, and the tokens of each; None: as many as there are.
    """

    gpus: int
    at_most: tuple[int, int] | None = None


@dataclass(frozen=True)
class WantedResume:
    """Where a run keeps its states and goes on from them.

    Args:
        folder: None: in the run's output folder.
        anew: begin a new run beside those that are there.
        accepted: differences from the state that the user accepts, by name.
    """

    folder: str | None = None
    anew: bool = False
    accepted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SaveEvery:
    """How often a state is saved: after so many steps, or seconds."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Settings:
    """The environment as wanshim understands it. `sources` says which variable gave a value."""

    features: str | None = None
    disable: bool = False
    strict: bool = False
    devices: tuple[str, ...] | None = None
    split_at: tuple[int, ...] | None = None
    vae_mode: str | None = None
    vae_encode: str | None = None
    vae_fast: bool = False
    vae_engines: bool = True
    vae_timeout_s: float | None = None
    pg_timeout_s: float | None = None
    local_world_size: int | None = None  # None: the launcher does not say
    cache_dir: str | None = None
    encode_on: str = "auto"
    encode_timeout_s: float | None = None
    local_rank: int = 0
    report: bool = False
    progress_dir: str | None = None
    monitor_token: str | None = None
    pipeline: bool = True
    encode_on_cpu: bool = False
    base: str | None = None
    chunk: str | int = "auto"
    offload: str = "auto"
    keep: str = "auto"
    compile: bool = False
    compute: str | None = None
    fast: bool = False
    expandable_segments: bool = False
    plan: WantedPlan | None = None
    generate: WantedGeneration | None = None
    resume: WantedResume | None = None
    save_every: SaveEvery = SaveEvery(seconds=600.0)
    engine: str | None = None  # one of ENGINES
    sources: Mapping[str, str] = field(default_factory=dict)

    def is_on(self, field: str) -> bool:
        """Whether a variable is set for the field, to a value that does not switch off."""
        return field in self.sources and getattr(self, field) != VARIABLES[field].off

    @property
    def plan_name(self) -> str | None:
        return self.plan.name if self.plan is not None else None

    @property
    def plan_count(self) -> int | None:
        """The number named with the plan."""
        return self.plan.count if self.plan is not None else None


def is_off(text: str) -> bool:
    """Whether a variable's text switches off; one of spaces alone is a typing error."""
    return text.strip().lower() in FALSE and bool(text.strip())


def _boolean(name: str, value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in TRUE or lowered in FALSE:
        return lowered in TRUE
    raise SettingInvalid(f"{name}={value!r}", expected="1 or 0 (true/false, yes/no, on/off)")


def _devices(name: str, value: str) -> tuple[str, ...]:
    devices = tuple(part.strip() for part in value.split(",") if part.strip())
    if not devices:
        raise SettingInvalid(f"{name}={value!r}", expected="devices, such as cuda:0,cuda:1")
    return devices


def _split_points(name: str, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise SettingInvalid(
            f"{name}={value!r}", expected="block numbers at which a new stage begins, such as 20 or 10,20,30"
        ) from None


def _one_of(choices: tuple[str, ...]) -> Callable[[str, str], str]:
    def parse(name: str, value: str) -> str:
        lowered = value.strip().lower()
        if lowered in choices:
            return lowered
        raise SettingInvalid(f"{name}={value!r}", expected="one of " + ", ".join(choices))

    return parse


def _seconds(name: str, value: str) -> float:
    from wanshim.core.shared.deadline import EXPECTED, checked_seconds

    try:
        return checked_seconds(float(value), name)
    except ValueError:
        raise DeadlineInvalid(f"{name}={value!r}", expected=EXPECTED) from None


def _count(name: str, value: str) -> int:
    if value.strip().isdecimal() and int(value) > 0:
        return int(value)
    raise SettingInvalid(f"{name}={value!r}", expected="a whole number above zero")


def _rank(name: str, value: str) -> int:
    if value.strip().isdecimal():
        return int(value)
    raise SettingInvalid(f"{name}={value!r}", expected="a rank: a whole number from zero")


def _chunk(name: str, value: str) -> str | int:
    lowered = value.strip().lower()
    if lowered in ("auto", "off"):
        return lowered
    if lowered.isdecimal() and int(lowered) > 0:
        return int(lowered)
    raise SettingInvalid(f"{name}={value!r}", expected="auto, off, or tokens a chunk, such as 2048")


def _plan(name: str, value: str) -> WantedPlan:
    plan, _, count = value.strip().lower().partition(":")
    if plan in PLANS and (not count or (plan in FEWEST and count.isdecimal() and int(count) >= FEWEST[plan])):
        return WantedPlan(plan, int(count) if count else None)
    raise SettingInvalid(
        f"{name}={value!r}",
        expected=f"one of {', '.join(PLANS)}, or with a number: stream:20 for 20 streamed blocks, "
        "sequence:2 for groups of 2 processes",
    )


def generation(name: str, value: str) -> WantedGeneration:
    """A number of GPUs, or what goes over them."""
    text = value.strip().lower()
    if text.isdecimal() and int(text) > 0:
        return WantedGeneration(int(text))
    parts = [part.strip().partition(":")[::2] for part in text.split(",")]
    over = {"cfg": "1", "sequence": "1", **dict(parts)}
    if len(over) > 2 or len({part for part, _ in parts}) < len(parts) or not _are_counts(over):
        raise SettingInvalid(
            f"{name}={value!r}",
            expected="a number of GPUs, such as 4, or what goes over them: cfg:2, the two forwards of guidance, "
            "sequence:3, the tokens of a forward, or cfg:2,sequence:2",
        )
    guidance, sequence = int(over["cfg"]), int(over["sequence"])
    return WantedGeneration(guidance * sequence, (guidance, sequence))


def _are_counts(over: Mapping[str, str]) -> bool:
    return all(count.isdecimal() and int(count) > 0 for count in over.values()) and int(over["cfg"]) <= 2


def _resume(name: str, value: str) -> WantedResume:
    where, *accepted = (part.strip() for part in value.split(",+"))
    is_word = where in ("auto", "new")
    if not (is_word or "/" in where) or not all(accepted):  # else a typing error, or `off`, were a folder's name
        raise SettingInvalid(
            f"{name}={value!r}",
            expected="auto, new or a folder with a slash, ./states, and differences to accept: auto,+learning_rate",
        )
    folder = None if is_word else _path(name, where)
    return WantedResume(folder, "new" in (where, *accepted), frozenset(accepted))


def _save_every(name: str, value: str) -> SaveEvery:
    number, unit = value.strip().lower(), ""
    if number[-1:] in SECONDS:
        number, unit = number[:-1], number[-1]
    if number.isdecimal() and int(number) > 0:
        return SaveEvery(seconds=int(number) * SECONDS[unit]) if unit else SaveEvery(steps=int(number))
    raise SettingInvalid(
        f"{name}={value!r}", expected="optimizer steps, such as 500, or a time, such as 90s, 10m or 2h"
    )


def _expandable(name: str, value: str) -> bool:
    return "expandable_segments:true" in value.lower().replace(" ", "")


def _text(name: str, value: str) -> str:
    return value


def _path(name: str, value: str) -> str:
    """A path, with `~` as a shell reads it: a Dockerfile's ENV and a service's settings know no shell."""
    if not value.strip():
        raise SettingInvalid(f"{name}={value!r}", expected="a path, or nothing at all")
    try:
        return str(Path(value).expanduser())
    except RuntimeError:
        raise SettingInvalid(f"{name}={value!r}", expected="a path; no home directory is known for this one") from None


@dataclass(frozen=True)
class Variable:
    """What sets one field of `Settings`, for `read` and for people.

    Args:
        parse: the field's value, of the variable's name and text.
        task: what a user wants to do; a key of `wanshim.select.variables.TASKS`. Other projects' variables have none.
        example: a value that can be typed as it stands.
        meaning: what it does; the values it takes are named.
        off: the field's value for the words of FALSE, which every variable of wanshim's own takes: it selects nothing.
        read_by: abilities that read it, beside those that it switches on.
        aliases: other names, of the upstream pull requests (modelscope/DiffSynth-Studio#1434, #1436).
        foreign: another project's variables, where wanshim has none of its own.
    """

    parse: Callable[[str, str], object]
    task: str = ""
    example: str = ""
    meaning: str = ""
    off: object = None
    read_by: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def value_of(self, name: str, text: str) -> object:
        """The field's value: `off` for a word that switches off, else what the grammar makes of the text."""
        return self.off if not self.foreign and is_off(text) else self.parse(name, text)


PREFIX = "WANSHIM_"
DISABLE = "WANSHIM_DISABLE"
DUAL_GPU = "DIFFSYNTH_DUAL_GPU"
RUN_PREFIX = "WANSHIM_RUN_PREFIX"  # set by `wanshim run`: whose Python it belongs to
# Set by `wanshim run`: the file in which a rank says what ended it, and beside it the one of `mark_reached`; with
# `--gpus`, the number of the rank and of all ranks, as in 0/2.
RUN_FAILURE, RUN_RANK = "WANSHIM_RUN_FAILURE", "WANSHIM_RUN_RANK"
INHERITED = "WANSHIM_INHERITED"  # set by activate() for the processes that this one starts, removed by deactivate()
# For wanshim's own processes, and for the benchmarks and tests of a checkout.
OWN = (RUN_PREFIX, RUN_FAILURE, RUN_RANK, INHERITED)
OF_THE_CHECKOUT = ("WANSHIM_COMMIT", "WANSHIM_TEST_ROW", "WANSHIM_TEST_FASTVIDEO_TREE")
FEATURES = "WANSHIM_FEATURES"
PLAN = "WANSHIM_PLAN"
DEVICES = "WANSHIM_DEVICES"
GENERATE = "WANSHIM_GENERATE"
KEEP = "WANSHIM_KEEP"
FAST = "WANSHIM_FAST"
# What the one word sets that no variable of its own does: all of it changes bits.
FAST_FIELDS = {"compile": True, "compute": "float8", "vae_mode": "auto", "vae_encode": "auto", "vae_fast": True}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
# What accelerate can give the parameters to, and how its processes know.
ENGINES = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}
PLANNING = ("plan", "devices")  # fields that ask for a plan
# By field of `Settings`.
VARIABLES: Mapping[str, Variable] = {
    # Variables of wanshim's own, in the order of README.
    "plan": Variable(
        _plan,
        "train one sample on several GPUs",
        "sequence",
        "How a DiffSynth training job uses its GPUs. `sequence`, or `sequence:4` for groups of four processes: each "
        "group trains one sample together; `wanshim run --gpus 2` sets it, and `--gpus 1` sets `auto`. `split`: one "
        "process, blocks over its GPUs. "
        "`pipeline`: a split that trains several micro-batches at once. `stream`, or `stream:20` for 20 blocks: one "
        "process a GPU, frozen weights wait in host memory. `auto`: the report says which was chosen and why.",
    ),
    "devices": Variable(
        _devices,
        "train a model that fits no GPU",
        "cuda:0,cuda:1",
        "The GPUs that one process splits the model over, in the order of the blocks. Switches `model_split` on.",
    ),
    "split_at": Variable(
        _split_points,
        "train a model that fits no GPU",
        "20",
        "The first block of each GPU after the first, such as `20` or `10,20,30`. Default: balanced by bytes.",
        read_by=("model_split",),
        aliases=("DIFFSYNTH_DUAL_GPU_SPLIT_AT",),
    ),
    "base": Variable(
        _one_of(BASES),
        "use less memory in training",
        "float8",
        "`float8` or `int8`: the frozen weights of a split, or of sequence parallel, are stored in eight bits.",
        read_by=("model_split",),
    ),
    "pipeline": Variable(
        _boolean,
        "train a model that fits no GPU",
        "0",
        "`0`: a split trains one micro-batch at a time, without a pipeline.",
        off=False,
        read_by=("model_split",),
    ),
    "offload": Variable(
        _one_of(OFFLOADS),
        "use less memory in training",
        "on",
        "Gradient checkpoints wait in host memory: `on` always, `off` as DiffSynth does it, `auto` (the default) if "
        "DiffSynth's `--use_gradient_checkpointing_offload` asks for it, the step does not fit otherwise, or "
        "attention can be kept that way (where blocks are streamed or one process trains on the host, in half of the "
        "free host memory).",
        off="off",
    ),
    "chunk": Variable(
        _chunk,
        "use less memory in training",
        "2048",
        "Parts of a block run in chunks of so many tokens; `off` never, `auto` (the default) if the step does not fit "
        "otherwise.",
        off="off",
        read_by=("model_split",),
    ),
    "keep": Variable(
        _one_of(KEEPS),
        "make a training step faster",
        "blocks",
        "`attention`: backward does not compute self-attention again; `blocks`: nor the last blocks, as many as fit. "
        "No bit changes. `auto` (the default) keeps both in a planned run as far as there is room, `off` nothing.",
        off="off",
    ),
    "compile": Variable(
        _boolean,
        "make a training step faster",
        "1",
        "`1`: the blocks of a Wan DiT train as one compiled graph; bits change.",
        off=False,
    ),
    "compute": Variable(
        _one_of((*COMPUTES, "off")),
        "make a training step faster",
        "float8",
        "`float8` or `int8`: the frozen base of a Wan DiT multiplies in eight bits; bits change. "
        "`off` (the default): in its own dtype.",
    ),
    "fast": Variable(
        _boolean,
        "make a training step faster",
        "1",
        "`1`: all that is faster and changes bits, wherever it is available: `WANSHIM_COMPILE=1`, "
        "`WANSHIM_COMPUTE=float8`, `WANSHIM_VAE_MODE=auto`, `WANSHIM_VAE_ENCODE=auto`, `WANSHIM_VAE_FAST=1`. Each of "
        "these still has its own say, as `0` or `off` too. `wanshim run --fast` sets it.",
        off=False,
        read_by=("compiled_blocks", "eight_bit_compute", "vae_decode", "vae_encode"),
    ),
    "generate": Variable(
        generation,
        "generate on all GPUs",
        "2",
        "Over how many GPUs one process's pipeline denoises; `wanshim generate --gpus` sets it. Switches `generate` "
        "on. `cfg:2`: guidance alone, its two forwards at once, with equal bits; `sequence:3`: the tokens of each "
        "forward over three GPUs; `cfg:2,sequence:2`: both, over four.",
    ),
    "resume": Variable(
        _resume,
        "resume a training run",
        "auto",
        "A DiffSynth run saves its state and, started again, goes on from it: `auto` in the folder training_state of "
        "the output folder, or a folder, `./states`; `new` begins anew beside what is there. `auto,+learning_rate` "
        "goes on with that difference from the state.",
    ),
    "save_every": Variable(
        _save_every,
        "resume a training run",
        "10m",
        "When a state is saved: after so many optimizer steps, `500`, or so long, `90s`, `10m` (the default), `2h`; "
        "and at the end of each epoch.",
        off=SaveEvery(),
        read_by=("resume",),
    ),
    "vae_mode": Variable(
        _one_of(VAE_MODES),
        "decode and encode on all GPUs",
        "auto",
        "How ranks share a decode: `auto`, `temporal`, `spatial`, `tile`, `off`. Switches `vae_decode` on, but not "
        "`vllm_omni.vae_decode`, which `WANSHIM_FEATURES` names.",
        off="off",
        read_by=("vae_decode", "vae_allowlist"),  # vLLM-Omni's, which it does not switch on
    ),
    "vae_encode": Variable(
        _one_of(VAE_ENCODES),
        "decode and encode on all GPUs",
        "auto",
        "How ranks share an encode: `auto`, `temporal`, `spatial`, `off`. Switches `vae_encode` on, but not "
        "`vllm_omni.vae_encode`, which `WANSHIM_FEATURES` names.",
        off="off",
        read_by=("vae_encode",),
    ),
    "vae_fast": Variable(
        _boolean,
        "decode and encode on all GPUs",
        "1",
        "`1`: fast operators, whose results are close to the framework's; otherwise strict ones, equal bit for bit.",
        off=False,
        read_by=("vae_decode", "vae_encode"),
    ),
    "vae_engines": Variable(
        _boolean,
        "decode and encode on all GPUs",
        "0",
        "`0`: convolutions run by the engine that torch takes; by default cuDNN's engines are timed once on this GPU.",
        off=False,
        read_by=("vae_decode", "vae_encode"),
    ),
    "cache_dir": Variable(
        _path,
        "encode prompts once",
        "~/.cache/wanshim/encoding",
        "Where encoded prompts are kept: a folder that only you can write. Switches `fastvideo.prompt_cache` on.",
    ),
    "encode_on": Variable(
        _text,
        "encode prompts once",
        "most_free",
        "Where prompts are encoded: `auto` or `local` (the rank's own device), `cpu`, `most_free`, or a device.",
        off="auto",
        read_by=("negative_prompt", "prompt_cache"),
    ),
    "encode_on_cpu": Variable(
        _boolean,
        "use less memory in training",
        "1",
        "`1`, with a model split: DiffSynth's text encoder stays on the CPU and works there.",
        off=False,
        read_by=("model_split",),
        aliases=("DIFFSYNTH_DATA_PROCESS_ON_CPU",),
    ),
    "encode_timeout_s": Variable(
        _seconds,
        "wait longer, or not so long",
        "1800",
        "Seconds that ranks wait for the rank that encodes.",
        read_by=("negative_prompt", "prompt_cache"),
    ),
    "vae_timeout_s": Variable(
        _seconds,
        "wait longer, or not so long",
        "600",
        "Seconds that a rank waits for the others to make the same decode or encode; 120 by default.",
        read_by=("vae_decode", "vae_encode"),
    ),
    "pg_timeout_s": Variable(
        _seconds,
        "wait longer, or not so long",
        "3600",
        "The timeout, in seconds, of process groups whose caller names none. Switches `torch.pg_timeout` on.",
    ),
    "progress_dir": Variable(
        _path,
        "watch a run",
        "training_logs",
        "Where a training run is logged for `wanshim monitor`. Switches `progress` on.",
    ),
    "monitor_token": Variable(
        _text,
        "watch a run",
        "a-long-secret",
        "What `wanshim monitor --serve` asks for: needed on another address than 127.0.0.1, and behind a proxy.",
    ),
    "features": Variable(
        _text,
        "choose what is on",
        "auto,-diffsynth.fp8_lora",
        "Which features are on: `auto` (the default), `all` or `none`, then names, each with `-` to leave it out.",
        off="none",
    ),
    "disable": Variable(_boolean, "choose what is on", "1", "`1`: nothing at all happens.", off=False),
    "strict": Variable(
        _boolean,
        "choose what is on",
        "1",
        "`1`: a selected feature that is unavailable ends the program with the error.",
        off=False,
    ),
    "report": Variable(
        _boolean,
        "choose what is on",
        "1",
        "`1`: each process that patches something reports on standard error what is on, and at its end or on SIGUSR2 "
        "what ran; `wanshim run` sets it.",
        off=False,
    ),
    # Of torchrun and torch.
    "local_world_size": Variable(_count, foreign=("LOCAL_WORLD_SIZE",)),
    "local_rank": Variable(_rank, foreign=("LOCAL_RANK",)),
    "expandable_segments": Variable(_expandable, foreign=ALLOCATOR),
}


def names_of(field: str) -> tuple[str, ...]:
    """The variables that set a field, of which the first that is set counts."""
    return VARIABLES[field].foreign or (f"{PREFIX}{field.upper()}", *VARIABLES[field].aliases)


def read(environ: Mapping[str, str] | None = None, *, fast: bool = False) -> Settings:
    """Read the environment.

    Args:
        environ: variables by name; default `os.environ`. An empty value counts as unset. Under
            WANSHIM_DISABLE nothing else is read, so that no other variable can fail.
        fast: as WANSHIM_FAST=1.

    Raises:
        SettingInvalid: a variable has a value outside its grammar, or two contradict each other; the message names
            both.
    """
    environ = dict(os.environ if environ is None else environ) | ({FAST: "1"} if fast else {})
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    if environ.get(DISABLE) and _boolean(DISABLE, environ[DISABLE]):
        return Settings(disable=True, fast=fast, sources={"disable": DISABLE})
    for attribute, variable in VARIABLES.items():
        name = next((name for name in names_of(attribute) if environ.get(name)), None)
        if name is not None:
            values[attribute] = variable.value_of(name, environ[name])
            sources[attribute] = name
    if "devices" not in values and environ.get(DUAL_GPU) and _boolean(DUAL_GPU, environ[DUAL_GPU]):
        values["devices"], sources["devices"] = ("cuda:0", "cuda:1"), DUAL_GPU
    if values.get("fast"):
        unset = FAST_FIELDS.keys() - sources.keys()
        values |= {field: FAST_FIELDS[field] for field in unset}
        sources |= dict.fromkeys(unset, FAST)
        if "compute" in unset:  # a base is multiplied in the format that it is stored in
            values["compute"] = values.get("base") or FAST_FIELDS["compute"]
    engine = engine_of(environ, launched="LOCAL_RANK" in environ)
    read = Settings(**values, engine=engine, sources=sources)  # type: ignore[arg-type]
    if read.plan_name == "sequence" and read.devices is not None:
        raise SettingInvalid(
            f"{PLAN}={environ[PLAN]} and {sources['devices']}",
            expected="one of the two: a process for each GPU, or one process over all devices",
        )
    return read


def engine_of(environ: Mapping[str, str] | None = None, *, launched: bool) -> str | None:
    """What accelerate gives the parameters to, by its variables: FSDP in processes of a launcher alone."""
    environ = os.environ if environ is None else environ
    named = (engine for engine, name in ENGINES.items() if environ.get(name, "").lower() == "true")
    return next((engine for engine in named if launched or engine != "FSDP"), None)


def hand_down(text: str | None) -> None:
    """Have processes that this one starts carry the same features, where `wanshim run` or a plugin reaches them.

    Args:
        text: the argument of `activate`, which beats WANSHIM_FEATURES there too; None: they read WANSHIM_FEATURES.
    """
    os.environ[INHERITED] = FEATURES if text is None else text or "auto"


def hand_down_nothing() -> None:
    """Take `hand_down` and `expand_segments` back."""
    os.environ.pop(INHERITED, None)
    while _own_allocator:
        name, before, set_to = _own_allocator.pop()
        if os.environ.get(name) != set_to:
            continue  # somebody else has written it since
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_own_allocator: list[tuple[str, str | None, str]] = []  # what `expand_segments` wrote: name, value before, value


def expand_segments(read: Settings, torch_started: bool, root: Path = Path("/")) -> Settings:
    """Have torch's allocator leave few gaps between tensors, in this process and those that it starts. Once torch has
    started it is too late; and what the user says of expandable segments, or of another allocator, stays. A GPU that
    another system lends (WSL2) or that is divided (MIG) may refuse the driver's virtual memory, at the first tensor or
    at a later one, which torch does not survive: see pytorch issue 192330.

    Args:
        root: where /dev and /proc are.

    Returns:
        the settings with what holds now.
    """
    name = next((name for name in ALLOCATOR if os.environ.get(name)), ALLOCATOR[-1])
    before = os.environ.get(name)
    if torch_started or any(word in (before or "").lower() for word in ("expandable_segments", "cudamallocasync")):
        return read
    if (root / "dev/dxg").exists() or any(root.glob("proc/driver/nvidia/capabilities/gpu*/mig/gi*")):
        return read
    os.environ[name] = f"{before},{EXPANDABLE}" if before else EXPANDABLE
    _own_allocator.append((name, before, os.environ[name]))
    return replace(read, expandable_segments=True)


def inherited() -> str | None:
    """The text that a parent gave `activate`; None where it gave none, or there is no such parent."""
    text = os.environ.get(INHERITED)
    return None if text == FEATURES else text or None


def has_parent() -> bool:
    """Whether `wanshim run`, or a process that was activated, has started this one, and has looked at its variables."""
    return any(os.environ.get(name) for name in (INHERITED, RUN_PREFIX))


def has_python_parent() -> bool:
    """Whether a Python process that was activated has started this one; to be asked before `activate`."""
    return INHERITED in os.environ


def run_rank() -> tuple[int, int] | None:
    """The number of this process's rank and of all ranks, in a job of `wanshim run --gpus`."""
    rank, _, count = os.environ.get(RUN_RANK, "").partition("/")
    return (int(rank), int(count)) if rank.isdecimal() and count.isdecimal() else None


def numbered() -> tuple[int, int] | None:
    """The rank of this process and the number of ranks as torch reads them."""
    rank, count = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return (int(rank), int(count)) if rank.isdecimal() and count.isdecimal() else None


def is_program() -> bool:
    """Whether this process is the program of `wanshim run`, perhaps behind `uv run`, and none that it starts."""
    return program_pid() == os.getpid()


_claimed: list[int] = []


def claim_program() -> bool:
    """`is_program`, for what a program starts once: True at the first call alone."""
    first = is_program() and os.getpid() not in _claimed
    _claimed.append(os.getpid())
    return first


def is_rank() -> bool:
    """Whether this process is the program of a rank of `wanshim run --gpus`."""
    return run_rank() is not None and is_program()


def launched() -> tuple[int, int] | None:
    """The local rank of this process and the number of them, if its launcher names both now: a process that was forked
    since the settings were read may have got others."""
    rank, size = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    rank = rank or "0"
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        return None
    return int(rank), int(size)


def is_one_of_several() -> bool:
    """Whether a launcher has started this process as one of several, as it says now."""
    return any(os.environ.get(name, "") not in ("", "0", "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))


def has_run() -> bool:
    """Whether `wanshim run` or `wanshim generate` has started this process or one above it."""
    return bool(os.environ.get(RUN_PREFIX))


def failure_file() -> Path:
    """Where a rank that `wanshim run --gpus` started says what ended it."""
    return Path(os.environ[RUN_FAILURE])


def mark_reached() -> None:
    """Leave a file that says to `wanshim run` that wanshim is in its command, and which process is the program: the
    last one that no Python with wanshim has started, since a recipe has several in turn."""
    if os.environ.get(RUN_FAILURE) and not has_python_parent():
        failure = failure_file()
        with suppress(OSError):  # this process outlives the launcher, or is on another machine
            failure.unlink(missing_ok=True)  # of the program before
            whole = failure.with_suffix(f".{os.getpid()}")
            whole.write_text(str(os.getpid()))
            whole.replace(reached_file(failure))


def leave_rank() -> None:
    """Take `mark_reached` of a rank back, for a program that this process starts in its place."""
    if is_rank():
        reached_file(failure_file()).unlink(missing_ok=True)


def program_pid() -> int | None:
    """The process of `mark_reached`; None: there is none yet, or no `wanshim run`."""
    try:
        return int(reached_file(failure_file()).read_text())
    except (OSError, KeyError, ValueError):
        return None


def reached_file(failure: Path) -> Path:
    """The file of `mark_reached`, of the rank with that `failure_file`."""
    return failure.with_suffix(".reached")


def asked_for() -> bool:
    """Whether a parent was activated, or WANSHIM_FEATURES or `wanshim run` asks for wanshim in this process."""
    return bool(os.environ.get(FEATURES)) or has_parent()


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each WANSHIM_ variable that is set and that nothing reads, with the known one nearest to it."""
    environ = os.environ if environ is None else environ
    known = [
        name.removeprefix(PREFIX) for attribute in VARIABLES for name in names_of(attribute) if name.startswith(PREFIX)
    ]
    others = {*OWN, *OF_THE_CHECKOUT}
    found = {name.removeprefix(PREFIX) for name in environ.keys() - others if name.startswith(PREFIX)}
    if found <= set(known):
        return []
    import difflib

    nearest = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.75) for name in sorted(found - set(known))}
    return [
        f"nothing reads {PREFIX}{name}"
        + (f"; did you mean {PREFIX}{near[0]}?" if near else ". `wanshim features` names what there is")
        for name, near in nearest.items()
    ]


# Other projects' variables: which processes wanshim reaches (wanshim.doctor.process_coverage), which GPUs are in sight,
# and what a rank works with.
FOREIGN = (
    "VLLM_PLUGINS",
    "PYTHONNOUSERSITE",
    "RAY_ADDRESS",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "CUDA_VISIBLE_DEVICES",
    "ACCELERATE_USE_CPU",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)


def differs(name: str, value: str) -> bool:
    """Whether a variable, of any project, has another value than this one here."""
    return os.environ.get(name) != value


def foreign() -> dict[str, str]:
    """Those of other projects that are set; an empty value is kept, as their owners keep it."""
    return {name: os.environ[name] for name in FOREIGN if name in os.environ}


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES; None if it is not set."""
    return foreign().get("CUDA_VISIBLE_DEVICES")


def runs_on_cpu() -> bool:
    """Whether accelerate is asked to leave the GPUs alone."""
    return foreign().get("ACCELERATE_USE_CPU", "").strip().lower() in TRUE
