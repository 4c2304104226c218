"""`diffsynth.encode_cache`: latents, prompt and image embeddings are computed once and read from then on.

DiffSynth's training module runs the pipeline's units on each sample in each step: text encoder, VAE and image encoder
compute the same in every epoch. With `WANSHIM_ENCODE_CACHE` the results of such a unit are kept in a folder, under a
digest of its inputs (the frames themselves), of all weights of the models that it names, of the code and of how the
device computes. Any rank and any later run that comes to the same inputs reads them. No bit changes: what draws at
random, or reads something that was drawn, is computed in each step as before, and the report names it.

A planned run (`wanshim run --gpus`) encodes what is missing before it trains, each rank its share of the samples. Text
encoder and VAE then wait in host memory, unless the same plan fits beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from wanshim.adapters.diffsynth.training_road import Report, Row, Run, Step, TrainingCall, step_feature
from wanshim.settings import Settings
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.core.encoding.call_cache import CallCache

ENGINES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
PACKAGES = ("diffsynth", "transformers", "tokenizers", "pillow", "numpy", "wanshim")  # whose code encodes, beside torch
# Of a pipeline: what runs its units, and where.
NOT_COMPARED = {"device", "units", "post_units", "unit_runner", "model_fn"}


def refusal(call: TrainingCall, read: Settings) -> str | None:
    """Why nothing is kept in this training job, by name, or None."""
    engine = call.accelerator.distributed_type.value
    if engine in ENGINES:
        return f"{engine} may gather weights in each call, on all ranks at once"
    if not getattr(call.pipe, "units", None):
        return "its pipeline has no units"
    if not any(map(partial(_encodes, call.pipe), call.pipe.units)):
        return "no unit of its pipeline runs a model: the samples are encoded already"
    return None


def models_of(unit: Any) -> tuple[str, ...]:
    """The names of the models that a unit says it runs; one of them may be written without a tuple, as LTX-2's are."""
    names = getattr(unit, "onload_model_names", None) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _encodes(pipe: Any, unit: Any) -> bool:
    """Whether a unit says that it runs a model, and the pipeline has it."""
    return any(getattr(pipe, name, None) is not None for name in models_of(unit))


class _Reached(Exception):
    """The module has come to its forward: all units have run."""


def _reach(*args: object, **inputs: object) -> None:
    raise _Reached


def _samples(call: TrainingCall, numbers: Sequence[int]) -> Iterable[Any]:
    """Samples by their numbers, read in processes of their own: neither dataset nor draws of this one change."""
    import torch

    workers = call.option("dataset_num_workers", call.option("num_workers", 1))
    return torch.utils.data.DataLoader(
        call.dataset,
        sampler=numbers,
        collate_fn=lambda batch: batch[0],
        num_workers=max(1, int(str(workers or 1))),
        multiprocessing_context="fork",  # nothing of the run is pickled
        generator=torch.Generator(),
    )


