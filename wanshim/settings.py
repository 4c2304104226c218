"""Every environment variable that a user sets, read in this one place.

`activate()` reads them once and hands each seam what it read, a frozen `Settings`: a variable that changes afterwards
has effect from the next `activate()` on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from wanshim.errors import SettingInvalid
from wanshim.values import EIGHT_BIT, EXPECTED_SECONDS, Strategy, checked_seconds

T = TypeVar("T")
Parse = Callable[[str, str], Any]  # the value, of a variable's name and text

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off", "")
PLANS = ("auto", *(strategy.value for strategy in Strategy if strategy is not Strategy.RESIDENT))
FEWEST = {"stream": 1, "sequence": 2}  # plans that take a number, and the smallest
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
VAE_MODES = ("auto", "temporal", "spatial", "tile", "off")

PREFIX = "WANSHIM_"
DISABLE = "WANSHIM_DISABLE"
DUAL_GPU = "DIFFSYNTH_DUAL_GPU"
FEATURES = "WANSHIM_FEATURES"
PLAN = "WANSHIM_PLAN"
DEVICES = "WANSHIM_DEVICES"
GENERATE = "WANSHIM_GENERATE"
FAST = "WANSHIM_FAST"
# Of wanshim's own processes (`wanshim.hand_over`), and of the benchmarks and tests of a checkout.
OWN = ("WANSHIM_RUN_PREFIX", "WANSHIM_RUN_FAILURE", "WANSHIM_RUN_RANK", "WANSHIM_RUN_OPTIONS", "WANSHIM_INHERITED")
OF_THE_CHECKOUT = ("WANSHIM_COMMIT", "WANSHIM_TEST_ROW", "WANSHIM_TEST_FASTVIDEO_TREE")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# What accelerate can give the parameters to, and how its processes know.
ENGINES = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}
PLANNING = ("plan", "devices")  # fields that ask for a plan


@dataclass(frozen=True)
class WantedPlan:
    """A plan for training over several GPUs: one of PLANS.

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
    """The place where a run keeps its states and goes on from them.

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
    """An interval after which a state is saved: so many steps, or seconds."""

    steps: int | None = None
    seconds: float | None = None


def is_off(text: str) -> bool:
    """Whether a variable's text switches off; one of spaces alone is a typing error."""
    return text.strip().lower() in FALSE and bool(text.strip())


def _grammar(expected: str) -> Callable[[Callable[[str], T]], Parse]:
    """Makes what reads a variable, given what reads a text without blanks around it: its ValueError names both."""

    def of(parse: Callable[[str], T]) -> Parse:
        def read(name: str, value: str) -> T:
            try:
                return parse(value.strip())
            except ValueError:
                raise SettingInvalid(f"{name}={value!r}", expected=expected) from None

        return read

    return of


def _whole(text: str, least: int = 1) -> int:
    if not (text.isdecimal() and int(text) >= least):  # int alone takes +1 and 1_000
        raise ValueError(text)
    return int(text)


@_grammar("1 or 0 (true/false, yes/no, on/off)")
def _boolean(text: str) -> bool:
    return (TRUE + FALSE).index(text.lower()) < len(TRUE)


def _devices(name: str, value: str) -> tuple[str, ...] | None:
    if name == DUAL_GPU:
        return ("cuda:0", "cuda:1") if _boolean(name, value) else None
    return _device_list(name, value)  # type: ignore[no-any-return]


@_grammar("devices, such as cuda:0,cuda:1")
def _device_list(text: str) -> tuple[str, ...]:
    devices = tuple(part.strip() for part in text.split(",") if part.strip())
    if not devices:
        raise ValueError(text)
    return devices


@_grammar("block numbers at which a new stage begins, such as 20 or 10,20,30")
def _split_points(text: str) -> tuple[int, ...]:
    return tuple(_whole(part.strip()) for part in text.split(","))


def _one_of(*choices: str) -> Parse:
    return _grammar(f"one of {', '.join(choices)}")(lambda text: choices[choices.index(text.lower())])


@_grammar("auto, off, or tokens a chunk, such as 2048")
def _chunk(text: str) -> str | int:
    return text.lower() if text.lower() in ("auto", "off") else _whole(text)


@_grammar(
    f"one of {', '.join(PLANS)}, or with a number: stream:20 for 20 streamed blocks, "
    "sequence:2 for groups of 2 processes"
)
def _plan(text: str) -> WantedPlan:
    plan, colon, count = text.lower().partition(":")
    if plan not in PLANS or (colon and plan not in FEWEST):
        raise ValueError(text)
    return WantedPlan(plan, _whole(count, FEWEST[plan]) if colon else None)  # `sequence:$N` of an unset N has no number


