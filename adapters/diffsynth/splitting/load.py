"""`from_pretrained` of a pipeline that is to be split: the DiT is loaded to the host and split from there."""

from __future__ import annotations

import inspect
import logging
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.splitting import low_precision as quantized_base
from wanshim.adapters.diffsynth.splitting.family import Family, class_of
from wanshim.adapters.diffsynth.splitting.forecast import check_weights
from wanshim.adapters.diffsynth.splitting.refusals import FAMILIES, family_of, refusal, refuse, tell
from wanshim.adapters.diffsynth.splitting.side_models import lodge_before_split

from wanshim import settings
from wanshim.errors import PlacementInvalid
from wanshim.patching import SeamState

if TYPE_CHECKING:
    from wanshim.core.model_split import SplitPlan

log = logging.getLogger("wanshim")

# While a pipeline that will be split is loading: the classes of models that go to the host first.
_host_first: ContextVar[frozenset[str]] = ContextVar("wanshim_host_first", default=frozenset())


def load_to_host(original: Any, seam: SeamState) -> Any:
    def load_model_file(self: Any, config: Any, path: Any, vram_config: Any, *args: Any, **kwargs: Any) -> Any:
        if not seam.enter():
            return original(self, config, path, vram_config, *args, **kwargs)
        if config["model_class"] not in _host_first.get() or quantized_base.options_refusal(kwargs.get("quantize")):
            return original(self, config, path, vram_config, *args, **kwargs)
        _check_weights(config["model_class"], path, vram_config, kwargs.get("quantize"), seam)
        model = original(self, config, path, quantized_base.load_on_host(vram_config), *args, **kwargs)
        quantized_base.remember(model, vram_config)
        return model

    return load_model_file


def _check_weights(model_class: str, path: Any, vram_config: Any, quantize: Any, seam: SeamState) -> None:
    """Refuse a DiT before it is loaded, if the weights alone would not fit where they are to go."""
    read = settings.read()
    devices = devices_of(read)
    family = next((family for family in FAMILIES if model_class in family.split_classes), None)
    if family is not None and len(devices) > 1 and not trains_on_one_device(read):
        check_weights(family, path, vram_config, quantize, devices, read, partial(tell, seam=seam))


def _loaded_to_host(read: settings.Settings) -> frozenset[str]:
    """The classes of models that are loaded to the host, and go on from there or stay."""
    classes = {name for family in FAMILIES for name in family.split_classes}
    if read.encode_on_cpu:
        classes |= {name for family in FAMILIES for name in family.text_encoders.values()}
    return frozenset(classes)


def split_after_loading(original: Any, seam: SeamState) -> Any:
    signature = inspect.signature(original)

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        read = settings.read()
        if bound.arguments.get("use_usp"):
            refuse("use_usp: sequence parallelism needs the whole model on every GPU", seam, read.strict)
            return original(*args, **kwargs)
        token = _host_first.set(_loaded_to_host(read))
        try:
            pipe = original(*args, **kwargs)
        finally:
            _host_first.reset(token)
        _keep_text_encoders(pipe, read, seam)
        if read.base is not None:
            for dit in (pipe.dit, getattr(pipe, "dit2", None)):
                if dit is not None:
                    dit.requires_grad_(False)  # as --quant_options load it; what trains is chosen later
        if pipe.dit is not None and trains_on_one_device(read):
            tell("the DiT waits on the host until its training begins: WANSHIM_PLAN", seam)
        elif pipe.dit is not None and not split_pipeline(pipe, seam):
            _place_as_asked(pipe, bound.arguments["device"])
        return pipe

    return from_pretrained


def _place_as_asked(pipe: Any, device: Any) -> None:
    """A DiT that was held back on the host and is not split goes where it would have been."""
    for dit in (pipe.dit, getattr(pipe, "dit2", None)):
        if dit is not None:
            quantized_base.place_as_asked(dit, device)


def split_pipeline(pipe: Any, seam: SeamState) -> bool:
    """Split the pipeline's DiT; False, with a word in the report and the log, where it is refused."""
    read = settings.read()
    devices = devices_of(read)
    reason = refusal(pipe)
    if reason is None and read.devices is None and len(devices) < 2:
        reason = f"{len(devices)} GPU in sight and WANSHIM_DEVICES is not set"
    if reason is not None:
        refuse(reason, seam, read.strict)
        return False
    _check_first_device(pipe, devices[0])
    why = f"split points of {read.sources['split_at']}" if read.split_at else None
    family = family_of(pipe.dit)
    assert family is not None  # or it had been refused
    lodge_before_split(pipe, devices, read, partial(tell, seam=seam))
    handle = family.split(pipe, devices, read.split_at, why, read.base)
    wrappers = quantized_base.place_wrappers(handle)
    if wrappers:
        seam.notes.append(f"{wrappers} layers of --fp8_models stay on the device of their stage")
    if (second := family.second_of(pipe)) is not None:
        _split_second(family, second, handle.plan, read.base, seam)
    seam.notes.append(str(handle.plan))
    log.info("wanshim: %s", handle.plan)
    return True


def _split_second(family: Family, second: Any, plan: SplitPlan, base: str | None, seam: SeamState) -> None:
    """The second expert of a pair over the same devices, for inference, if both fit. Training takes it off again."""
    import torch

    try:
        why = "as the first expert of the pair"
        quantized_base.place_wrappers(family.split(second, plan.devices, plan.split_at, why, base))
    except torch.OutOfMemoryError:
        text = "the pair's second expert stays on the host, beside the first it does not fit: one expert can be trained"
        seam.notes.append(text)
        log.warning("wanshim: diffsynth.model_split: %s", text)


def _keep_text_encoders(pipe: Any, read: settings.Settings, seam: SeamState) -> None:
    from wanshim.core.model_split import keep_on

    for name, model_class in (entry for family in FAMILIES for entry in family.text_encoders.items()):
        model = getattr(pipe, name, None)
        if read.encode_on_cpu and model is not None and class_of(model) == model_class:
            keep_on(model, "cpu")
            seam.notes.append(f"{name} stays on the CPU: {read.sources['encode_on_cpu']}")


def trains_on_one_device(read: settings.Settings) -> bool:
    """Whether the plan leaves the DiT whole: each process has one device, and chooses when its training begins."""
    plan = read.plan.name if read.plan is not None else None
    return plan == "stream" or (plan == "auto" and len(devices_of(read)) < 2)


def devices_of(read: settings.Settings) -> tuple[str, ...]:
    """The stages' devices: as named, else all GPUs this process sees.

    Processes of one machine share them in turn: of four devices, local rank 0 of 2 gets the first and third,
    so that each begins on the device accelerate gives it.
    """
    import torch

    devices = read.devices or tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return devices[read.local_rank :: read.local_world_size]


def _check_first_device(pipe: Any, first: str) -> None:
    import torch

    here = torch.device(pipe.device)
    if here.type == "cuda" and here.index is None:
        here = torch.device("cuda", torch.cuda.current_device())
    if here.type != "cpu" and here != torch.device(first):
        raise PlacementInvalid(
            f"the pipeline runs on {here} and the first stage is on {first}",
            expected="the same device, since text encoder and VAE share it with the first stage",
            hint=f"Name {here} first in WANSHIM_DEVICES, or order the cards with CUDA_VISIBLE_DEVICES",
        )
