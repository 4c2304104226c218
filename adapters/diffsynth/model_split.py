"""`diffsynth.model_split`: a Wan DiT over several devices under the unmodified `launch_training_task`.

`WanVideoPipeline.from_pretrained` loads the DiT to the host and splits it from there; LoRA, optimizer,
`model.to` and `accelerator.prepare` come later and find it split. A pipeline made another way is split when
`launch_training_task` receives it. The split itself is `wanshim.core.placement`.
"""

from __future__ import annotations

import inspect
import logging
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth import wan_placement as table
from wanshim.adapters.diffsynth.split_memory import make_room
from wanshim.adapters.diffsynth.training_loop import BYPASS, Joints, PipelinedLoop, save_whole

from wanshim import settings
from wanshim.errors import FeatureUnavailable, PlacementInvalid
from wanshim.patching import Feature, Seam, SeamState

if TYPE_CHECKING:
    from wanshim.core.placement import SplitHandle

log = logging.getLogger("wanshim")

# Set while a pipeline that will be split is loading: the DiT then goes to the host first.
_loading: ContextVar[bool] = ContextVar("wanshim_loading_for_split", default=False)

# What is not split, each with the reason. Attributes of the pipeline that are set:
PIPELINE_REFUSALS = {
    "dit2": "a Wan2.2 pair of experts is loaded: load the one you train",
    "vace2": "a Wan2.2 pair of experts is loaded: load the one you train",
}
# Attributes of the DiT that are true or set:
DIT_REFUSALS = {
    "vram_management_enabled": "--fp8_models and --offload_models wrap the layers and place them themselves",
    "quantize_config": "--quant_options has not been proven exact when split",
}


def refusal(pipe: Any) -> str | None:
    """Why this pipeline's DiT is not split, by the name of the variant, or None."""
    dit = pipe.dit
    if class_of(dit) not in table.SPLIT_CLASSES:
        name = type(dit).__name__
        return f"{name}: {table.REFUSED_CLASSES.get(name, 'not one of the Wan DiTs that are split')}"
    for attribute, reason in PIPELINE_REFUSALS.items():
        if getattr(pipe, attribute, None) is not None:
            return f"{attribute}: {reason}"
    for attribute, reason in DIT_REFUSALS.items():
        value = getattr(dit, attribute, None)
        if value is not None and value is not False:
            return f"{attribute}: {reason}"
    return None


def class_of(dit: Any) -> str:
    return f"{type(dit).__module__}.{type(dit).__name__}"


def lanes_refusal(pipe: Any) -> str | None:
    """Why micro-batches of this pipeline cannot overlap, or None."""
    outside = table.outside_the_blocks(pipe)
    if outside is not None:
        return f"{outside} works between the blocks, where a micro-batch cannot be cut"
    return None


def _devices(read: settings.Settings) -> tuple[str, ...]:
    """The stages' devices: as named, else all GPUs this process sees.

    Processes of one machine share them in turn: of four devices, local rank 0 of 2 gets the first and third,
    so that each begins on the device accelerate gives it.
    """
    import torch

    devices = read.devices or tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return devices[read.local_rank :: read.local_world_size]


def _split(pipe: Any, seam: SeamState) -> bool:
    """Split the pipeline's DiT; False, with a word in the report and the log, where it is refused."""
    from wanshim.core.placement import split_model

    read = settings.read()
    devices = _devices(read)
    reason = refusal(pipe)
    if reason is None and read.devices is None and len(devices) < 2:
        reason = f"{len(devices)} GPU in sight and WANSHIM_DEVICES is not set"
    if reason is not None:
        _refuse(reason, seam, read.strict)
        return False
    _check_first_device(pipe, devices[0])
    why = f"split points of {read.sources['split_at']}" if read.split_at else None
    handle = split_model(
        pipe.dit,
        devices,
        read.split_at,
        blocks=table.BLOCKS,
        exits=table.EXITS,
        companions=table.companions_of(pipe),
        satellites=table.satellites_of(pipe),
        reason=why,
    )
    table.bridge_hints(pipe, handle)
    seam.notes.append(str(handle.plan))
    log.info("wanshim: %s", handle.plan)
    return True


