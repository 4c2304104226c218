"""`diffsynth.encode_cache`: a user's training on video files is the run without it, and each sample is encoded once."""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffsynth.models.wan_video_text_encoder import WanTextEncoder
from diffsynth.models.wan_video_vae import WanVideoVAE
from PIL import Image, ImageSequence

import wanshim as product
from tests.contract.diffsynth import encode_job as job
from tests.contract.diffsynth import resume_runs
from tests.contract.diffsynth.resume_runs import said
from wanshim.adapters.diffsynth import encode_cache
from wanshim.adapters.diffsynth.training_road import Row
from wanshim.core.encoding.cache import EmbeddingCache
from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.model_split.side_models import HOST, moved_to
from wanshim.errors import WanshimError
from wanshim.undo import Undo

FEATURE = "diffsynth.encode_cache"
VIDEO_UNIT, PROMPT_UNIT = "WanVideoUnit_InputVideoEmbedder", "WanVideoUnit_PromptEmbedder"
pytestmark = pytest.mark.timeout(300)
Change = Callable[[Any], None]


@cache
def _made() -> Path:
    folder = Path(mkdtemp())
    for kind in ("mp4", "gif"):  # the second without a process for each file
        job.write_data(folder / kind, kind)
    job.write_checkpoint(folder / "checkpoint")
    return folder


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Path]:
    """A training in a folder of its own, which is returned."""

    def run(name: str, kind: str = "gif", epochs: int = 2, **options: Any) -> Path:
        job.train(tmp_path / name, _made() / kind, _made() / "checkpoint", epochs=epochs, **options)
        return tmp_path / name

    return run


@cache
def _plain_run(kind: str = "gif", epochs: int = 2, **options: Any) -> Path:
    assert not product.report().selected
    folder = Path(mkdtemp())
    job.train(folder, _made() / kind, _made() / "checkpoint", epochs=epochs, **options)
    return folder


@pytest.fixture(autouse=True)
def _not_counted_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls, name in ((WanVideoVAE, "encode"), (WanTextEncoder, "forward")):
        monkeypatch.setattr(cls, name, vars(cls)[name])  # a job counts its calls there


@pytest.fixture(autouse=True)
def _plain_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that others are compared with is DiffSynth's own: nothing is active yet."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _plain_run()


@pytest.fixture
def activate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """The feature on, over a folder that is returned."""

    def on() -> Path:
        monkeypatch.setenv("WANSHIM_ENCODE_CACHE", f"{tmp_path}/cache")
        product.activate(f"none,{FEATURE}")
        return tmp_path / "cache"

    return on


def _same(found: Path, expected: Path) -> bool:
    assert job.losses(expected)
    assert job.files(expected)
    return job.losses(found) == job.losses(expected) and job.files(found) == job.files(expected)


def _notes() -> str:
    return "\n".join(product.report().row(FEATURE).notes)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# Three epochs over video files


@pytest.mark.slow
def test_each_sample_is_encoded_once_with_the_bits_of_the_run_without(train: Any, activate: Any) -> None:
    options = {"kind": "mp4", "epochs": 3}
    expected = _plain_run(**options)
    assert job.encoded(expected) == {"encode": 9, "forward": 9}
    folder = activate()
    found = train("ours", **options)
    assert _same(found, expected)
    assert job.encoded(found) == {"encode": 3, "forward": 2}  # three videos, two prompts
    assert len(_entries(folder)) == 5
    assert f"5 results were computed and 13 read in {folder}" in _notes()
    later = train("later", **options)
    assert _same(later, expected)
    assert job.encoded(later) == {"encode": 0, "forward": 0}


@pytest.mark.sweep
@pytest.mark.slow
def test_accumulated_and_repeated_samples(train: Any, activate: Any) -> None:
    options = {"accumulation": 2, "repeat": 2, "epochs": 1}
    expected = _plain_run(**options)
    activate()
    found = train("ours", **options)
    assert _same(found, expected)
    assert job.encoded(found) == {"encode": 3, "forward": 2}


