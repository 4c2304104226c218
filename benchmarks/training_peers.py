"""The training step as a user would run it without wanshim: with DiffSynth's own options, and by FSDP2 of torch.

Each function changes a model and how `model_split.micro_batch` runs it, until `undo` is removed. `SPOILING` ones change
the model for good: build another one afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import model_split as base
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from wanshim.undo import Undo

Peer = Callable[[Any, str, Undo], None]


def checkpoints_offloaded(model: Any, device: str, undo: Undo) -> None:
    """--use_gradient_checkpointing_offload"""
    undo.replace(base, "model_fn_wan_video", lambda own: partial(own, use_gradient_checkpointing_offload=True))


def layers_offloaded(model: Any, device: str, undo: Undo) -> None:
    """--enable_model_cpu_offload --use_gradient_checkpointing_offload: what DiffSynth has for least memory."""
    from diffsynth.core import OffloadTrainingManager

    checkpoints_offloaded(model, device, undo)
    manager = OffloadTrainingManager(model, torch.device(device))

    def and_after(micro_batch: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:
            loss = micro_batch(*args)
            manager.after_backward()
            return loss

        return run

    undo.replace(base, "micro_batch", and_after)


def quantised(model: Any, device: str, undo: Undo) -> None:
    """--quant_options ...:torchao_int8_w8a16, the 8-bit method that DiffSynth lists as differentiable on every GPU."""
    from diffsynth.core.quant import QuantizeConfig

    frozen = [
        f"blocks.{name}"
        for name, module in model.blocks.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad
    ]
    QuantizeConfig(method="torchao_int8_w8a16", target_modules=frozen).quantize_model(model)


def sharded(model: Any, device: str, undo: Undo, offload: OffloadPolicy | None = None) -> None:
    """FSDP2 over the process group, of this process alone if there is none."""
    if not dist.is_initialized():
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        undo.add(dist.destroy_process_group)
    trained: list[Any] = []

    def inside(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        trained.append(shard_fully(model, device, lambda inputs: own(model, **inputs), offload))
        return lambda _, **inputs: trained[0](inputs)  # type: ignore[no-any-return]

    undo.replace(base, "model_fn_wan_video", inside)


def shard_fully(
    model: Any, device: str, forward: Callable[[Any], torch.Tensor], offload: OffloadPolicy | None = None
) -> Any:
    """A module whose forward is this one and whose base lies sharded over all ranks, gathered block by block, the next
    one while this one computes. Gradients are summed in fp32."""

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Any) -> torch.Tensor:
            return forward(inputs)

    settings: dict[str, Any] = {
        "mesh": init_device_mesh(torch.device(device).type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": offload or OffloadPolicy(),
    }
    blocks = list(model.blocks)
    for block in blocks:
        fully_shard(block, **settings)
    trained = fully_shard(Trained(), **settings)
    for one, following in pairwise(blocks):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])
    return trained


def sharded_on_host(model: Any, device: str, undo: Undo) -> None:
    """FSDP2 whose parameters, gradients and optimizer lie in host memory."""
    sharded(model, device, undo, CPUOffloadPolicy(pin_memory=device.startswith("cuda")))


SPOILING = (layers_offloaded, quantised, sharded, sharded_on_host)
