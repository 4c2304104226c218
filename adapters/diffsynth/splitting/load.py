"""`from_pretrained` of a pipeline that is to be split: the DiT is loaded to the host and split from there."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from wanshim import hand_over
from wanshim.adapters.diffsynth.splitting import low_precision, side_models
from wanshim.adapters.diffsynth.splitting.family import Family, class_of
from wanshim.adapters.diffsynth.splitting.job import WORDS
from wanshim.adapters.diffsynth.splitting.refusals import (
    FAMILIES,
    cannot_train,
    family_of,
    heads_refusal,
    not_sharded,
    of_no_family,
    ranks_here,
    refusal,
    refuse,
    why_left_out,
)
from wanshim.adapters.diffsynth.training_road import Report, in_training_call
from wanshim.core.model_split import SplitPlan, pin_to
from wanshim.core.model_split.plan import format_bytes
from wanshim.core.model_split.split import check_devices
from wanshim.core.ranks.group import Group
from wanshim.core.shared.gpu_memory import indexed
from wanshim.core.shared.host_memory import available_bytes
from wanshim.core.shared.safetensors_header import read_header
from wanshim.core.shared.weight_bytes import num_bytes
from wanshim.core.strategy import available_on
from wanshim.core.strategy.loading import LOW_PRECISION, StoredModel, check_weights, moves_for_weights
from wanshim.core.streaming.shared_weights import load_once
from wanshim.errors import FeatureUnavailable, PlacementInvalid
from wanshim.patching import SeamState
from wanshim.settings import Settings
from wanshim.undo import Undo

log = logging.getLogger("wanshim")

UNSHARED = "this release of DiffSynth, or the options of this model, load it from its files alone"

# While a pipeline that will be split is loading: the classes of models that go to the host first.
_host_first: ContextVar[frozenset[str]] = ContextVar("wanshim_host_first", default=frozenset())


def load_to_host(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def load_model_file(
        self: object,
        config: Any,
        path: str | list[str],
        vram_config: Mapping[str, Any],
        *args: object,
        **kwargs: object,
    ) -> Any:
        if not seam.enter():
            return original(self, config, path, vram_config, *args, **kwargs)
        seam.pass_by()  # whether it has an effect shows when the pipeline is split
        read = seam.settings
        family = next((family for family in FAMILIES if config["model_class"] in family.split_classes), None)
        _check_sharded(config, family, read)
        if config["model_class"] not in _host_first.get() or low_precision.options_refusal(kwargs.get("quantize")):
            return original(self, config, path, vram_config, *args, **kwargs)
        if family is not None:
            _check_weights(family, path, vram_config, kwargs.get("quantize"), read, seam.notes.append)
        on_host = low_precision.load_on_host(vram_config)

        def load() -> Any:
            return original(self, config, path, on_host, *args, **kwargs)

        def load_from(state: Mapping[str, torch.Tensor]) -> Any:
            plain = {name: value for name, value in config.items() if name != "state_dict_converter"}
            return original(self, plain, path, on_host, *args, **kwargs | {"state_dict": state})

        host = ranks_here()
        if host.size == 1 or host.store is None or not trains_on_one_device(read):
            model = load()
        else:
            given = [vram_config["offload_dtype"], kwargs.get("quantize"), kwargs.get("state_dict"), *args[1:]]
            share = "state_dict" in signature.parameters and given.count(None) == len(given)
            if family is not None:
                _check_host_memory(family, path, vram_config, host, copies=2 if share else host.size)
            model, reason = load_once(host, load, load_from) if share else (load(), UNSHARED)
            seam.notes.append(_shared_or_not(config["model_class"], host.size, reason))
        low_precision.remember(model, vram_config)
        return model

    return load_model_file


def _shared_or_not(model_class: str, ranks: int, reason: str) -> str:
    name = model_class.rpartition(".")[2]
    if reason:
        return f"each of {ranks} ranks of this host holds {name} for itself: {reason}"
    return f"the {ranks} ranks of this host have the weights of {name} from one copy in host memory"


def _check_host_memory(
    family: Family, path: str | list[str], vram_config: Mapping[str, Any], host: Group, *, copies: int
) -> None:
    """Refuse a model before it is loaded, if host memory cannot hold so many copies of its weights; on the first rank
    of the host, before another has loaded its own."""
    header = read_header(_paths(path), family.blocks) if host.rank == 0 else None
    available = available_bytes()
    if header is None or not available:
        return
    itemsize = getattr(vram_config["computation_dtype"], "itemsize", 2)
    one = sum((block.bytes_at(itemsize) for block in header.blocks), header.outside.bytes_at(itemsize))
    if copies * one > available:
        raise PlacementInvalid(
            f"the weights do not fit in host memory, and were not loaded: {copies} copies for {host.size} ranks "
            f"are {format_bytes(copies * one)}, and {format_bytes(available)} are available",
            expected=f"that much host memory, by the header of {_paths(path)[0].name}",
            hint="Start fewer ranks on this host",
        )


def _paths(path: str | list[str]) -> list[Path]:
    return [Path(part) for part in (path if isinstance(path, list | tuple) else [path])]


def _check_sharded(config: Mapping[str, Any], family: Family | None, read: Settings) -> None:
    """Refuse a DiT before it is loaded, if its tokens are not sharded, or there are more ranks than the attention heads
    that its configuration names. No plan is needed where `--task sft:data_process` has a data set encoded."""
    if read.plan_name != "sequence" or any(word.endswith(":data_process") for word in sys.argv):
        return
    model_class = config["model_class"]
    name = model_class.rpartition(".")[2]
    if family is None:  # DiffSynth names the models that denoise so, in all families
        reason = of_no_family(name) if config.get("model_name", "").endswith("_dit") else None
    elif model_class not in family.sharded_classes:
        reason = not_sharded(name, family)
    else:
        heads = config.get("extra_kwargs", {}).get(family.num_heads_argument)
        reason = heads_refusal(heads, read) if heads is not None else None
    if reason is not None:
        raise cannot_train("WANSHIM_PLAN", read.plan_name, reason)


def _check_weights(
    family: Family,
    path: str | list[str],
    vram_config: Mapping[str, Any],
    quantize: Any,
    read: Settings,
    report: Report,
) -> None:
    """Refuse a DiT before it is loaded, if the weights alone would not fit where they are to go."""
    devices = devices_of(read)
    if len(devices) < 2 or trains_on_one_device(read):
        return

    check_devices(devices)
    available = available_on(devices)
    if not available:
        return
    paths = _paths(path)
    stored = _stored_model(family, paths, vram_config, quantize, devices, read)
    if stored is None:
        report(f"weights not counted before loading: {paths[0].name} has no safetensors header that names blocks")
    else:
        check_weights(stored, available)


def _stored_model(
    family: Family, paths: list[Path], vram_config: Mapping[str, Any], quantize: Any, devices: tuple[str, ...],
    read: Settings,
) -> StoredModel | None:  # fmt: skip
    """The model of these files as it will be stored, or None where they have no header that names its blocks."""
    header = read_header(paths, family.blocks)
    if header is None:
        return None
    dtype = vram_config.get("offload_dtype") or vram_config["computation_dtype"]
    itemsize = getattr(dtype, "itemsize", 2)  # "disk" is no dtype
    return StoredModel(
        name=paths[0].name,
        header=header,
        itemsize=itemsize,
        matrix_itemsize=LOW_PRECISION if quantize is not None or read.base is not None else itemsize,
        devices=devices,
        split_at=read.split_at,
        split_at_source=read.sources.get("split_at", ""),
        words=WORDS,
    )


def _loaded_to_host(read: Settings) -> frozenset[str]:
    """The classes of models that are loaded to the host, and go on from there or stay."""
    classes = {name for family in FAMILIES for name in family.split_classes}
    if read.encode_on_cpu:
        classes |= {name for family in FAMILIES for name in family.text_encoders.values()}
    return frozenset(classes)


def split_after_loading(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def from_pretrained(*args: object, **kwargs: object) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        read, report = seam.settings, seam.notes.append
        if bound.arguments.get("use_usp"):
            refuse("use_usp: sequence parallelism needs the whole model on every GPU", seam.fall_back, read.strict)
            return original(*args, **kwargs)
        token = _host_first.set(_loaded_to_host(read))
        try:
            pipe = original(*args, **kwargs)
        finally:
            _host_first.reset(token)
        _keep_text_encoders(pipe, read, report)
        dits = [dit for dit in (pipe.dit, getattr(pipe, "dit2", None)) if dit is not None]
        if read.base is not None:
            for dit in dits:
                dit.requires_grad_(False)  # as --quant_options load it; what trains is chosen later
        if pipe.dit is not None and trains_on_one_device(read):
            report(f"the DiT waits on the host until a task begins: {hand_over.as_written('WANSHIM_PLAN')}")
            _place_to_generate(pipe, dits, bound.arguments["device"], report)
            seam.pass_by()
        elif pipe.dit is None:
            seam.pass_by()
        elif not split_pipeline(pipe, read, seam):
            for dit in dits:
                low_precision.place_as_asked(dit, bound.arguments["device"])
        return pipe

    return from_pretrained


def _place_to_generate(pipe: Any, dits: list[Any], device: Any, report: Report) -> None:
    """DiTs that wait for their training go where the script asked when the pipeline generates outside of one."""
    undo = Undo()

    def placing(original: Callable[..., Any]) -> Callable[..., Any]:
        def model_fn(*args: object, **kwargs: object) -> Any:
            if undo and not torch.is_grad_enabled() and not in_training_call():
                undo.remove()
                _check_generation(pipe.dit, report)
                for dit in dits:
                    low_precision.place_as_asked(dit, device)
            return original(*args, **kwargs)

        return model_fn

    undo.set(pipe, {"model_fn": placing(pipe.model_fn)}, keep_foreign=True)


def _check_generation(dit: torch.nn.Module, report: Report) -> None:
    """Say that a plan of training is not for what is generated now.

    Raises:
        FeatureUnavailable: several processes of this host would each make the same video, and nothing is prepared for
            training.
    """
    found = "this pipeline generates, and a plan of training (wanshim run --gpus, WANSHIM_PLAN) does nothing for that"
    trained = {parameter.requires_grad for parameter in dit.parameters()}
    processes = ranks_here().size
    if processes > 1 and len(trained) == 1:
        raise FeatureUnavailable(
            f"{found}: each of {processes} processes would make the whole video",
            hint=f"Generate one video on all GPUs: wanshim generate --gpus {processes} -- python ...",
        )
    text = f"{found}: the DiT is placed as the script asked; on several GPUs: wanshim generate --gpus N"
    report(text)
    log.warning("wanshim: diffsynth.model_split: %s", text)


def split_pipeline(pipe: Any, read: Settings, seam: SeamState) -> bool:
    """Split the pipeline's DiT; False, with the reason in the report and the log, if it is refused."""
    devices, report = devices_of(read), seam.notes.append
    reason = why_left_out(pipe.dit, seam.left_out) or refusal(pipe) or too_few_devices(read)
    if reason is not None:
        refuse(reason, seam.fall_back, read.strict)
        return False
    _check_first_device(pipe, devices[0])
    why = f"split points of {read.sources['split_at']}" if read.split_at else None
    family = family_of(pipe.dit)
    assert family is not None  # or it had been refused
    _move_side_models(pipe, family, devices, read, report)
    handle = family.split(pipe, devices, read.split_at, why, read.base)
    wrappers = low_precision.place_wrappers(handle)
    if wrappers:
        report(f"{wrappers} layers of --fp8_models stay on the device of their stage")
    if (second := family.second_of(pipe)) is not None:
        _split_second(family, second, handle.plan, read.base, report)
    report(str(handle.plan))
    log.info("wanshim: %s", handle.plan)
    return True