def _refuse(reason: str, seam: SeamState, strict: bool) -> None:
    if strict:
        raise FeatureUnavailable(f"diffsynth.model_split cannot split this model: {reason}")
    seam.notes.append(f"not split: {reason}")
    log.warning("wanshim: diffsynth.model_split: not split, %s", reason)


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


def _split_after_loading(original: Any, seam: SeamState) -> Any:
    signature = inspect.signature(original)

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["use_usp"]:
            _refuse("use_usp: sequence parallelism needs the whole model on every GPU", seam, settings.read().strict)
            return original(*args, **kwargs)
        token = _loading.set(True)
        try:
            pipe = original(*args, **kwargs)
        finally:
            _loading.reset(token)
        if pipe.dit is not None and not _split(pipe, seam):
            _place_as_asked(pipe, bound.arguments["device"])
        return pipe

    return from_pretrained


def _place_as_asked(pipe: Any, device: Any) -> None:
    """A DiT that was held back on the host and is not split goes where it would have been."""
    for dit in (pipe.dit, getattr(pipe, "dit2", None)):
        if dit is not None and not getattr(dit, "vram_management_enabled", False):
            dit.to(device)


def _load_to_host(original: Any, seam: SeamState) -> Any:
    def load_model_file(self: Any, config: Any, path: Any, vram_config: Any, *args: Any, **kwargs: Any) -> Any:
        if not seam.enter():
            return original(self, config, path, vram_config, *args, **kwargs)
        managed = vram_config["offload_dtype"] is not None
        if _loading.get() and config["model_class"] in table.SPLIT_CLASSES and not managed:
            vram_config = {**vram_config, "computation_device": "cpu"}
        return original(self, config, path, vram_config, *args, **kwargs)

    return load_model_file


def _split_before_training(original: Any, seam: SeamState) -> Any:
    signature = inspect.signature(original)

    def launch_training_task(*args: Any, **kwargs: Any) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        handle = _prepare(bound.arguments, seam)
        with Joints() as joints:
            if handle is not None:
                _join_loop(handle, bound.arguments, joints, seam)
            return original(*args, **kwargs)

    return launch_training_task


def _prepare(arguments: dict[str, Any], seam: SeamState) -> SplitHandle | None:
    """The split to train with, made now if the pipeline came unsplit."""
    from wanshim.core.placement import split_of

    pipe = getattr(arguments["model"], "pipe", None)
    dit = getattr(pipe, "dit", None)
    if dit is None or (".wan_" not in class_of(dit) and type(dit).__name__ not in table.REFUSED_CLASSES):
        return None  # another model family: not this feature's
    conflict = _conflict(arguments)
    handle = split_of(dit)
    if conflict is not None and handle is not None:
        raise FeatureUnavailable(
            f"the DiT is split over {', '.join(handle.plan.devices)} and {conflict}",
            expected="one of the two",
            hint="Leave that option out, or run with WANSHIM_FEATURES=...,-diffsynth.model_split",
        )
    if conflict is not None:
        _refuse(conflict, seam, settings.read().strict)
        return None
    if handle is None:
        _split(pipe, seam)
    return split_of(dit)


def _join_loop(handle: SplitHandle, arguments: dict[str, Any], joints: Joints, seam: SeamState) -> None:
    """Prepare the loop for a split model: whole files, DDP, and lanes where micro-batches can overlap."""
    from wanshim.core.placement.lanes import Lanes, pipeline_bound

    accelerator = arguments["accelerator"]
    joints.replace(accelerator, "save", save_whole)
    if accelerator.num_processes > 1:
        joints.set_variable(BYPASS, "true")
        seam.notes.append(f"{BYPASS}=true: each of {accelerator.num_processes} processes trains a split of its own")
    count, stages = accelerator.gradient_accumulation_steps, len(handle.plan.stages)
    reason = _no_lanes(handle, arguments)
    in_flight = 1 if reason is not None else count
    make_room(handle, arguments, joints, partial(_tell, seam=seam), chunk=settings.read().chunk, in_flight=in_flight)
    if reason is not None:
        _tell(f"one micro-batch at a time: {reason}; the split gives room, not speed", seam)
        return
    loop = PipelinedLoop(Lanes(handle), accelerator, arguments["model"], arguments["model_logger"])
    loop.attach(joints)
    bound = pipeline_bound(stages, count)
    _tell(f"{count} micro-batches in {stages} lanes: at most {bound:.2f}x of one GPU's speed", seam)


