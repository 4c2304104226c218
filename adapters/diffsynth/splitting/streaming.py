"""`WANSHIM_PLAN=stream`, or `auto` where it is the better plan: each process trains the whole DiT on its GPU, with
frozen weights streamed from the host.

The DiT is loaded to the host, and streamed from there when `launch_training_task` receives it: by then the base is
frozen and LoRA is in. The streaming itself is `wanshim.core.streaming`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.splitting.choice import choose_for_one_device
from wanshim.adapters.diffsynth.splitting.memory import Room, checkpointing_asked, put, room_to_stream
from wanshim.adapters.diffsynth.splitting.pipelined_loop import keep_out_of_ddp, save_whole
from wanshim.adapters.diffsynth.splitting.refusals import conflict, family_of, refusal, tell
from wanshim.adapters.diffsynth.splitting.second_expert import set_second_aside

from wanshim import settings
from wanshim.errors import FeatureUnavailable
from wanshim.patching import SeamState
from wanshim.patching.joints import Joints

if TYPE_CHECKING:
    from wanshim.core.streaming import StreamHandle


def stream_refusal(arguments: dict[str, Any]) -> str | None:
    """What in this training job cannot be streamed, by name, or None."""
    pipe = arguments["model"].pipe
    family, read = family_of(pipe.dit), settings.read()
    reason = conflict(arguments) or refusal(pipe)
    if reason is not None or family is None:
        return reason
    if len(family.blocks) > 1:
        return f"{family.name} runs {' and '.join(family.blocks)} one after the other, and one list is streamed"
    if (owner := family.in_place_of_blocks(pipe)) is not None:
        return f"{owner} computes a block's work from its children, past the hook that brings the block's weights"
    if read.base is not None:
        return "WANSHIM_BASE: a quantised weight is more than the bytes that are streamed"
    if getattr(pipe.dit, "vram_management_enabled", False):
        return "--fp8_models and --offload_models move the weights themselves"
    if getattr(pipe.dit, "quantize_config", None) is not None:
        return "--quant_options: a quantised weight is more than the bytes that are streamed"
    if not checkpointing_asked(arguments.get("args")):
        return "backward needs each block's weights again: pass --use_gradient_checkpointing"
    return None


def stream_before_training(arguments: dict[str, Any], joints: Joints, seam: SeamState) -> StreamHandle | None:
    """Stream the DiT of this training job, or say why not: it is then trained where DiffSynth puts it.

    Raises:
        PlacementInvalid: not even with every block streamed does a step fit.
        FeatureUnavailable: the job cannot be streamed, under WANSHIM_STRICT.
    """
    from wanshim.core.streaming import Host, stream_model

    read, reason = settings.read(), stream_refusal(arguments)
    automatic = read.plan is not None and read.plan.name == "auto"
    if reason is not None:
        if read.strict and not automatic:
            raise FeatureUnavailable(f"diffsynth.model_split cannot stream this model's weights: {reason}")
        tell(f"not streamed: {reason}", seam)
        return None
    accelerator, model = arguments["accelerator"], arguments["model"]
    dit, say = model.pipe.dit, partial(tell, seam=seam)
    set_second_aside(model.pipe, joints, seam)
    device = str(accelerator.device)
    count, resident = _decide(arguments, device, say)
    count = _agreed(count, accelerator)
    if not count:
        if resident is not None:
            put(resident, arguments, joints, say)
        return None
    room, plan = room_to_stream(arguments, device, say, count)
    host = Host.of_process_group(accelerator.local_process_index, read.local_world_size)
    handle = stream_model(dit, device, count=len(plan.streamed), blocks=_blocks_of(dit), host=host)
    put(room, arguments, joints, say)
    joints.replace(accelerator, "save", save_whole)
    # each process has the streamed weights from the one copy that all share: DDP has nothing to send round
    waiting = {id(weight.tensor) for block in handle.ring.blocks for weight in block.weights}
    tensors = (*model.named_parameters(), *model.named_buffers())
    keep_out_of_ddp(model, [name for name, tensor in tensors if id(tensor) in waiting], joints)
    say(str(handle.plan))
    say("set up in " + ", ".join(f"{what} {seconds:.1f} s" for what, seconds in handle.seconds.items()))
    return handle


def _decide(arguments: dict[str, Any], device: str, say: Callable[[str], None]) -> tuple[int, Room | None]:
    """How many blocks this process would stream, and with none how it would take its steps."""
    wanted = settings.read().plan
    if wanted is not None and wanted.name == "auto":
        return choose_for_one_device(arguments, device, say)
    if wanted is not None and wanted.blocks is not None:
        return wanted.blocks, None
    _, plan = room_to_stream(arguments, device, lambda text: None, None)
    return len(plan.streamed), None


def _agreed(count: int, accelerator: Any) -> int:
    """The most that any process needs: they share one copy, and DDP must leave the same weights alone in all."""
    import torch

    if accelerator.num_processes == 1:
        return count
    most = torch.tensor(count, device=accelerator.device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def _blocks_of(dit: Any) -> str | None:
    family = family_of(dit)
    return family.blocks[0] if family is not None else None