def _move_side_models(pipe: Any, family: Family, devices: tuple[str, ...], read: Settings, report: Report) -> None:
    """Side models leave before the stages come, if the weights alone would not fit beside them."""
    check_devices(devices, pipe.dit)
    share = 2 if read.base is not None else 1  # of bf16
    blocks = [num_bytes(block) // share for path in family.blocks for block in pipe.dit.get_submodule(path)]
    home = num_bytes(pipe.dit) - share * sum(blocks)
    movable = {name: num_bytes(m) for name, m in side_models.side_models_of(pipe).items() if side_models.is_movable(m)}
    moves, notes = moves_for_weights(blocks, home, devices, read.split_at, movable, available_on(devices))
    side_models.move(pipe, moves, devices[0])
    for text in notes:
        report(text)


def _split_second(family: Family, second: Any, plan: SplitPlan, base: str | None, report: Report) -> None:
    """The second expert of a pair over the same devices, for inference, if both fit. Training takes it off again."""
    try:
        why = "as the first expert of the pair"
        low_precision.place_wrappers(family.split(second, plan.devices, plan.split_at, why, base))
    except torch.OutOfMemoryError:
        text = "the pair's second expert stays on the host, beside the first it does not fit: one expert can be trained"
        report(text)
        log.warning("wanshim: diffsynth.model_split: %s", text)


def _keep_text_encoders(pipe: Any, read: Settings, report: Report) -> None:
    for name, model_class in (entry for family in FAMILIES for entry in family.text_encoders.items()):
        model = getattr(pipe, name, None)
        if read.encode_on_cpu and model is not None and class_of(model) == model_class:
            pin_to(model, "cpu")
            report(f"{name} stays on the CPU: {read.sources['encode_on_cpu']}")


def trains_on_one_device(read: Settings) -> bool:
    """Whether the plan leaves the DiT whole: each process has one device, and chooses when its training begins."""
    return read.plan_name in ("stream", "sequence") or (read.plan_name == "auto" and len(devices_of(read)) < 2)


def too_few_devices(read: Settings) -> str | None:
    """Why there is nothing to split a model over, or None."""
    count = len(devices_of(read))
    return f"{count} GPU in sight and WANSHIM_DEVICES is not set" if read.devices is None and count < 2 else None


def devices_of(read: Settings) -> tuple[str, ...]:
    """The stages' devices: as named, else all GPUs this process sees.

    Processes of one machine share them in turn: of four devices, local rank 0 of 2 gets the first and third,
    so that each begins on the device accelerate gives it.
    """
    devices = read.devices or tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    here = ranks_here()
    return devices[here.rank :: here.size]


def _check_first_device(pipe: Any, first: str) -> None:
    here = indexed(pipe.device)
    if here.type != "cpu" and here != torch.device(first):
        raise PlacementInvalid(
            f"the pipeline runs on {here} and the first stage is on {first}",
            expected="the same device, since text encoder and VAE share it with the first stage",
            hint=f"Name {here} first in WANSHIM_DEVICES, or order the cards with CUDA_VISIBLE_DEVICES",
        )