@_grammar(
    "a number of GPUs, such as 4, or what goes over them: cfg:2, the two forwards of guidance, "
    "sequence:3, the tokens of a forward, or cfg:2,sequence:2"
)
def generation(text: str) -> WantedGeneration:
    if text.isdecimal():
        return WantedGeneration(_whole(text))
    parts = [part.strip().partition(":")[::2] for part in text.lower().split(",")]
    over = {"cfg": "1", "sequence": "1", **dict(parts)}
    guidance, sequence = _whole(over.pop("cfg")), _whole(over.pop("sequence"))
    if over or len({part for part, _ in parts}) < len(parts) or guidance > 2:
        raise ValueError(text)
    return WantedGeneration(guidance * sequence, (guidance, sequence))


@_grammar("optimizer steps, such as 500, or a time, such as 90s, 10m or 2h")
def _save_every(text: str) -> SaveEvery:
    unit = text[-1:].lower()
    if unit in SECONDS:
        return SaveEvery(seconds=_whole(text[:-1]) * SECONDS[unit])
    return SaveEvery(steps=_whole(text))


def _seconds(name: str, value: str) -> float:
    try:
        return checked_seconds(float(value), name)
    except ValueError:
        raise SettingInvalid(f"{name}={value!r}", expected=EXPECTED_SECONDS) from None


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


def _folder(name: str, value: str) -> str:
    """A path, or `auto`: a folder in the user's home, and not one of that name here."""
    text = value.strip()
    if text == "auto":
        _path(name, value, "~")
        return text
    if "/" not in text:  # else a typing error, or `off`, were a folder's name
        raise SettingInvalid(f"{name}={value!r}", expected="auto, off, or a folder with a slash, ./encoded")
    return _path(name, text)


def _expandable(name: str, value: str) -> bool:
    return "expandable_segments:true" in value.lower().replace(" ", "")


def _text(name: str, value: str) -> str:
    return value


def _path(name: str, value: str, path: str | None = None) -> str:
    """A path, with `~` as a shell reads it: a Dockerfile's ENV and a service's settings know no shell. It is relative
    to where the process began: a script may go to another folder before it is used.

    Args:
        path: expanded in place of the value.
    """
    if not value.strip():
        raise SettingInvalid(f"{name}={value!r}", expected="a path, or nothing at all")
    try:
        return str(Path(value if path is None else path).expanduser().absolute())
    except RuntimeError:
        raise SettingInvalid(f"{name}={value!r}", expected="a path; no home directory is known for this one") from None
    except FileNotFoundError:
        raise SettingInvalid(f"{name}={value!r}", expected="an absolute path: the current folder is gone") from None


@dataclass(frozen=True)
class Variable:
    """The row of one field of `Settings`, for `read` and for people.

    Args:
        parse: the field's value, of the variable's name and text.
        task: what a user wants to do; a key of `wanshim.select.variables.TASKS`. Other projects' variables have none.
        example: a value that can be typed as it stands.
        meaning: what it does; the values it takes are named.
        off: the field's value for the words of FALSE, which every variable of wanshim's own takes: it selects nothing.
        fast: the field's value under WANSHIM_FAST, unless a variable of its own sets it; None: as without. All of
            these values change bits.
        only_split: it has no effect with a plan that gives each process one device.
        read_by: abilities that read it, beside those that it switches on.
        aliases: other names, of the upstream pull requests (modelscope/DiffSynth-Studio#1434, #1436).
        foreign: another project's variables, where wanshim has none of its own.
    """

    parse: Parse
    task: str = ""
    example: str = ""
    meaning: str = ""
    off: object = None
    fast: object = None
    only_split: bool = False
    read_by: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def value_of(self, name: str, text: str) -> object:
        """The field's value: `off` for a word that switches off, else what the grammar makes of the text."""
        return self.off if not self.foreign and is_off(text) else self.parse(name, text)


def _row(
    parse: Parse,
    task: str = "",
    example: str = "",
    meaning: str = "",
    **more: Any,
) -> Any:
    """A field of `Settings` with its variable; a switch is False where it is off, and by default."""
    empty = False if parse is _boolean else None
    default, more = more.pop("default", empty), {"off": empty, **more}
    return field(default=default, metadata={"variable": Variable(parse, task, example, meaning, **more)})


