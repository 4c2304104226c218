"""DiffSynth's training loop with each sample over a group of processes: the loop sees one process per group.

The loop itself stays as it is. accelerate counts groups where it divides samples, steps the schedule and averages, and
counts processes everywhere else, so that rank 0 alone writes. What a text encoder or VAE makes of a sample is made by
the first process of a group and brought to the others; with `diffsynth.vae_encode` all of them encode a video together.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wanshim.adapters.diffsynth import compiled_blocks, encode_cache
from wanshim.adapters.diffsynth.splitting import low_precision, refusals
from wanshim.adapters.diffsynth.splitting.data_parallel import count_groups
from wanshim.adapters.diffsynth.splitting.pipelined_loop import keep_out_of_ddp, save_whole
from wanshim.adapters.diffsynth.training_road import Row, Run
from wanshim.core.model_split.quantize import quantized_names
from wanshim.core.sequence import SequenceHandle, random_states, refuse_hooks, set_random_states, shard_sequence
from wanshim.core.shared.digest import digest
from wanshim.core.shared.tree import flatten
from wanshim.patching.vae_method import shares_ranks

SAVE_SECONDS = 3600.0  # for rank 0 to write a checkpoint while the others wait, as long as it is alive


def apply(run: Run, row: Row) -> None:
    """Shard each sample over the ranks of the plan until the run ends."""
    plan, call, undo = run.plan, run.call, run.undo
    from accelerate.state import PartialState

    undo.replace(call.accelerator, "save", save_whole)
    accelerator, device = call.accelerator, call.device
    groups = accelerator.num_processes // plan.ranks
    # DDP cannot flatten a quantised weight; every process stores the same ones, and they are frozen
    keep_out_of_ddp(call.model, quantized_names(call.model, trained=False), undo)
    group, family = _group(plan.ranks, accelerator), refusals.family_of(call.dit)
    assert family is not None  # or it had been refused
    assert family.block_lists is not None
    low_precision.share_in_copies(call.dit, undo)
    handle = shard_sequence(
        call.dit,
        group,
        blocks=family.block_lists(call.pipe, compiled=compiled_blocks.STEP.feature in plan.block_changes),
        sum_gradients=groups == 1,
        check_finite=accelerator.scaler is None,
    )
    undo.add(handle.remove)
    handle.match_trained(call.model)
    count_groups(accelerator, plan.ranks, group, lambda: handle.attendance.meet(SAVE_SECONDS), undo)
    averaged_later = list(call.model.named_parameters()) if groups > 1 else []
    undo.replace(accelerator, "backward", partial(_compared, handle, averaged_later, device))
    trained = Trained(handle, call.model)
    undo.add(register_optimizer_step_pre_hook(trained.before_step).remove)
    undo.replace(PartialState(), "wait_for_everyone", partial(_checked, handle, trained))
    if hasattr(call.logger, "on_training_end"):
        undo.replace(call.logger, "on_training_end", partial(_compared_first, trained))
    for name in ("on_step_end", "on_epoch_end", "on_training_end"):
        if hasattr(call.logger, name):
            undo.replace(call.logger, name, partial(_in_own_time, handle, device))
    if hasattr(call.logger, "save_model"):
        undo.replace(call.logger, "save_model", partial(_saved_by_one, handle))
    if hasattr(call.pipe, "unit_runner"):
        undo.replace(call.pipe, "unit_runner", lambda original: UnitRunner(original, handle, group, call.pipe, device))
    vae = getattr(call.pipe, "vae", None)
    if vae is not None and (shares_ranks(type(vae).decode) or shares_ranks(type(vae).encode)):
        from wanshim.core.decoding import held_by  # imports Triton

        held = ExitStack()
        undo.add(held.close)
        held.enter_context(held_by(group, handle.attendance.together))
    set_random_states(handle.leader.share(lambda: random_states(device), device), device)
    row.report(str(handle.plan))


def _group(ranks: int, accelerator: Any) -> Any:
    """This process's group of consecutive ranks; None for all ranks."""
    return None if ranks == accelerator.num_processes else dist.new_subgroups(ranks)[0]


