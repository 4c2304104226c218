"""Shard the tokens of one sample over the ranks of a group, through all blocks of a transformer, and take it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from wanshim.core.ranks import agreement
from wanshim.core.shared.copies import detached_copy, set_copier
from wanshim.errors import ModelInvalid
from wanshim.undo import Undo

from .attendance import Attendance
from .blocks import BlockList, check_tokens_apart, default_block_list, heads_of
from .group import SequenceGroup
from .hooks import attach
from .leader import Leader
from .plan import SequencePlan, plan_sequence
from .run import ShardedModel
from .weights import compare_trained, match_weights

ATTRIBUTE = "_wanshim_sequence"
DEADLINE_SECONDS = 300.0


class SequenceHandle:
    """A sharded model. Every rank calls it with the same inputs and has the whole output and whole gradients.

    `plan` says who holds what; once the model was called, for that length too. `leader` brings what the first rank
    makes to all of them; `attendance` says which calls they make together.
    """

    def __init__(self, model: nn.Module, run: ShardedModel, undo: Undo, attendance: Attendance) -> None:
        self.model = model
        self.leader = Leader(run.group, attendance)
        self.attendance = attendance
        self._run, self._undo = run, undo

    @property
    def plan(self) -> SequencePlan:
        return self._run.plan

    def check(self) -> None:
        """Wait for the GPU, then raise what stopped the group, if anything did: before weights are saved."""
        self._run.check()

    def match_trained(self, module: nn.Module) -> None:
        """Keep what is trained in a module that works with the model the same on all ranks: give it the first rank's
        values, and average its gradients. Every rank calls it.

        Raises:
            RankDisagreement: other names, shapes or dtypes are trained on another rank.
        """
        match_weights(self._run.group, {n: p for n, p in module.named_parameters() if p.requires_grad})
        self._run.trained.insert(0, module)  # it may hold the model: its names are the longest

    def compare_trained(self, numbers: Mapping[str, str]) -> None:
        """Compare what is trained, by digest, and numbers of its optimizer over the ranks. Every rank calls it.

        Raises:
            RankDisagreement: they have drifted apart: one table on all ranks.
        """
        self.attendance.join("a comparison of what is trained")
        trained: dict[str, torch.Tensor] = {}
        seen = set[torch.Tensor]()
        for module in self._run.trained:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and parameter not in seen:
                    seen.add(parameter)
                    trained[f"{name} ({len(trained)})" if name in trained else name] = parameter
        compare_trained(self._run.group, trained, numbers)

    def compare_loss(self, loss: torch.Tensor) -> None:
        """Compare a loss over the ranks while the backward that follows runs; the host waits for nothing.

        Args:
            loss: on the device of the model. That backward raises `RankDisagreement` on every rank, with one table, if
                the ranks' losses differ by more than rounding.
        """
        self._run.loss = loss.detach()

    def fail(self, error: BaseException) -> None:
        """Report an error of this rank that the model does not see; the other ranks stop with its name at once."""
        self._run.group.watch.fail_with(error)

    def remove(self) -> None:
        """Leave the group and restore the model. Every rank calls it. Safe to call twice."""
        self._undo.remove()


def sequence_of(model: nn.Module) -> SequenceHandle | None:
    """The handle of a model that is sharded, else None."""
    return getattr(model, ATTRIBUTE, None)


def shard_sequence(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    blocks: Sequence[BlockList] | None = None,
    sum_gradients: bool = True,
    check_finite: bool = True,
    deadline: float = DEADLINE_SECONDS,
) -> SequenceHandle:
    """Shard the tokens of each sample over the ranks of `group`, from the first block of `model` to the last.

    Every rank of the group makes this call, with the same model, and afterwards calls the model with the same inputs.
    Outside self-attention a rank has its share of the tokens; inside, all tokens for its share of the heads
    (DeepSpeed-Ulysses, arXiv:2309.14509). Tokens are gathered behind the last block, so every rank computes the same
    loss. Without gradients one rank may call a model that is trained alone, as for a validation: it then computes the
    whole, and the others wait for it in their next call. When `backward()` returns, every rank has the whole gradient
    of everything trained; gradients accumulate as always. The loss is computed from the output, the weights or both,
    not from what a block computes inside: a rank has its own tokens of that, and `compare_loss(loss)` of the handle,
    called before `backward()`, finds it. Adapters such as LoRA are injected before. Trained parameters get the first
    rank's values here; frozen ones are compared by digest and stay as they are. Copies of the model by `copy.deepcopy`,
    pickle or `torch.save` are not sharded.

    Args:
        model: with `blocks` as Wan's transformer calls them, or as the argument `blocks` says.
        group: two or more ranks, at most as many as heads. Default: all ranks of the job.
        blocks: every list of blocks through which sharded tokens go, in the order of execution; they have the same
            number of heads. Default: the `blocks` of `model`, gathered at its `head` where it has one.
        sum_gradients: False leaves each rank its own part of the blocks' gradients, times the number of ranks, for
            a wrapper that averages over all ranks of all groups, such as DistributedDataParallel. Otherwise all
            gradients are averaged, also those that each rank computes whole: kernels may round differently on each.
        check_finite: raise at the end of a backward pass if the loss has a gradient that is NaN or infinite. False
            suits loss scaling.
        deadline: seconds that any wait for another rank may take.

    Raises:
        ModelInvalid: one process, dropout in a block, more ranks than heads, a model that is sharded already or is
            built otherwise. The model is as it was before.
        RankDisagreement: the ranks shard different models or hold different weights. Later, at the end of the
            backward pass (without gradients: of the forward pass) or sooner: they were called with different inputs.
        RanksFailed: a rank did not come. Later: a rank failed, died or did not answer within the deadline.
    """
    if sequence_of(model) is not None:
        raise ModelInvalid(f"{type(model).__name__} is sharded already", hint="Call remove() on its handle first")
    lists = list(blocks) if blocks is not None else [default_block_list(model)]
    if any(listed.text is not None for listed in lists):
        raise ModelInvalid(
            f"{type(model).__name__} has blocks of two streams",
            expected="blocks of one, because the gradients of text, which every rank computes, are not averaged",
        )
    heads = heads_of(lists)
    if not dist.is_available() or not dist.is_initialized():
        raise ModelInvalid(
            "a process without a process group",
            expected="two or more processes joined by torch.distributed",
            hint="Start one process for each GPU, and call torch.distributed.init_process_group in each",
        )
    count = sum(len(listed.blocks) for listed in lists)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    plan = plan_sequence(ranks, heads=heads, blocks=count)
    if dist.get_rank() not in ranks:
        raise ModelInvalid(
            f"rank {dist.get_rank()} is not in the group of ranks {', '.join(map(str, ranks))}",
            hint="Call shard_sequence on the ranks of the group only",
        )
    check_tokens_apart(lists, model)
    agreement.ensure(group, call="shard_sequence")
    joined = SequenceGroup.of(group, deadline)
    attendance = Attendance(joined)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    run = ShardedModel(
        joined,
        plan,
        sum_gradients=sum_gradients,
        check_finite=check_finite,
        attendance=attendance if trained else None,  # a model that is not trained is for what all ranks compute
    )
    undo, attached = Undo(), Undo()
    undo.add(run.close)
    undo.add(attached.remove)
    try:
        run.group.start({"model": type(model).__name__, "blocks": count, "heads": heads, "trained": trained})
        match_weights(run.group, _weights(model, lists))
        for index, listed in enumerate(lists):
            attach(run, listed, attached, first=not index)
        run.trained += [model, *(block for listed in lists for block in listed.blocks)]
        handle = SequenceHandle(model, run, undo, attendance)
        attached.set(model, {ATTRIBUTE: handle})
        _copy_plainly(model, lists, attached)
    except BaseException:
        undo.remove()
        raise
    return handle


def _weights(model: nn.Module, lists: Sequence[BlockList]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the model, and of blocks that are not in it, by name."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = {id(tensor) for tensor in found.values()}
    for i, listed in enumerate(lists):
        for j, block in enumerate(listed.blocks):
            for name, tensor in (*block.named_parameters(), *block.named_buffers()):
                if id(tensor) not in held:
                    found[f"block {j} of list {i}: {name}"] = tensor
    return found


def _copy_plainly(model: nn.Module, lists: Sequence[BlockList], attached: Undo) -> None:
    """Copies of the model, of a block or of what holds one are made without the hooks, which hold the group."""
    blocks = [block for listed in lists for block in listed.blocks]
    exits = [listed.exit for listed in lists if listed.exit is not None]
    touched = list(dict.fromkeys(module for root in (model, *blocks, *exits) for module in root.modules()))

    def copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        return detached_copy(module, memo, [attached], touched)

    for module in dict.fromkeys((model, *blocks, *exits)):
        set_copier(module, copy, attached)