@dataclass(frozen=True)
class Settings:
    """The environment as wanshim understands it, and the table of its variables: one field a row. `sources` says which
    variable gave a value, `engine` is one of ENGINES."""

    # Variables of wanshim's own, in the order of README.
    plan: WantedPlan | None = _row(
        _plan,
        "train one sample on several GPUs",
        "sequence",
        "How a DiffSynth training job uses its GPUs. `sequence`, or `sequence:4` for groups of four processes: each "
        "group trains one sample together; `wanshim run --gpus 2` sets it, and `--gpus 1` sets `auto`. `split`: one "
        "process, blocks over its GPUs. "
        "`pipeline`: a split that trains several micro-batches at once. `stream`, or `stream:20` for 20 blocks: one "
        "process a GPU, frozen weights wait in host memory. `auto`: the report says which was chosen and why.",
    )
    devices: tuple[str, ...] | None = _row(
        _devices,
        "train a model that fits no GPU",
        "cuda:0,cuda:1",
        "The GPUs that one process splits the model over, in the order of the blocks. Switches `model_split` on.",
        aliases=(DUAL_GPU,),
        only_split=True,
    )
    split_at: tuple[int, ...] | None = _row(
        _split_points,
        "train a model that fits no GPU",
        "20",
        "The first block of each GPU after the first, such as `20` or `10,20,30`. Default: balanced by bytes.",
        read_by=("model_split",),
        aliases=("DIFFSYNTH_DUAL_GPU_SPLIT_AT",),
        only_split=True,
    )
    base: str | None = _row(
        _one_of(*EIGHT_BIT),
        "use less memory in training",
        "float8",
        "`float8` or `int8`: the frozen weights of a split, or of sequence parallel, are stored in eight bits.",
        read_by=("model_split",),
    )
    pipeline: bool = _row(
        _boolean,
        "train a model that fits no GPU",
        "0",
        "`0`: a split trains one micro-batch at a time, without a pipeline.",
        read_by=("model_split",),
        default=True,
        only_split=True,
    )
    offload: str = _row(
        _one_of("auto", "on", "off"),
        "use less memory in training",
        "on",
        "Gradient checkpoints wait in host memory: `on` always, `off` as DiffSynth does it, `auto` (the default) if "
        "DiffSynth's `--use_gradient_checkpointing_offload` asks for it, the step does not fit otherwise, or "
        "attention can be kept that way (where blocks are streamed or one process trains on the host, in half of the "
        "free host memory).",
        off="off",
        default="auto",
    )
    chunk: str | int = _row(
        _chunk,
        "use less memory in training",
        "2048",
        "Parts of a block run in chunks of so many tokens; `off` never, `auto` (the default) if the step does not fit "
        "otherwise.",
        off="off",
        read_by=("model_split",),
        default="auto",
    )
    keep: str = _row(
        _one_of("auto", "attention", "blocks", "off"),
        "make a training step faster",
        "blocks",
        "`attention`: backward does not compute self-attention again; `blocks`: nor the last blocks, as many as fit. "
        "No bit changes. `auto` (the default) keeps both in a planned run as far as there is room, `off` nothing.",
        off="off",
        default="auto",
    )
    encode_cache: str | None = _row(
        _folder,
        "make a training step faster",
        "auto",
        "What DiffSynth's pipeline computes from a sample alone, latents and prompt and image embeddings, is computed "
        "once and read from then on, in later epochs and runs: `auto` in ~/.cache/wanshim/encoding, or a folder, "
        "`./encoded`. No bit changes.",
    )
    compile: bool = _row(
        _boolean,
        "make a training step faster",
        "1",
        "`1`: the blocks of a Wan DiT train as one compiled graph, and under `wanshim generate` those of a Wan "
        "transformer generate as one; bits change.",
        fast=True,
    )
    compute: str | None = _row(
        _one_of(*EIGHT_BIT, "off"),
        "make a training step faster",
        "float8",
        "`float8` or `int8`: the frozen base of a Wan DiT multiplies in eight bits, and under `wanshim generate` a Wan "
        "transformer; bits change. `off` (the default): in its own dtype.",
        fast="float8",
    )
    fast: bool = _row(
        _boolean,
        "make a training step faster",
        "1",
        "`1`: all that is faster and changes bits, wherever it is available: {fast}. Each of these "
        "still has its own say, as `0` or `off` too. `wanshim run --fast` and `wanshim generate --fast` set it.",
        read_by=("compiled_blocks", "eight_bit_compute", "fast_blocks", "vae_decode", "vae_encode"),
    )
    generate: WantedGeneration | None = _row(
        generation,
        "generate on all GPUs",
        "2",
        "Over how many GPUs one process's pipeline denoises; `wanshim generate --gpus` sets it. Switches `generate` "
        "and `strict_blocks` on; with `1` the latter alone has an effect. `cfg:2`: guidance alone, its two forwards at "
        "once, with equal bits; `sequence:3`: the tokens of each forward over three GPUs; `cfg:2,sequence:2`: both, "
        "over four.",
    )
    resume: WantedResume | None = _row(
        _resume,
        "resume a training run",
        "auto",
        "A DiffSynth run saves its state and, started again, goes on from it: `auto` in the folder training_state of "
        "the output folder, or a folder, `./states`; `new` begins anew beside what is there. `auto,+learning_rate` "
        "goes on with that difference from the state.",
    )
    save_every: SaveEvery = _row(
        _save_every,
        "resume a training run",
        "10m",
        "When a state is saved: after so many optimizer steps, `500`, or so long, `90s`, `10m` (the default), `2h`; "
        "and at the end of each epoch.",
        off=SaveEvery(),
        read_by=("resume",),
        default=SaveEvery(seconds=600.0),
    )
    vae_mode: str | None = _row(
        _one_of(*VAE_MODES),
        "decode and encode on all GPUs",
        "auto",
        "How ranks share a decode: `auto`, `temporal`, `spatial`, `tile`, `off`. Switches `vae_decode` on, but not "
        "`vllm_omni.vae_decode`, which `WANSHIM_FEATURES` names. Unset beside `WANSHIM_GENERATE`, one process "
        "decodes whole frames by strict operators; tiles stay the framework's.",
        off="off",
        read_by=("vae_decode", "vae_allowlist"),  # vLLM-Omni's, which it does not switch on
        fast="auto",
    )
    vae_encode: str | None = _row(
        _one_of("auto", "temporal", "spatial", "off"),
        "decode and encode on all GPUs",
        "auto",
        "How ranks share an encode: `auto`, `temporal`, `spatial`, `off`. Switches `vae_encode` on, but not "
        "`vllm_omni.vae_encode`, which `WANSHIM_FEATURES` names. Unset beside `WANSHIM_GENERATE`, one process encodes "
        "by strict operators, as it decodes.",
        off="off",
        read_by=("vae_encode",),
        fast="auto",
    )
    vae_fast: bool = _row(
        _boolean,
        "decode and encode on all GPUs",
        "1",
        "`1`: fast operators, whose results are close to the framework's; otherwise strict ones, equal bit for bit.",
        read_by=("vae_decode", "vae_encode"),
        fast=True,
    )
    vae_engines: bool = _row(
        _boolean,
        "decode and encode on all GPUs",
        "0",
        "`0`: convolutions run by the engine that torch takes; by default cuDNN's engines are timed once on this GPU.",
        read_by=("vae_decode", "vae_encode"),
        default=True,
    )
    cache_dir: str | None = _row(
        _path,
        "encode prompts once",
        "~/.cache/wanshim/encoding",
        "Where encoded prompts are kept: a folder that only you can write. Switches `fastvideo.prompt_cache` on.",
    )
    encode_on: str = _row(
        _text,
        "encode prompts once",
        "most_free",
        "Where prompts are encoded: `auto` or `local` (the rank's own device), `cpu`, `most_free`, or a device.",
        off="auto",
        read_by=("negative_prompt", "prompt_cache"),
        default="auto",
    )
    encode_on_cpu: bool = _row(
        _boolean,
        "use less memory in training",
        "1",
        "`1`, with a model split: DiffSynth's text encoder stays on the CPU and works there.",
        read_by=("model_split",),
        aliases=("DIFFSYNTH_DATA_PROCESS_ON_CPU",),
    )
    encode_timeout_s: float | None = _row(
        _seconds,
        "wait longer, or not so long",
        "1800",
        "Seconds that ranks wait for the rank that encodes.",
        read_by=("negative_prompt", "prompt_cache"),
    )
    vae_timeout_s: float | None = _row(
        _seconds,
        "wait longer, or not so long",
        "600",
        "Seconds that a rank waits for the others to make the same decode or encode; 120 by default.",
        read_by=("vae_decode", "vae_encode"),
    )
    pg_timeout_s: float | None = _row(
        _seconds,
        "wait longer, or not so long",
        "3600",
        "The timeout, in seconds, of process groups whose caller names none. Switches `torch.pg_timeout` on.",
    )
    progress_dir: str | None = _row(
        _path,
        "watch a run",
        "training_logs",
        "Where a training run is logged for `wanshim monitor`. Switches `progress` on.",
    )
    monitor_token: str | None = _row(
        _text,
        "watch a run",
        "a-long-secret",
        "What `wanshim monitor --serve` asks for: needed on another address than 127.0.0.1, and behind a proxy.",
    )
    features: str | None = _row(
        _text,
        "choose what is on",
        "auto,-diffsynth.fp8_lora",
        "Which features are on: `auto` (the default), `all` or `none`, then names, each with `-` to leave it out.",
        off="none",
    )
    disable: bool = _row(_boolean, "choose what is on", "1", "`1`: nothing at all happens.")
    strict: bool = _row(
        _boolean,
        "choose what is on",
        "1",
        "`1`: a selected feature that is unavailable ends the program with the error.",
    )
    report: bool = _row(
        _boolean,
        "choose what is on",
        "1",
        "`1`: each process that patches something reports on standard error what is on, and at its end or on SIGUSR2 "
        "what ran; `wanshim run` sets it.",
    )
    # Of torchrun and torch.
    local_world_size: int | None = _row(_grammar("a whole number above zero")(_whole), foreign=("LOCAL_WORLD_SIZE",))
    local_rank: int = _row(
        _grammar("a rank: a whole number from zero")(partial(_whole, least=0)), foreign=("LOCAL_RANK",), default=0
    )
    expandable_segments: bool = _row(_expandable, foreign=ALLOCATOR, default=False)
    engine: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def is_on(self, field: str) -> bool:
        """Whether a variable is set for the field, to a value that does not switch off."""
        return field in self.sources and getattr(self, field) != VARIABLES[field].off

    def insists_on(self, field: str) -> bool:
        """Whether a run must not go on without what the field asks for: under strict, unless WANSHIM_FAST asks for it,
        which wants what is available."""
        return self.strict and self.sources.get(field) != FAST

    @property
    def engine_named(self) -> str:
        """The engine, with the ways in which it is asked for."""
        assert self.engine is not None  # or nobody speaks of it
        way = f"--use_{self.engine.lower()}, {ENGINES[self.engine]}, or distributed_type in accelerate's configuration"
        return f"{self.engine} ({way})"

    @property
    def plan_name(self) -> str | None:
        return self.plan.name if self.plan is not None else None

    @property
    def plan_count(self) -> int | None:
        """The number named with the plan."""
        return self.plan.count if self.plan is not None else None