def _no_lanes(handle: SplitHandle, arguments: dict[str, Any]) -> str | None:
    from wanshim.core.placement.lanes import refusal

    if not settings.read().lanes:
        return "WANSHIM_LANES is off"
    if arguments["accelerator"].gradient_accumulation_steps == 1:
        return "gradient accumulation is 1, and only accumulated micro-batches can overlap"
    return lanes_refusal(arguments["model"].pipe) or refusal(handle.model)


def _tell(text: str, seam: SeamState) -> None:
    seam.notes.append(text)
    log.info("wanshim: diffsynth.model_split: %s", text)


def _bring_together(original: Any, seam: SeamState) -> Any:
    def store(self: Any, hidden_states: Any) -> Any:
        if seam.enter():
            hidden_states = hidden_states.to(self.previous_hidden_states.device)
        return original(self, hidden_states)

    return store


def _conflict(arguments: dict[str, Any]) -> str | None:
    """What in this training job does not go with a split."""
    args, accelerator = arguments.get("args"), arguments["accelerator"]
    offload = getattr(args, "enable_model_cpu_offload", arguments.get("enable_model_cpu_offload", False))
    if offload:
        return "--enable_model_cpu_offload streams the whole model through one GPU"
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return "DeepSpeed places the parameters itself"
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return "FSDP places the parameters itself"
    return None


def _blocked(read: settings.Settings) -> str | None:
    processes, devices = read.local_world_size, read.devices
    if processes > 1 and devices is not None and (len(devices) % processes or len(devices) < 2 * processes):
        return (
            f"{processes} processes share this machine (LOCAL_WORLD_SIZE) and {len(devices)} devices are named; "
            f"a split for each takes {2 * processes} or another multiple of {processes}"
        )
    return None


_UPSTREAM = "https://github.com/modelscope/DiffSynth-Studio/pull/1436"
_REMOVE_WHEN = "DiffSynth places a DiT over several devices itself"

FEATURE = Feature(
    name="diffsynth.model_split",
    summary="a Wan DiT split by blocks over several devices in one training process",
    switched_on_by="devices",
    needs_devices=2,
    blocked=_blocked,
    relies_on=(
        "diffsynth.pipelines.wan_video:model_fn_wan_video",
        "diffsynth.models.wan_video_dit:DiTBlock.forward",
        "diffsynth.diffusion.base_pipeline:BasePipeline.to",
        "diffsynth.diffusion.training_module:DiffusionTrainingModule.to",
    ),
    seams=(
        Seam(
            "diffsynth.models.model_loader:ModelPool.load_model_file",
            _load_to_host,
            why="loads the whole DiT onto one device, which a model that needs a split does not fit",
            upstream=_UPSTREAM,
            remove_when=_REMOVE_WHEN,
        ),
        Seam(
            "diffsynth.pipelines.wan_video:WanVideoPipeline.from_pretrained",
            _split_after_loading,
            why="the one place where every training and inference script gets its DiT",
            upstream=_UPSTREAM,
            remove_when=_REMOVE_WHEN,
        ),
        Seam(
            "diffsynth.diffusion.runner:launch_training_task",
            _split_before_training,
            why="moves the whole model to one device before training",
            upstream=_UPSTREAM,
            remove_when=_REMOVE_WHEN,
        ),
        Seam(
            "diffsynth.pipelines.wan_video:TeaCache.store",
            _bring_together,
            why="subtracts what entered the first block, on one device, from what left the last, on another",
            upstream=_UPSTREAM,
            remove_when=_REMOVE_WHEN,
        ),
    ),
)