@pytest.fixture
def activate_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As `wanshim run --gpus 1`."""

    def on() -> None:
        monkeypatch.setenv("WANSHIM_ENCODE_CACHE", f"{tmp_path}/cache")
        monkeypatch.setenv("WANSHIM_PLAN", "auto")
        product.activate()

    return on


@pytest.mark.slow
@pytest.mark.parametrize("leave", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_planned_run_encodes_before_it_trains_and_its_encoders_leave_if_their_room_is_needed(
    leave: bool,
    train: Any,
    activate_planned: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules: list[Any] = []
    if leave:
        _limit(monkeypatch)
    activate_planned()
    found = train("ours", change=modules.append)
    assert _same(found, _plain_run())
    assert job.encoded(found) == {"encode": 3, "forward": 2}
    place = HOST if leave else None
    assert [moved_to(getattr(modules[0].pipe, name)) for name in ("text_encoder", "vae", "dit")] == [place, place, None]
    notes = [one for one in product.report().row("diffsynth.model_split").notes if "what they encode" in one]
    assert len(notes) == leave
    for note in notes:
        assert re.match(r"text_encoder and vae \(.*\) wait in host memory: what they encode is there", note)
    assert "encoding: 100%" in capfd.readouterr().err
    assert "5 results were computed and 13 read" in _notes()  # three samples before and six, each with its prompt


def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with a limit, which holds the step and no encoder beside it."""
    monkeypatch.setattr("wanshim.core.strategy.limits.available_bytes", lambda device: 2**40)
    monkeypatch.setattr("wanshim.core.strategy.search.without_gaps", lambda available: dict.fromkeys(available, 0))