def _compared(
    handle: SequenceHandle,
    averaged_later: list[tuple[str, torch.nn.Parameter]],
    device: torch.device,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """The backward of a loss that all ranks of the group have computed alike.

    Args:
        averaged_later: parameters, by name, whose gradients are not whole when it ends.
    """

    def backward(loss: torch.Tensor, **kwargs: object) -> Any:
        refuse_hooks(averaged_later)
        handle.compare_loss(loss.to(device))
        return original(loss, **kwargs)

    return backward


class Trained:
    """The trained weights of a run and the numbers of its optimizer, compared over the ranks of a group: before steps
    1, 2, 4, 8, ... and where the ranks meet before a file is written."""

    def __init__(self, handle: SequenceHandle, model: torch.nn.Module) -> None:
        self._handle = handle
        self._parameters = {parameter for parameter in model.parameters() if parameter.requires_grad}
        self._steps = 0
        self._groups: list[dict[str, Any]] = []

    def before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._parameters.isdisjoint(optimizer.param_groups[0]["params"]):
            return  # what one process may train alone
        self._groups, self._steps = optimizer.param_groups, self._steps + 1
        if self._steps & (self._steps - 1) == 0:
            self.compare()

    def compare(self) -> None:
        """Every rank calls it.

        Raises:
            RankDisagreement: one table on all ranks.
        """
        self._handle.compare_trained(
            {
                f"{name} of parameter group {place}": str(value.item() if isinstance(value, torch.Tensor) else value)
                for place, group in enumerate(self._groups)
                for name, value in group.items()
                if isinstance(value, (int, float, tuple)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            }
        )


def _compared_first(trained: Trained, original: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: object, **kwargs: object) -> Any:
        trained.compare()
        return original(*args, **kwargs)

    return called


def _checked(handle: SequenceHandle, trained: Trained, original: Callable[[], Any]) -> Callable[[], Any]:
    """Raise what stopped the group, before a checkpoint is written, and meet its ranks, of which accelerate counts one.
    Ranks that meet have trained the same. A rank that alone comes here does not wait."""

    def wait_for_everyone() -> Any:
        handle.check()
        if handle.attendance.meet(SAVE_SECONDS):
            trained.compare()
        return original()

    return wait_for_everyone


def _in_own_time(handle: SequenceHandle, device: torch.device, original: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the logger, in which the user's code may work on one rank alone: the others wait for it, and the ranks
    go on with the random states of the first, from which they draw the next sample's noise."""

    def called(*args: object, **kwargs: object) -> Any:
        handle.attendance.work_alone()
        result = original(*args, **kwargs)
        states = random_states(device)
        if not handle.leader.agrees(_digest(states)):
            set_random_states(handle.leader.share(lambda: states, device), device)
        return result

    return called


def _saved_by_one(handle: SequenceHandle, original: Callable[..., Any]) -> Callable[..., Any]:
    """The others wait for whoever writes: an exchange that it does not come to would run into the deadline."""

    def save_model(*args: object, **kwargs: object) -> Any:
        handle.attendance.work_alone()
        result = original(*args, **kwargs)
        handle.attendance.meet(SAVE_SECONDS)
        return result

    return save_model


class UnitRunner:
    """In place of a pipeline's: units that run a side model do so on the group's first process, which gives the others
    what changed in their inputs and, if the unit drew, its random states. Those that run nothing but a VAE whose encode
    the ranks share do so on all."""

    def __init__(
        self, original: Callable[..., Any], handle: SequenceHandle, group: Any, pipe: Any, device: torch.device
    ) -> None:
        self._original, self._handle, self._group, self._device = original, handle, group, device
        family = refusals.family_of(pipe.dit)
        assert family is not None  # or it had been refused
        self._side_models = set(family.side_models)

    def __call__(self, unit: Any, pipe: Any, *inputs: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        used = self._side_models.intersection(encode_cache.models_of(unit))
        if not any(getattr(pipe, name, None) is not None for name in used):
            return self._original(unit, pipe, *inputs)
        from wanshim.core.decoding import held_alone, held_by  # imports Triton

        trains = torch.is_grad_enabled()
        if not trains and not self._handle.attendance.together(f"{type(unit).__name__} {_digest(inputs)}"):
            with held_alone():
                return self._original(unit, pipe, *inputs)  # type: ignore[no-any-return]
        # behind the cache one rank may have what another one has to encode: then the leader alone looks
        if used == {"vae"} and shares_ranks(type(pipe.vae).encode) and not encode_cache.is_behind(pipe):
            if trains:
                self._handle.attendance.meet(SAVE_SECONDS)  # a rank may still be at a validation of its own
            with held_by(self._group):
                return self._original(unit, pipe, *inputs)  # type: ignore[no-any-return]
        changes = self._handle.leader.share(lambda: self._changes(unit, pipe, inputs), self._device)
        if changes["random"] is not None:
            set_random_states(changes["random"], self._device)
        return tuple(
            {**{key: value for key, value in given.items() if key not in changed["removed"]}, **changed["set"]}
            for given, changed in zip(inputs, changes["inputs"], strict=True)
        )

    def _changes(self, unit: Any, pipe: Any, inputs: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        from wanshim.core.decoding import held_alone

        before = random_states(self._device)
        with held_alone():
            results = self._original(unit, pipe, *(dict(given) for given in inputs))
        after = random_states(self._device)
        return {
            "inputs": [
                {
                    "set": {k: v for k, v in result.items() if k not in given or given[k] is not v},
                    "removed": [k for k in given if k not in result],
                }
                for given, result in zip(inputs, results, strict=True)
            ],
            "random": None if _digest(before) == _digest(after) else after,
        }


def _digest(value: Any) -> str:
    """A digest of tensors, images, texts and numbers, and of containers of them; of anything else its class alone."""

    def of_other(name: str, other: Any) -> str:
        if isinstance(other, (torch.Tensor, int, float, str)):
            return digest(other) if isinstance(other, torch.Tensor) else repr(other)
        return sha256(other.tobytes()).hexdigest() if hasattr(other, "tobytes") else type(other).__name__

    tensors: dict[str, torch.Tensor] = {}
    described = [flatten(value, "", tensors, of_other), [digest(tensor) for tensor in tensors.values()]]
    return sha256(json.dumps(described).encode()).hexdigest()