class EncodedUnits:
    """The units of a pipeline, those that run a model behind the cache.

    Args:
        call: whose pipeline it is.
        cache: of their results.
        undo: they are changed until it ends.
    """

    def __init__(self, call: TrainingCall, read: Settings, cache: CallCache, undo: Undo) -> None:
        from wanshim.core.encoding.files import sha256_json
        from wanshim.core.encoding.identity import class_code
        from wanshim.core.resume.draws import Draws
        from wanshim.core.shared.fallback import Fallback

        self._pipe, self._device, self.cache = call.pipe, call.device, cache
        self._modes = [read.vae_encode, read.vae_fast, read.fast]  # of the VAE, whose bits may differ
        self._identities: dict[int, str] = {}  # by id of a unit
        self._models: dict[str, str] = {}  # identities by name
        self._encoding: list[tuple[Any, Callable[..., Any]]] = []  # units that run a model, with their own `process`
        self._of_pipe, reason = "", ""
        try:
            with _in_words():  # now: a tokenizer changes when it is used
                self._of_pipe = sha256_json(
                    [
                        class_code(type(self._pipe)),
                        _contents(self._pipe, NOT_COMPARED),
                        {name: version(name) for name in PACKAGES},
                    ]
                )
        except Fallback as error:
            reason = str(error)
        for unit in self._pipe.units:
            name = type(unit).__name__
            if not _encodes(self._pipe, unit):
                undo.replace(unit, "process", partial(self._watched, name))
                continue
            if getattr(unit, "take_over", False):
                cache.left[name] = "it takes over all inputs"
            elif reason or Draws(unit).held:
                cache.left[name] = reason or "it holds a generator"
            if hasattr(call.dataset, "__len__"):
                sides = 2 if getattr(unit, "seperate_cfg", False) else 1
                cache.calls_of_an_epoch[name] = len(call.dataset) * sides  # at most: ranks share them
            undo.replace(unit, "process", partial(self._kept, name, unit))

    def encode_share(self, call: TrainingCall) -> None:
        """Run the units on this rank's share of the samples, without their forward. Afterwards the training module and
        all random generators have the states that they had.

        Raises:
            Fallback: the module holds what cannot be put back.
        """
        from accelerate.utils import tqdm

        from wanshim.core.resume.draws import Draws
        from wanshim.core.shared.held import put_back_later

        accelerator, pipe = call.accelerator, self._pipe
        count = len(call.dataset) // max(1, getattr(call.dataset, "repeat", None) or 1)  # of DiffSynth's UnifiedDataset
        samples = _samples(call, range(accelerator.process_index, count, accelerator.num_processes))
        bar = tqdm(samples, desc="encoding")  # of the first process
        with Undo() as undo:
            undo.set(pipe, {"model_fn": _reach, "device": self._device})
            draws = Draws(call.model)
            undo.add(partial(draws.set, draws.text(self._device), self._device))
            undo.add(put_back_later(call.model, without=[*pipe.modules(), call.dataset, self]))
            for sample in bar:
                with suppress(_Reached), accelerator.autocast():
                    call.model(sample)

    def identity_of_samples(self, call: TrainingCall) -> str:
        """All that the results of the units depend on in a run over this dataset.

        Raises:
            Fallback: it has no exact form.
        """
        from hashlib import sha256

        from wanshim.adapters.diffsynth.dataset_identity import dataset_identity
        from wanshim.core.encoding.files import sha256_json
        from wanshim.core.encoding.identity import class_code

        module = call.model
        script = Path(getattr(sys.modules.get(type(module).__module__), "__file__", None) or "")
        with _in_words(), call.accelerator.autocast():
            return sha256_json(
                [
                    [len(call.dataset), dataset_identity(call.dataset)],
                    [class_code(type(module)), _contents(module, set()), _switches(module)],
                    sha256(script.read_bytes()).hexdigest() if script.is_file() else "",  # whose functions it calls
                    [class_code(type(unit)) for unit in self._pipe.units],
                    [self._identity_or_reason(unit, original) for unit, original in self._encoding],
                ]
            )

    def _identity_or_reason(self, unit: Any, original: Callable[..., Any]) -> str:
        """The identity of a unit, or the reason why its results are not kept."""
        from wanshim.core.shared.fallback import Fallback

        try:
            return self.cache.left.get(type(unit).__name__) or self._identity(unit, original)
        except Fallback as reason:
            return str(reason)

    def idle(self) -> frozenset[str]:
        """The models that no step calls, if what they encode is there."""
        units = [unit for unit in self._pipe.units if _encodes(self._pipe, unit)]
        named = {name for unit in units for name in models_of(unit)}
        called = {name for unit in units if type(unit).__name__ in self.cache.reasons for name in models_of(unit)}
        return frozenset() if self.cache.unkept else frozenset(named - called)

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def process(pipe: Any, *args: Any, **inputs: Any) -> Any:
            compute = partial(original, pipe, *args, **inputs)
            if not _trains():
                return compute()
            return self.cache.watched(name, compute, self._device, (args, inputs))

        return process

    def _kept(self, name: str, unit: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        watched = self._watched(name, original)
        self._encoding.append((unit, original))

        def process(pipe: Any, *args: Any, **inputs: Any) -> Any:
            if args or pipe is not self._pipe or not _trains():
                return watched(pipe, *args, **inputs)
            identity, compute = partial(self._identity, unit, original), partial(original, pipe)
            return self.cache.result(name, identity, compute, inputs, pipe.device, partial(self._beside, unit))

        return process

    @contextmanager
    def _beside(self, unit: Any) -> Iterator[list[str]]:
        """A unit's effects in the body beside its result, as text."""
        pipe, named = self._pipe, set(models_of(unit))
        done: list[str] = []
        others = [(name, model) for name, model in pipe.named_children() if name not in named]
        hooks = [
            module.register_forward_pre_hook(
                lambda *_, name=name: done.append(f"it runs {name}, which it does not name")
            )
            for name, model in others
            for module in model.modules()
        ]
        before = {key: id(value) for key, value in vars(pipe).items()}
        try:
            yield done
        finally:
            for hook in hooks:
                hook.remove()
        changed = (key for key, value in vars(pipe).items() if before.get(key) != id(value))
        done += [f"it sets the pipeline's {key}" for key in changed]

    def _identity(self, unit: Any, original: Callable[..., Any]) -> str:
        """All that a unit's results depend on beside its inputs.

        Raises:
            Fallback: it has no exact form.
        """
        from wanshim.core.encoding.files import sha256_json
        from wanshim.core.encoding.request import numerics

        if id(unit) not in self._identities:
            self._identities[id(unit)] = self._identity_of_code(unit, original)
        switches = [_switches(one) for one in (unit, self._pipe, getattr(self._pipe, "scheduler", None))]
        return sha256_json([self._identities[id(unit)], switches, numerics(self._device), _kernels(self._device)])

    def _identity_of_code(self, unit: Any, original: Callable[..., Any]) -> str:
        from wanshim.core.encoding.files import sha256_json
        from wanshim.core.encoding.identity import class_code, code_identity
        from wanshim.core.encoding.model_identity import model_identity

        pipe = self._pipe
        named = [name for name in models_of(unit) if getattr(pipe, name, None) is not None]
        for name in set(named) - self._models.keys():
            self._models[name] = model_identity(name, getattr(pipe, name))
        others = [
            [n, type(model).__qualname__, _switches(model)] for n, model in pipe.named_children() if n not in named
        ]
        with _in_words():
            own = [code_identity(getattr(original, "__func__", original)), _contents(unit, {"process"})]
        of_models = {name: self._models[name] for name in named}
        return sha256_json([class_code(type(unit)), own, self._of_pipe, others, of_models, self._modes])


@contextmanager
def _in_words() -> Iterator[None]:
    """A value without an exact form is a reason to keep nothing."""
    from wanshim.core.shared.fallback import Fallback
    from wanshim.errors import WanshimError

    try:
        yield
    except WanshimError as error:
        raise Fallback(error.found) from None


def _contents(value: Any, without: set[str]) -> dict[str, str]:
    """The attributes of an object that are neither torch's nor switches."""
    from wanshim.core.encoding.identity import value_identity
    from wanshim.core.shared.digest import digest

    own = {n: v for n, v in sorted(vars(value).items()) if n not in without and not n.startswith("_")}
    return {n: value_identity(v, digest) for n, v in own.items() if not _is_switch(v)}


def _is_switch(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _switches(value: Any) -> dict[str, Any]:
    """The attributes of an object that may change between two calls, as a scheduler's `training`."""
    return {n: v for n, v in sorted(getattr(value, "__dict__", {}).items()) if _is_switch(v) and not n.startswith("_")}


def _kernels(device: torch.device) -> list[Any]:
    """The settings that choose kernels, beside those that `numerics` names."""
    import torch

    cudnn, chosen = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    on_device = [cudnn.allow_tf32, cudnn.enabled, cudnn.deterministic, cudnn.benchmark]
    return [chosen, *(on_device if device.type == "cuda" else [torch.get_num_threads()])]


def version(package: str) -> str:
    """The installed version of a package, or nothing."""
    from importlib import metadata  # needed by few: not at activation

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _trains() -> bool:
    """Whether this is a training forward: a validation runs the same units for other ends."""
    import torch

    return torch.is_grad_enabled()


_behind: WeakKeyDictionary[Any, EncodedUnits] = WeakKeyDictionary()  # pipeline -> its units


def is_behind(pipe: Any) -> bool:
    """Whether the units of a pipeline are behind the cache now."""
    return pipe in _behind


def _put_behind(call: TrainingCall, read: Settings, undo: Undo) -> EncodedUnits:
    """The units of a run's pipeline behind the cache until `undo` ends.

    Raises:
        CacheUnavailable: the folder can neither be opened nor made.
    """
    from wanshim.core.encoding.call_cache import CallCache

    if (units := _behind.get(call.pipe)) is None:
        cache = CallCache(_folder(read))
        undo.add(cache.close)
        units = _behind[call.pipe] = EncodedUnits(call, read, cache, undo)
        undo.add(partial(_behind.pop, call.pipe))
    return units


def encode_missing(call: TrainingCall, read: Settings, undo: Undo, report: Report) -> frozenset[str]:
    """Encode the samples that are not there, each rank its share; the names of the models that no step calls then.

    A run that has encoded all leaves a note of that; the next one over the same samples reads none of them before it
    trains. Whatever cannot be encoded before is encoded in training.
    """
    from wanshim.adapters.diffsynth.splitting.side_models import is_movable, side_models_of
    from wanshim.core.encoding.directory import CacheUnavailable
    from wanshim.core.shared.fallback import cause_of
    from wanshim.core.shared.gpu_memory import give_back
    from wanshim.core.strategy import kept_on_all

    if getattr(call.dataset, "load_from_cache", False) or not hasattr(call.dataset, "__len__"):
        return frozenset()
    side_models = side_models_of(call.pipe)
    rank = call.accelerator.process_index, call.accelerator.num_processes
    units, samples = None, ""
    try:
        units = _put_behind(call, read, undo)
        samples = units.identity_of_samples(call)
    except CacheUnavailable:  # which is said when it is put behind for the training
        pass
    except Exception as error:
        report(f"each start reads every sample, to see what is encoded: {cause_of(error)}")
    kept = units is not None and bool(samples) and units.cache.is_complete(samples, *rank)
    if kept_on_all(kept) and units is not None:
        report(f"no sample is read to be encoded: all that this dataset needs is in {_folder(read)}")
        return units.idle() & side_models.keys()
    if units is None:
        return frozenset()
    try:
        for model in filter(is_movable, side_models.values()):
            model.to(call.device)
        units.encode_share(call)
        if samples:
            units.cache.note_complete(samples, *rank)
    except Exception as error:
        report(f"samples are encoded in training, not before: {cause_of(error)}")
        return frozenset()
    finally:
        give_back(call.device)
    return units.idle() & side_models.keys()


def _folder(read: Settings) -> Path:
    from wanshim.core.shared.files import prompt_cache

    assert read.encode_cache is not None  # or nothing is kept
    return prompt_cache() if read.encode_cache == "auto" else Path(read.encode_cache)


def _apply(run: Run, row: Row) -> None:
    """Put the units that run a model behind the cache until the run ends."""
    from wanshim.core.encoding.directory import CacheUnavailable

    if run.read.encode_cache is None:
        STEP.not_asked(row)
        return
    try:
        cache = _put_behind(run.call, run.read, run.undo).cache
    except CacheUnavailable as reason:
        row.without_effect(f"nothing is kept: {reason}")
        return
    if run.call.device.type == "cuda":
        run.undo.replace(run.call.accelerator, "prepare_data_loader", _received_ahead)
    folder = _folder(run.read)
    is_first = run.call.accelerator.process_index % run.plan.ranks == 0

    def end() -> None:
        count = cache.counts["read"] + cache.counts["computed"]
        if count or is_first:
            row.end(count, summary(cache, folder))
        else:
            row.not_needed("the first rank of its group has what the units make, and the others have it from there")

    run.undo.add(end)


class _AsItIs:
    """A sample on its way from a worker, of which torch's thread locks no page."""

    def __init__(self, sample: Any) -> None:
        self._sample = sample

    def pin_memory(self, *device: object) -> Any:
        return self._sample


def _collated(collate: Callable[[Any], Any], samples: Any) -> _AsItIs:
    return _AsItIs(collate(samples))


def _received_ahead(original: Callable[..., Any]) -> Callable[..., Any]:
    """accelerate's `prepare_data_loader`, of whose loaders samples are received in the thread that torch has on a
    machine with GPUs to lock tensors' pages: a video takes tenths of a second to come from its worker, in which several
    GPUs would wait."""

    def prepare(loader: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(loader, "num_workers", 0) and not loader.pin_memory:
            loader.pin_memory, loader.collate_fn = True, partial(_collated, loader.collate_fn)
        return original(loader, *args, **kwargs)

    return prepare


def summary(cache: CallCache, folder: Path) -> str:
    """The counts of a run's results, and the units that are computed in each step, as text."""
    counts = cache.counts
    parts = [f"{counts['computed']} results were computed and {counts['read']} read in {folder}"]
    if cache.num_damaged:
        parts.append(f"{cache.num_damaged} damaged entries were set aside and computed again")
    if counts["unkept"]:
        parts.append(f"{counts['unkept']} results could not be kept: {cache.unkept}")
    parts += [f"{name} is computed in each step: {reason}" for name, reason in sorted(cache.reasons.items())]
    return "; ".join(parts)


STEP = Step(
    feature="diffsynth.encode_cache",
    setting="encode_cache",
    asked=lambda read: read.encode_cache is not None,
    refusal=refusal,
    without="nothing is kept of what is encoded",
    apply=_apply,
)

FEATURE = step_feature(
    STEP,
    summary="latents, prompt and image embeddings are computed once and read from then on",
    why="encodes each video and each prompt in each step",
    upstream="https://github.com/modelscope/DiffSynth-Studio/issues/1070",
    remove_when="DiffSynth keeps what its units compute from a sample alone",
)
