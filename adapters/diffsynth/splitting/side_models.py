"""Text encoder, VAE and the like beside a DiT: which of them can leave the first device, and what becomes of them.

DiffSynth's training keeps them on the first GPU and, under `--task sft`, calls them in every step before the DiT.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from wanshim.adapters.diffsynth import vram
from wanshim.adapters.diffsynth.splitting.refusals import family_of
from wanshim.adapters.diffsynth.training_road import Row, Run
from wanshim.core.model_split import split_of
from wanshim.core.model_split.side_models import HOST, can_visit, move_side_model, moved_to
from wanshim.core.shared.weight_bytes import num_bytes
from wanshim.core.strategy import SideModel
from wanshim.errors import FeatureUnavailable
from wanshim.undo import Undo


def side_models_of(pipe: Any) -> dict[str, Any]:
    """The models that the family's table names as side models, and that are on the first device."""
    family = family_of(pipe.dit)
    found = {name: getattr(pipe, name, None) for name in family.side_models} if family is not None else {}
    return {name: model for name, model in found.items() if model is not None and moved_to(model) is None}


def is_movable(model: torch.nn.Module) -> bool:
    """Whether a side model can leave: it is not pinned, nobody else moves its weights, and they are plain tensors."""
    return "_apply" not in vars(model) and not vram.is_managed(model) and can_visit(model)


def describe(pipe: Any) -> dict[str, SideModel]:
    """The side models of a training job."""
    return {
        name: SideModel(num_bytes=num_bytes(model), movable=is_movable(model) and not _trains(model))
        for name, model in side_models_of(pipe).items()
    }


def is_elsewhere(model: torch.nn.Module) -> bool:
    """Whether a model of the pipeline takes no memory of the first device for good."""
    return vram.is_managed(model) or moved_to(model) is not None


def moved_bytes(pipe: torch.nn.Module) -> dict[str, int]:
    """Bytes of the side models that were moved, by device."""
    moved: dict[str, int] = {}
    for model in pipe.children():
        if (device := moved_to(model)) is not None:
            moved[device] = moved.get(device, 0) + num_bytes(model)
    return moved


def move(pipe: Any, moves: Mapping[str, str], home: str) -> None:
    """Move side models as decided."""
    if not moves:
        return
    family = family_of(pipe.dit)
    assert family is not None  # it is split
    for name, device in moves.items():
        move_side_model(getattr(pipe, name), device, home, family.side_models[name])


def check_none_is_trained(pipe: torch.nn.Module) -> None:
    """Raise FeatureUnavailable if a side model that has left the first device is to be trained."""
    for name, model in pipe.named_children():
        if moved_to(model) is not None and _trains(model):
            raise FeatureUnavailable(
                f"{name} is to be trained, and it left the first stage's device, which has no room for both",
                expected="a frozen one",
                hint="Put fewer blocks on the first device with WANSHIM_SPLIT_AT, or use larger GPUs",
            )


def parameters_on_host(model: torch.nn.Module) -> list[str]:
    """Names of the parameters and buffers of side models that wait on the host: DDP takes those of one kind of device,
    and these are frozen."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if moved_to(module) == HOST
        for name, _ in (*module.named_parameters(), *module.named_buffers())
    ]


def offload_untrained_expert(pipe: Any, undo: Undo) -> list[str]:
    """The expert of a Wan2.2 pair that is not trained waits on the host, where nothing of the training job finds it,
    until `undo` is removed; the names of its parts.

    DiffSynth's losses run `dit` alone, whichever of the two it is.
    """
    family, names = family_of(pipe.dit), []
    for name in family.second if family is not None else ():
        part = getattr(pipe, name, None)
        if part is None:
            continue
        if (handle := split_of(part)) is not None:
            handle.remove()
        part.to("cpu")
        setattr(pipe, name, None)
        undo.add(partial(setattr, pipe, name, part))
        names.append(name)
    return names


def _trains(model: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def apply(run: Run, row: Row) -> None:
    """Move the side models that leave the first device by the plan."""
    move(run.call.pipe, run.plan.side_models, run.plan.devices[0])
    if run.handle is None:  # over stages the loop does it
        from wanshim.adapters.diffsynth.splitting.pipelined_loop import keep_out_of_ddp

        keep_out_of_ddp(run.call.model, parameters_on_host(run.call.model), run.undo)