# By field of `Settings`.
VARIABLES: Mapping[str, Variable] = {
    row.name: row.metadata["variable"] for row in fields(Settings) if "variable" in row.metadata
}
FAST_FIELDS = {name: variable.fast for name, variable in VARIABLES.items() if variable.fast is not None}


def assigned(field: str, value: object) -> str:
    """`WANSHIM_COMPILE=1`: what a user types for the field to have the value."""
    return f"{names_of(field)[0]}={1 if value is True else value}"


def meaning_of(field: str) -> str:
    """A description of the field's variable, with what WANSHIM_FAST sets in its own."""
    return VARIABLES[field].meaning.format(fast=", ".join(f"`{assigned(*each)}`" for each in FAST_FIELDS.items()))


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
    """The engine to which accelerate gives the parameters, by its variables: FSDP in processes of a launcher alone."""
    environ = os.environ if environ is None else environ
    named = (engine for engine, name in ENGINES.items() if environ.get(name, "").lower() == "true")
    return next((engine for engine in named if launched or engine != "FSDP"), None)


def launched() -> tuple[int, int] | None:
    """The local rank of this process and the number of them, if its launcher names both now: a process that was forked
    since the settings were read may have got others."""
    rank, size = _local_rank(), os.environ.get("LOCAL_WORLD_SIZE", "")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        return None
    return int(rank), int(size)


def is_local_rank_0() -> bool:
    """Whether this process speaks for its machine, as its environment says now: a worker of a framework's executor
    learns its rank after it has started."""
    return _local_rank() == "0"


def _local_rank() -> str:
    return os.environ.get("LOCAL_RANK") or "0"


def is_one_of_several() -> bool:
    """Whether a launcher has started this process as one of several, as it says now."""
    return any(os.environ.get(name, "") not in ("", "0", "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))


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