@pytest.mark.sweep
@pytest.mark.slow
def test_planned_run_of_samples_that_are_drawn_keeps_its_vae(
    train: Any, activate_planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: list[Any] = []
    _limit(monkeypatch)
    expected = train("plain", change=_sampling_vae)
    activate_planned()
    found = train("ours", change=lambda module: (_sampling_vae(module), modules.append(module)))
    assert _same(found, expected)
    assert [moved_to(getattr(modules[0].pipe, name)) for name in ("text_encoder", "vae")] == [HOST, None]


def _counting(module: Any) -> None:
    """Prompts by the number of forwards, of which one in two is dropped."""
    module.draws, module.given = np.random.default_rng(7), {"forwards": 0}
    forward = module.forward

    def counted(data: Any, inputs: Any = None) -> torch.Tensor:
        module.given["forwards"] += 1
        module.last = module.given["forwards"]
        kept = module.draws.random() < 0.5
        return forward({**data, "prompt": f"{data['prompt']} {module.last}" if kept else ""}, inputs)  # type: ignore[no-any-return]

    module.forward = counted


def test_planned_run_counts_and_draws_in_its_module_as_if_nothing_was_encoded_before(
    train: Any, activate_planned: Any
) -> None:
    expected = train("plain", change=_counting)
    activate_planned()
    assert _same(train("ours", change=_counting), expected)
    assert "not before" not in _notes()


def test_module_whose_state_cannot_be_put_back_encodes_nothing_before(train: Any, activate_planned: Any) -> None:
    def change(module: Any) -> None:
        module.words, forward = itertools.cycle(("slow", "fast", "far")), module.forward
        module.forward = lambda data, inputs=None: forward({**data, "prompt": next(module.words)}, inputs)

    expected = train("plain", change=change)
    activate_planned()
    assert _same(train("ours", change=change), expected)
    reason = "Training holds an object of the type cycle, whose content cannot be put back"
    assert f"samples are encoded in training, not before: {reason}" in _notes()


@pytest.mark.slow
@pytest.mark.sweep
def test_sample_that_cannot_be_read_before_is_the_training_s_to_fail(train: Any, activate_planned: Any) -> None:
    samples = job.dataset(_made() / "gif")
    samples.data[2]["video"] = "missing.gif"
    activate_planned()
    with pytest.raises(FileNotFoundError, match="missing"):
        train("ours", samples=samples)
    assert "samples are encoded in training, not before: FileNotFoundError" in _notes()


def test_without_the_variable_nothing_is_kept(train: Any) -> None:
    product.activate(f"none,{FEATURE}")
    assert _same(train("ours"), _plain_run())
    assert "nothing is kept of what is encoded: WANSHIM_ENCODE_CACHE is not set, or off" in _notes()


@pytest.mark.slow
def test_nothing_stays_of_it(train: Any, activate: Any) -> None:
    activate()
    modules = []
    train("ours", epochs=1, change=modules.append)
    assert not any("process" in vars(unit) for unit in modules[0].pipe.units)


# What is there is checked


def test_auto_keeps_in_the_folder_that_the_documents_name(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": str(tmp_path / "home"), "WANSHIM_ENCODE_CACHE": "auto"}.items():
        monkeypatch.setenv(name, value)
    product.activate(f"none,{FEATURE}")
    train("with", epochs=1)
    assert len(list((tmp_path / "home/.cache/wanshim/encoding").glob("*.safetensors"))) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "with"]


def test_damaged_entries_are_computed_again_and_counted(train: Any, activate: Any) -> None:
    folder = activate()
    train("first", epochs=1)
    cut, flipped, *_ = _entries(folder)
    os.truncate(cut, cut.stat().st_size // 2)
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    product.deactivate()
    activate()
    found = train("again")
    assert _same(found, _plain_run())
    assert sum(job.encoded(found).values()) == 2
    assert "2 damaged entries were set aside and computed again" in _notes()


def test_full_disk_is_said_and_the_run_goes_on(train: Any, activate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = activate()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found = train("ours")
    assert _same(found, _plain_run())
    assert job.encoded(found) == {"encode": 6, "forward": 6}
    assert "12 results could not be kept: cannot write" in _notes()
    assert "No space left on device" in _notes()
    assert not list(folder.iterdir())


def test_folder_that_others_may_write_is_refused(train: Any, activate: Any, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    activate()
    with pytest.raises(WanshimError, match="mode 0777"):
        train("ours")
    assert not job.losses(tmp_path / "ours")


# What the results depend on


def _other_vae(module: Any) -> None:
    module.pipe.vae.model.encoder.conv1.bias.data[0] += 1


@pytest.mark.slow
def test_another_vae_encodes_again_and_prompts_are_read(train: Any, activate: Any) -> None:
    expected = train("plain", change=_other_vae)
    activate()
    train("first", epochs=1)
    found = train("ours", change=_other_vae)
    assert _same(found, expected)
    assert job.losses(found) != job.losses(_plain_run())
    assert job.encoded(found) == {"encode": 3, "forward": 0}


@pytest.mark.slow
@pytest.mark.parametrize("package", ["diffsynth", pytest.param("transformers", marks=pytest.mark.sweep)])
def test_another_release_encodes_again(
    package: str, train: Any, activate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate()
    train("first", epochs=1)
    version = encode_cache.version
    monkeypatch.setattr(encode_cache, "version", lambda name: "0.1" if name == package else version(name))
    assert job.encoded(train("ours", epochs=1)) == {"encode": 3, "forward": 2}


@pytest.mark.sweep
@pytest.mark.slow
def test_patched_code_encodes_again(train: Any, activate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffsynth.models.wan_video_text_encoder import T5LayerNorm

    activate()
    train("first", epochs=1)
    original = T5LayerNorm.forward
    monkeypatch.setattr(T5LayerNorm, "forward", lambda norm, x: original(norm, x) + 0)
    assert job.encoded(train("ours", epochs=1)) == {"encode": 0, "forward": 2}


# What is not kept, by name


def _sampling_vae(module: Any) -> None:
    encode = module.pipe.vae.encode

    def sampled(*args: Any, **kwargs: Any) -> torch.Tensor:
        mean = encode(*args, **kwargs)
        return mean + 0.1 * torch.randn_like(mean)

    module.pipe.vae.encode = sampled


def _unit(**given: Any) -> Any:
    from diffsynth.diffusion.base_pipeline import PipelineUnit

    class Own(PipelineUnit):  # type: ignore[misc]
        """A unit of the user's own, behind DiffSynth's."""

        def __init__(self, name: str, process: Any) -> None:
            super().__init__(input_params=("noise", "input_video", "latents"), onload_model_names=("vae",))
            self.own = (name, process)

        def process(self, pipe: Any, noise: Any, input_video: Any, latents: Any) -> dict[str, Any]:
            return self.own[1](pipe, noise, input_video)  # type: ignore[no-any-return]

    return Own(**given)


def _reads_noise(pipe: Any, noise: torch.Tensor, video: Any) -> dict[str, Any]:
    return {"own": noise * 2}


def _swallows_the_refusal(pipe: Any, noise: torch.Tensor, video: Any) -> dict[str, Any]:
    try:
        return {"own": noise * 2}
    except Exception:
        return {"own": torch.zeros(1)}


def _changes_inputs(pipe: Any, noise: Any, video: list[Any]) -> dict[str, Any]:
    video[0] = video[0].point(lambda value: 255 - value)
    return {"own": torch.ones(1)}


def _sets_the_pipeline(pipe: Any, noise: Any, video: Any) -> dict[str, Any]:
    pipe.own_count = object()
    return {"own": torch.ones(1)}


def _runs_the_dit(pipe: Any, noise: Any, video: Any) -> dict[str, Any]:
    embedding = pipe.dit.text_embedding(torch.ones(1, 1, 64, dtype=pipe.torch_dtype))
    return {"own": embedding.detach()}


def _with_unit(process: Any) -> Change:
    def change(module: Any) -> None:
        module.pipe.units.append(_unit(name=process.__name__, process=process))

    return change


def _trained_text_encoder(module: Any) -> None:
    module.pipe.text_encoder.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "reason", "encoded"),
    [
        (_sampling_vae, f"{VIDEO_UNIT} is computed in each step: it draws at random", {"encode": 6, "forward": 2}),
        pytest.param(
            _trained_text_encoder,
            f"{PROMPT_UNIT} is computed in each step: text_encoder trains",
            {"encode": 3},
            marks=pytest.mark.slow,
        ),
        (_with_unit(_reads_noise), "Own is computed in each step: it reads noise, which WanVideoUnit_Noise", {}),
        pytest.param(
            _with_unit(_swallows_the_refusal),
            "Own is computed in each step: it reads noise, which",
            {},
            marks=[pytest.mark.slow, pytest.mark.sweep],
        ),
        pytest.param(
            _with_unit(_changes_inputs),
            "Own is computed in each step: it changes its inputs",
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            _with_unit(_sets_the_pipeline),
            "Own is computed in each step: it sets the pipeline's own_count",
            {},
            marks=[pytest.mark.slow, pytest.mark.sweep],
        ),
        pytest.param(
            _with_unit(_runs_the_dit),
            "Own is computed in each step: it runs dit, which it does not name",
            {},
            marks=[pytest.mark.slow, pytest.mark.sweep],
        ),
    ],
    ids=["sampling VAE", "trained", "reads noise", "swallows", "changes inputs", "sets", "runs another model"],
)
def test_what_is_not_kept_is_named_and_computed_in_each_step(
    change: Change, reason: str, encoded: dict[str, int], train: Any, activate: Any
) -> None:
    expected = train("plain", change=change)
    activate()
    found = train("ours", change=change)
    assert _same(found, expected)
    assert reason in _notes()
    assert job.encoded(found).items() >= (encoded or {"encode": 3, "forward": 2}).items()


def test_unit_that_names_its_one_model_without_a_tuple_is_kept(train: Any, activate: Any) -> None:
    """As those of LTX-2's video VAE do: `onload_model_names=("video_vae_encoder")`."""

    def without_a_tuple(module: Any) -> None:
        unit = next(one for one in module.pipe.units if type(one).__name__ == VIDEO_UNIT)
        (unit.onload_model_names,) = unit.onload_model_names

    activate()
    found = train("ours", change=without_a_tuple)
    assert _same(found, _plain_run())
    assert job.encoded(found) == {"encode": 3, "forward": 2}


@pytest.mark.slow
@pytest.mark.sweep
def test_samples_that_the_dataset_draws_are_not_kept_for_long(train: Any, activate: Any) -> None:
    def samples() -> Any:
        made = job.dataset(_made() / "gif")
        made.__class__ = job.Flipped
        return made

    expected = train("plain", epochs=4, samples=samples())
    folder = activate()
    found = train("ours", epochs=4, samples=samples())
    assert _same(found, expected)
    assert job.encoded(found) == {"encode": 12, "forward": 2}
    assert f"{VIDEO_UNIT} is computed in each step: its inputs differ from epoch to epoch" in _notes()
    assert len(_entries(folder)) == 2 + 3 + 4  # the prompts, an epoch, and as many as it takes to see


@pytest.mark.slow
def test_validation_inside_of_a_training_is_the_framework_s(train: Any, activate: Any) -> None:
    def validates(module: Any) -> None:
        forward = module.forward

        def both(data: Any, inputs: Any = None) -> torch.Tensor:
            unit = next(one for one in module.pipe.units if type(one).__name__ == PROMPT_UNIT)
            with torch.no_grad():
                unit.process(module.pipe, prompt=data["prompt"], positive=True)
            return forward(data, inputs)

        module.forward = both

    activate()
    assert job.encoded(train("ours", epochs=1, change=validates)) == {"encode": 3, "forward": 3 + 2}


class Pinned(dict[str, Any]):
    def pin_memory(self) -> None:
        raise AssertionError("a sample is received as it is")


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_a_loader_with_workers_are_received_in_a_thread(workers: int) -> None:
    """torch has that thread for loaders that lock pages, on a machine with a GPU; elsewhere it says so."""
    from accelerate import Accelerator
    from torch.utils.data._utils.pin_memory import pin_memory

    accelerator, undo = Accelerator(cpu=True), Undo()
    undo.replace(accelerator, "prepare_data_loader", encode_cache._received_ahead)
    loader = torch.utils.data.DataLoader([Pinned(prompt="a")], collate_fn=lambda batch: batch[0], num_workers=workers)
    prepared = accelerator.prepare(loader)
    assert prepared.base_dataloader.pin_memory == bool(workers)
    (sample,) = prepared
    assert (pin_memory(sample) if workers else sample) == {"prompt": "a"}
    undo.remove()
    assert not accelerator.prepare(torch.utils.data.DataLoader([1], num_workers=workers)).base_dataloader.pin_memory


# Refusals


def _call(units: list[Any], engine: str = "NO") -> Any:
    pipe = SimpleNamespace(units=units, vae=object())
    return SimpleNamespace(
        pipe=pipe, accelerator=SimpleNamespace(distributed_type=SimpleNamespace(value=engine)), option=lambda *_: None
    )


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (_call([]), "its pipeline has no units"),
        (_call([SimpleNamespace(onload_model_names=("text_encoder",))]), "the samples are encoded already"),
        (_call([SimpleNamespace(onload_model_names=("vae",))], "FSDP"), "FSDP may gather weights"),
        (_call([SimpleNamespace(onload_model_names=("vae",))]), None),
    ],
    ids=["no units", "encoded already", "engine", "kept"],
)
def test_refusals(call: Any, reason: str | None) -> None:
    found = encode_cache.refusal(call, None)  # type: ignore[arg-type]
    assert (found is None) if reason is None else reason in str(found)


# Processes of their own


def _start(folder: Path, processes: int = 1, cache: Path | None = None, more: Any = None, **options: Any) -> list[int]:
    made = {"data": _made() / "gif", "checkpoint": _made() / "checkpoint", "epochs": 2}
    ours = {"WANSHIM_ENCODE_CACHE": str(cache)} if cache is not None else {}
    variables = {"WANSHIM_FEATURES": "auto" if cache is not None or more else "none", **ours, **(more or {})}
    return resume_runs.start(folder, processes, variables, module="encode_job", **made | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["", *(pytest.param(plan, marks=pytest.mark.sweep) for plan in ("auto", "sequence"))], ids=str
)
def test_two_ranks_share_what_either_encodes(plan: str, tmp_path: Path) -> None:
    more = {"WANSHIM_PLAN": plan} if plan else {}
    options = {"processes": 2, "epochs": 3, "data": _made() / "mp4", "more": more}
    assert not any(_start(tmp_path / "plain", **options)), said(tmp_path / "plain")
    assert not any(_start(tmp_path / "ours", cache=tmp_path / "cache", **options)), said(tmp_path / "ours")
    assert _same(tmp_path / "ours", tmp_path / "plain")
    assert job.encoded(tmp_path / "ours") == {"encode": 3, "forward": 2}
    assert sum(job.encoded(tmp_path / "plain").values()) > 5


@pytest.mark.slow
def test_run_killed_in_its_first_epoch_leaves_whole_entries_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert _start(tmp_path / "killed", cache=folder, killed=1) == [-9], said(tmp_path / "killed")
    kept = _entries(folder)
    assert kept
    with CacheDirectory(folder) as directory:
        cache = EmbeddingCache(directory)
        assert all(cache.load(path.stem) for path in kept)
    assert not any(_start(tmp_path / "ours", cache=folder)), said(tmp_path / "ours")
    assert _same(tmp_path / "ours", _plain_run())
    assert job.encoded(tmp_path / "ours")["encode"] == 2  # one was there
    assert not [path for path in folder.iterdir() if path.suffix != ".safetensors"]


@pytest.mark.slow
def test_resumed_run_is_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    state = {"WANSHIM_RESUME": "auto", "WANSHIM_SAVE_EVERY": "1"}
    given = {"cache": tmp_path / "cache", "more": state}
    assert _start(tmp_path / "ours", killed_at=4, **given) == [-9], said(tmp_path / "ours")
    assert not any(_start(tmp_path / "ours", attempt=1, seed=99, **given)), said(tmp_path / "ours", 1)
    assert job.files(tmp_path / "ours") == job.files(_plain_run())
    plain, ours = job.losses(_plain_run()), job.losses(tmp_path / "ours")
    assert ours[:4] == plain[:4]
    assert ours[4:] == plain[-len(ours[4:]) :]
    assert job.encoded(tmp_path / "ours") == {"encode": 3, "forward": 2}


@pytest.mark.parametrize(
    ("rank", "ranks", "read", "said"),
    [
        (0, 2, 3, "report: 0 results were computed and 3 read"),
        (0, 2, 0, "without_effect: 0 results"),
        (1, 2, 3, "report: 0 results were computed and 3 read"),
        (1, 2, 0, "not_needed: the first rank of its group has what the units make"),
        (2, 2, 0, "without_effect: 0 results"),
        (1, 1, 0, "without_effect: 0 results"),
    ],
)
def test_first_rank_of_a_group_answers_for_what_is_read(
    rank: int, ranks: int, read: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get from it what the units make, and strict demands nothing of them."""
    cache = SimpleNamespace(counts=Counter(read=read), num_damaged=0, reasons={}, unkept="")
    monkeypatch.setattr(encode_cache, "_put_behind", lambda *_: SimpleNamespace(cache=cache))
    heard: list[str] = []

    class Stepped(Row):
        def __getattribute__(self, name: str) -> Any:
            if name in ("report", "without_effect", "not_needed"):
                return lambda text: heard.append(f"{name}: {text}")
            return super().__getattribute__(name)

    with Undo() as undo:
        accelerator = SimpleNamespace(process_index=rank)
        call = SimpleNamespace(accelerator=accelerator, device=torch.device("cpu"))
        settings = SimpleNamespace(encode_cache=str(tmp_path))
        run: Any = SimpleNamespace(call=call, read=settings, undo=undo, plan=SimpleNamespace(ranks=ranks))
        encode_cache.STEP.apply(run, Stepped(None))
    (text,) = heard
    assert text.startswith(said)


@pytest.mark.parametrize("plan", ["", "auto"])
def test_run_that_had_ended_leaves_nothing_to_the_framework(
    plan: str, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what it would have read nor what it would have kept for backward: strict is content with it."""
    variables = {"ENCODE_CACHE": f"{tmp_path}/cache", "RESUME": "auto", "SAVE_EVERY": "1", "PLAN": plan}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    for attempt in range(2):
        product.deactivate()
        product.activate()
        train("ours", epochs=1, attempt=attempt)
    assert "has ended at step 3" in "".join(product.report().row("diffsynth.resume").notes)
    assert plan or "no step was trained" in product.report().row(FEATURE).notes
    notes = [note for row in product.report().rows for note in row.notes]
    assert not [note for note in notes if "left to the framework" in note or "no attention was kept" in note]


@pytest.mark.slow
def test_two_runs_at_once_share_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with ThreadPoolExecutor() as both:
        runs = [both.submit(_start, tmp_path / name, cache=folder) for name in "ab"]
    assert [run.result() for run in runs] == [[0], [0]], said(tmp_path / "a") + said(tmp_path / "b")
    for name in "ab":
        assert _same(tmp_path / name, _plain_run())
    counts = [job.encoded(tmp_path / name) for name in "ab"]
    assert sum(count["encode"] for count in counts) == 3
    assert sum(count["forward"] for count in counts) == 2


# A dataset whose results are all there


COMPLETE = "no sample is read to be encoded: all that this dataset needs is in"
READS_ALL = "each start reads every sample, to see what is encoded: "


def _plan_notes() -> str:
    return "\n".join(note for row in product.report().rows for note in row.notes)


@pytest.fixture
def again(train: Any, activate_planned: Any) -> Callable[..., tuple[Path, str, list[Any]]]:
    """A planned run in a process that has not seen another: its folder, what it says, and its module."""

    def run(name: str, **options: Any) -> tuple[Path, str, list[Any]]:
        modules: list[Any] = []
        product.deactivate()
        activate_planned()
        folder = train(name, change=modules.append, **options)
        return folder, _plan_notes(), modules

    return run


@pytest.mark.sweep
@pytest.mark.slow
def test_next_start_over_the_same_dataset_reads_no_sample_to_encode_it(
    again: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit(monkeypatch)
    assert COMPLETE not in again("first", epochs=1)[1]
    assert "encoding:" in capfd.readouterr().err
    found, said, modules = again("later")
    assert COMPLETE in said
    assert "encoding:" not in capfd.readouterr().err
    assert _same(found, _plain_run())
    assert job.encoded(found) == {"encode": 0, "forward": 0}
    assert [moved_to(getattr(modules[0].pipe, name)) for name in ("text_encoder", "vae")] == [HOST, HOST]


def _gone(cache: Path, data: Path) -> None:
    next(path for path in _entries(cache) if path.stat().st_size > 4096).unlink()


def _damaged(cache: Path, data: Path) -> None:
    entry = next(path for path in _entries(cache) if path.stat().st_size > 4096)
    content = bytearray(entry.read_bytes())
    content[-1] ^= 1
    entry.write_bytes(content)


def _touched(cache: Path, data: Path) -> None:
    os.utime(data / "0.gif", (1, 1))


def _another_of_its_size_and_date(cache: Path, data: Path) -> None:
    """As what an archive whose files have one date is unpacked over."""
    old = data / "0.gif"
    status = old.stat()
    with Image.open(old) as image:
        frames = [
            frame.convert("L").point(lambda value: 255 * (value > 127)) for frame in ImageSequence.Iterator(image)
        ]
    frames[0].save(old, save_all=True, append_images=frames[1:])
    assert old.stat().st_size < status.st_size
    os.truncate(old, status.st_size)
    os.utime(old, ns=(status.st_atime_ns, status.st_mtime_ns))


def _another_prompt(cache: Path, data: Path) -> None:
    text = (data / "metadata.json").read_text()
    (data / "metadata.json").write_text(text.replace("a box", "a cat"))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("change", "encodes"),
    [
        (_gone, 1),
        (_damaged, 1),
        (_touched, 0),
        (_another_of_its_size_and_date, 1),
        (_another_prompt, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_gone_damaged_or_another_voids_the_note(
    change: Callable[[Path, Path], None], encodes: int, again: Any, tmp_path: Path
) -> None:
    data = job.write_data(tmp_path / "data", "gif")
    samples = partial(job.dataset, data)
    again("first", samples=samples(), epochs=1)
    change(tmp_path / "cache", data)
    found, said, _ = again("changed", samples=samples(), epochs=1)
    assert COMPLETE not in said
    assert sum(job.encoded(found).values()) == encodes
    found, said, _ = again("later", samples=samples(), epochs=1)
    assert COMPLETE in said
    assert not sum(job.encoded(found).values())


def _of_its_own_class() -> Any:
    made = job.dataset(_made() / "gif")
    made.__class__ = job.Flipped
    return made


def _with_an_operator_of_its_own() -> Any:
    made = job.dataset(_made() / "gif")
    made.special_operator_map["prompt"] = lambda text: text
    return made


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (_with_an_operator_of_its_own, "the dataset loads samples by _with_an_operator_of_its_own.<locals>.<lambda>"),
        (_of_its_own_class, "Flipped is not DiffSynth's UnifiedDataset"),
    ],
    ids=["operator", "class"],
)
def test_dataset_that_is_not_known_is_read_at_each_start(samples: Any, reason: str, again: Any) -> None:
    for name in ("first", "later"):
        said = again(name, samples=samples(), epochs=1)[1]
        assert READS_ALL + reason in said
        assert COMPLETE not in said


@pytest.mark.slow
@pytest.mark.sweep
def test_ranks_find_what_another_number_of_ranks_has_noted(tmp_path: Path) -> None:
    more = {"WANSHIM_PLAN": "auto"}
    for name, processes in (("two", 2), ("one", 1), ("two again", 2)):
        given = {"processes": processes, "cache": tmp_path / "cache", "more": more, "epochs": 1}
        assert not any(_start(tmp_path / name, **given)), said(tmp_path / name)
        texts = [path.read_text() for path in (tmp_path / name).glob("said.*")]
        assert [COMPLETE in text for text in texts] == [name != "two"] * processes
        assert sum(job.encoded(tmp_path / name).values()) == (5 if name == "two" else 0)


SCRIPT = """
import sys
from pathlib import Path
from tests.contract.diffsynth import encode_job

encode_job.train(*map(Path, sys.argv[1:]), epochs=1)
"""


def _of_session(leader: int) -> list[str]:
    """The processes that run in a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, _, session = rest.split()[:4]
            if int(session) == leader and state != "Z":
                found.append(name)
    return found


def _until(done: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_ctrl_c_while_samples_are_encoded_ends_both_ranks_and_keeps_what_is_done(tmp_path: Path) -> None:
    """As in a terminal: every process of the command gets the signal, those that read samples, too."""
    videos, folder = 8, tmp_path / "cache"
    data = job.write_data(tmp_path / "data", "gif", videos=videos)
    (tmp_path / "train.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    clean |= {"PYTHONPATH": str(Path(__file__).parents[3]), "GLOO_SOCKET_IFNAME": "lo"}
    clean |= {"WANSHIM_ENCODE_CACHE": str(folder)}

    def start(name: str, **more: str) -> subprocess.Popen[str]:
        paths = [str(tmp_path / name), str(data), str(_made() / "checkpoint")]
        command = [sys.executable, "-m", "wanshim", "run", "--gpus", "2", "--", sys.executable, "train.py", *paths]
        with (tmp_path / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                command, cwd=tmp_path, env=clean | more, stdout=log, stderr=log, text=True, start_new_session=True
            )

    with start("stopped", ENCODE_PAUSE_S="1") as stopped:
        _until(lambda: len(_entries(folder)) > 2)
        os.killpg(stopped.pid, signal.SIGINT)
        assert stopped.wait(60) == 128 + signal.SIGINT, (tmp_path / "stopped.log").read_text()
    _until(lambda: not _of_session(stopped.pid), 20)
    assert not job.losses(tmp_path / "stopped")
    kept = _entries(folder)
    assert 2 < len(kept) < videos + 2
    assert {path.suffix for path in folder.iterdir()} <= {".safetensors", ".turn"}
    with CacheDirectory(folder) as directory:
        assert all(EmbeddingCache(directory).load(path.stem) for path in kept)
    with start("later") as later:
        assert later.wait(300) == 0, (tmp_path / "later.log").read_text()
    # A process that is interrupted at its turn's end leaves the file, which who takes that turn next removes.
    assert {path.suffix for path in folder.iterdir()} == {".safetensors"}
    assert sum(job.encoded(tmp_path / "later").values()) == videos + 2 - len(kept)
