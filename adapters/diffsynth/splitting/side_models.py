"""Text encoder, VAE and the like beside a split DiT: where they go when they do not fit beside its first stage.

DiffSynth's training keeps them on the first GPU and, under `--task sft`, calls them in every step before the DiT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.splitting.memory import steps_of
from wanshim.adapters.diffsynth.splitting.refusals import family_of

from wanshim import settings
from wanshim.errors import FeatureUnavailable

if TYPE_CHECKING:
    from wanshim.core.model_split import SplitHandle


def guests_of(pipe: Any) -> dict[str, Any]:
    """The models that the family's table names as guests, that lie in this pipeline and can leave."""
    from wanshim.core.model_split.side_models import can_visit, lodging_of

    family = family_of(pipe.dit)
    found = {name: getattr(pipe, name, None) for name in family.guests} if family is not None else {}
    return {
        name: model
        for name, model in found.items()
        if model is not None
        and lodging_of(model) is None
        and "_apply" not in vars(model)  # kept on the CPU already
        and not getattr(model, "vram_management_enabled", False)
        and can_visit(model)
    }


def lodge_before_split(
    pipe: Any, devices: tuple[str, ...], read: settings.Settings, tell: Callable[[str], None]
) -> None:
    """Guests leave before the stages come, if the weights alone would not fit."""
    from wanshim.core.model_split.plan import plan_split
    from wanshim.core.model_split.split import check_devices
    from wanshim.core.shared.weight_bytes import num_bytes
    from wanshim.core.strategy import available_on

    check_devices(devices, pipe.dit)
    family = family_of(pipe.dit)
    available = available_on(devices)
    if family is None or not available:
        return
    share = 2 if read.base is not None else 1  # of bf16
    blocks = [num_bytes(block) // share for path in family.blocks for block in pipe.dit.get_submodule(path)]
    home = num_bytes(pipe.dit) - share * sum(blocks)
    plan = plan_split(blocks, home, devices, split_at=read.split_at)
    weights = plan.bytes_by_device
    _lodge(pipe, guests_of(pipe), weights, available, plan.home, weights[plan.home], tell)


def lodge_before_training(
    handle: SplitHandle, arguments: dict[str, Any], tell: Callable[[str], None], *, in_flight: int
) -> None:
    """Guests leave if the step's predicted peak would not fit beside them."""
    from wanshim.core.strategy import available_on, predict, store_of

    plan, pipe = handle.plan, arguments["model"].pipe
    _check_none_is_trained(pipe)
    guests = {name: m for name, m in guests_of(pipe).items() if not _trains(m)}
    available = available_on(plan.devices)
    if not guests or not available:
        return
    _, job = next(steps_of(arguments, lambda _: None, plan.devices, plan.split_at, in_flight))
    if job is None:
        return
    alone = replace(job, home=replace(job.home, frozen=job.home.frozen - store_of(*guests.values()).frozen))
    peaks = {peak.device: peak for peak in predict(alone)}
    home = peaks[plan.home]
    # with one micro-batch at a time guests are called while no activation is kept
    calling = home.weights + home.gradients_and_optimizer if in_flight == 1 else home.total
    totals = {device: peak.total for device, peak in peaks.items()}
    _lodge(pipe, guests, totals, available, plan.home, calling, tell)


def _trains(model: Any) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _check_none_is_trained(pipe: Any) -> None:
    from wanshim.core.model_split.side_models import lodging_of

    for name, model in pipe.named_children():
        if lodging_of(model) is not None and _trains(model):
            raise FeatureUnavailable(
                f"{name} is to be trained, and it left the first stage's device, which has no room for both",
                expected="a frozen one",
                hint="Put fewer blocks on the first device with WANSHIM_SPLIT_AT, or use larger GPUs",
            )


def lodged_on_host(model: Any) -> list[str]:
    """Names of the parameters of guests that wait on the host: DDP takes parameters of one kind of device, and these
    are frozen."""
    from wanshim.core.model_split.side_models import HOST, lodging_of

    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if lodging_of(module) == HOST
        for name, _ in module.named_parameters()
    ]


def _lodge(
    pipe: Any, guests: Mapping[str, Any], peaks: Mapping[str, int], available: Mapping[str, int], home: str,
    calling: int, tell: Callable[[str], None],
) -> None:  # fmt: skip
    from wanshim.core.model_split.plan import format_bytes
    from wanshim.core.model_split.side_models import HOST, find_lodging, lodge
    from wanshim.core.shared.weight_bytes import num_bytes

    family = family_of(pipe.dit)
    assert family is not None  # it is split
    sizes = {name: num_bytes(model) for name, model in guests.items()}
    for name, place in find_lodging(sizes, peaks, available, home, calling).items():
        lodge(guests[name], place, home, family.guests[name])
        where = f"waits in host memory and comes to {home} for each call" if place == HOST else f"works on {place}"
        tell(
            f"{name} ({format_bytes(sizes[name])}) {where}, with the same bits: beside it {home} would need "
            f"{format_bytes(peaks[home] + sum(sizes.values()))} of {format_bytes(available[home])}"
        )
