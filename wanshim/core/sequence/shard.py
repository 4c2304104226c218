"""Shard the tokens of one sample over the ranks of a group, through all blocks of a transformer, and take it back."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError

from wanshim.core import agreement
from wanshim.errors import SequenceInvalid
from wanshim.undo import Undo

from .exchange import Passage, Shard, Share, shard
from .gradients import GradientSum
from .group import SequenceGroup
from .inputs import FiniteCheck, InputCheck
from .plan import SequencePlan, plan_sequence

ATTRIBUTE = "_wanshim_sequence"
DEADLINE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class BlockList:
    """How blocks that run one after the other are called; the defaults are those of Wan's transformer.

    Args:
        blocks: each called with the last one's output, (b, tokens, width).
        exit: the module that takes the tokens as its first argument behind the last block; they are gathered there.
            None: the last block's output is gathered.
        gather: False leaves the output sharded, for what is added to the tokens of other blocks.
        attention: path in a block to the module that is called with query, key and value, (b, tokens, heads*dim) each,
            and returns the same shape.
        projections: paths to the modules whose outputs become query, key and value, in the order in which they run.
            Their outputs travel while the next ones are computed; what happens between them and `attention` sees all
            tokens and this rank's heads. Empty: they travel when `attention` is called.
        num_heads: paths to the attributes that say how many heads there are where only this rank's are seen.
        tokens: the argument that carries the tokens through the blocks.
        per_token: arguments that have an entry a token: for each, the dimension over tokens by number of dimensions,
            so that `{"t_mod": {4: 1}}` is sharded only where it has four. Every other tensor is shared: all ranks use
            it whole, and its gradients are summed.
        whole: those of `per_token` that are used between projections and attention, such as rotary frequencies.
    """

    blocks: Sequence[nn.Module]
    exit: nn.Module | None = None
    gather: bool = True
    attention: str = "self_attn.attn"
    projections: tuple[str, ...] = ("self_attn.norm_q", "self_attn.norm_k", "self_attn.v")
    num_heads: tuple[str, ...] = ("self_attn.num_heads", "self_attn.attn.num_heads")
    tokens: str = "x"
    per_token: Mapping[str, Mapping[int, int]] = field(
        default_factory=lambda: {"x": {3: 1}, "t_mod": {4: 1}, "freqs": {3: 0}}
    )
    whole: tuple[str, ...] = ("freqs",)


class SequenceHandle:
    """A sharded model. Every rank calls it with the same inputs and has the whole output and whole gradients.

    `plan` says who holds what; once the model was called, for that length too.
    """

    def __init__(self, model: nn.Module, run: _Run, undo: Undo) -> None:
        self.model = model
        self._run, self._undo = run, undo

    @property
    def plan(self) -> SequencePlan:
        return self._run.plan

    def check(self) -> None:
        """Wait for the GPU, then raise what stopped the group, if anything did: before weights are saved."""
        self._run.check()

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
    loss. When `backward()` returns, every rank has the whole gradient of everything trained; gradients accumulate as
    always. Adapters such as LoRA are injected before. Weights, their dtype and their device stay as they are.

    Args:
        model: with `blocks` as Wan's transformer calls them, or as the argument `blocks` says.
        group: two or more ranks, at most as many as heads. Default: all ranks of the job.
        blocks: every list of blocks through which sharded tokens go, in the order of execution; they have the same
            number of heads. Default: the `blocks` of `model`, gathered at its `head` where it has one.
        sum_gradients: False leaves each rank its own part of the blocks' gradients, times the number of ranks, for
            a wrapper that averages over all ranks of all groups, such as DistributedDataParallel.
        check_finite: raise at the end of a backward pass if the loss has a gradient that is NaN or infinite. False
            suits loss scaling.
        deadline: seconds that any wait for another rank may take.

    Raises:
        SequenceInvalid: one process, more ranks than heads, a model that is sharded already or is built otherwise.
            The model is as it was before.
        SequenceDisagreement: the ranks shard different models. Later, at the end of the backward pass (without
            gradients: of the forward pass) or sooner: they were called with different inputs.
        SequenceFailed: a rank did not come. Later: a rank failed, died or did not answer within the deadline.
    """
    if sequence_of(model) is not None:
        raise SequenceInvalid(f"{type(model).__name__} is sharded already", hint="Call remove() on its handle first")
    lists = list(blocks) if blocks is not None else [_blocks_of(model)]
    heads = _heads_of(lists)
    if not dist.is_available() or not dist.is_initialized():
        raise SequenceInvalid(
            "a process without a process group",
            expected="two or more processes joined by torch.distributed",
            hint="Start one process for each GPU, for example with torchrun --nproc-per-node 2, "
            "and call torch.distributed.init_process_group",
        )
    count = sum(len(listed.blocks) for listed in lists)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    plan = plan_sequence(ranks, heads=heads, blocks=count)
    if dist.get_rank() not in ranks:
        raise SequenceInvalid(
            f"rank {dist.get_rank()} is not in the group of ranks {', '.join(map(str, ranks))}",
            hint="Call shard_sequence on the ranks of the group only",
        )
    _check_not_tied(model, lists)
    agreement.ensure(group)
    run = _Run(SequenceGroup(group, deadline), plan, sum_gradients=sum_gradients, check_finite=check_finite)
    undo = Undo()
    undo.add(run.close)
    try:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        run.group.start({"model": type(model).__name__, "blocks": count, "heads": heads, "trained": trained})
        for listed in lists:
            _attach(run, listed, undo)
        handle = SequenceHandle(model, run, undo)
        undo.set(model, {ATTRIBUTE: handle})
    except BaseException:
        undo.remove()
        raise
    return handle


class _Run:
    """What the hooks of all blocks share: the group, the plan for each length, and what a call leaves to check."""

    def __init__(self, group: SequenceGroup, plan: SequencePlan, *, sum_gradients: bool, check_finite: bool) -> None:
        self.group = group
        self.plan = plan
        self.gradients = GradientSum(group, self.begin_backward) if sum_gradients else None
        self.check_finite = check_finite
        # The blocks' gradients are this rank's part of a sum; a wrapper that averages over ranks wants them larger.
        self.scale = 1.0 if sum_gradients else float(group.size)
        self.parameters: list[nn.Module] = []
        self._plans: dict[int, SequencePlan] = {}
        self._calls = 0
        self._arriving: list[InputCheck] = []
        self._checks: list[InputCheck | FiniteCheck] = []
        self._brought: dict[tuple[int, int | None], tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._in_backward = False

    def plan_for(self, tokens: int) -> SequencePlan:
        if tokens not in self._plans:
            self._plans[tokens] = self.plan.with_tokens(tokens)
        return self._plans[tokens]

    def enter(self, inputs: Mapping[str, torch.Tensor], plan: SequencePlan) -> None:
        """The first block of a list is called, not recomputed."""
        if self._in_backward:
            self.group.watch.fail("error", "a backward pass ended with an error, and a forward pass followed")
            raise self.group.watch.cause()
        self.plan = plan
        self._calls += 1
        tensors = (
            f"{name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}{' with a gradient' * t.requires_grad}"
            for name, t in inputs.items()
        )
        described = ", ".join(tensors) + ("" if torch.is_grad_enabled() else ", without gradients")
        self.group.watch.called(self._calls, described)
        if self.gradients is not None:  # also without gradients: a reentrant checkpoint runs its first forward so
            self.gradients.watch(p for module in self.parameters for p in module.parameters())
        self._arriving.append(InputCheck(self.group, self._calls, inputs, described))
        if not next(iter(inputs.values())).is_cuda:  # nothing runs ahead, and gloo ends a process on a wrong size
            self.arrive()
            self._checks[-1].verify()

    def arrive(self) -> None:
        """The first block is on its way: by now the digests are, too."""
        while self._arriving:
            check = self._arriving.pop()
            check.arrive()
            self._checks.append(check)

    def local(self, x: torch.Tensor, dim: int, plan: SequencePlan) -> torch.Tensor:
        """This rank's part of a tensor with an entry a token."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return shard(x, dim, self.group, plan.tokens)
        return self._once(x, dim, lambda: Shard.apply(x, dim, self.group, plan.tokens, 1 / self.scale))

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that this rank uses whole."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return self._once(x, None, lambda: Share.apply(x, self.group, 1 / self.scale))

    def gathered(self, x: torch.Tensor, plan: SequencePlan) -> torch.Tensor:
        """Behind the last block: the tokens of all ranks."""
        self._brought.clear()
        self.group.watch.at("gather of the tokens")
        whole = _Gather.apply(x, self, plan)
        if not torch.is_grad_enabled():
            self.verify()
        return whole

    def begin_backward(self) -> None:
        """Once a backward pass: its end is where gradients become whole and checks are read."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def verify(self) -> None:
        checks, self._checks = self._checks, []
        for check in checks:
            check.verify()
        self.group.watch.check()

    def add_check(self, check: FiniteCheck) -> None:
        self._checks.append(check)

    def check(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
            self.group.poll(event.query)
        self.verify()

    def close(self) -> None:
        if self.gradients is not None:
            self.gradients.remove()
        self._brought.clear()
        self.group.close()

    def _end_backward(self) -> None:
        self._in_backward = False
        self.verify()
        if self.gradients is not None:
            self.gradients.finish()
        self.group.watch.at("outside the blocks")

    def _once(self, x: torch.Tensor, dim: int | None, make: Any) -> torch.Tensor:
        """The same result for every block of a call, so that its gradients meet before they travel."""
        if _backward_runs():  # a recomputation: its graph is its own
            return make()
        known = self._brought.get((id(x), dim))
        if known is None or known[1] != x._version:
            known = self._brought[id(x), dim] = (x, x._version, make())
        return known[2]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: _Run, plan: SequencePlan) -> torch.Tensor:
        ctx.run, ctx.plan = run, plan
        batch, _, width = x.shape
        out = x.new_empty_strided((batch, sum(plan.tokens), width), (width, batch * width, 1))
        run.group.gather(x.transpose(0, 1).contiguous(), plan.tokens, out.transpose(0, 1))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        run = ctx.run
        run.begin_backward()
        if run.check_finite:
            run.add_check(FiniteCheck(run.group, gradient))
        mine = shard(gradient, 1, run.group, ctx.plan.tokens)
        return mine * run.scale if run.scale != 1.0 else mine, None, None


class _Block:
    """The hooks of one block."""

    def __init__(self, run: _Run, listed: BlockList, index: int) -> None:
        self._run, self._listed, self._index = run, listed, index
        self._first, self._last = index == 0, index == len(listed.blocks) - 1
        block = listed.blocks[index]
        self._names = list(inspect.signature(block.forward).parameters)
        self._plan = run.plan
        self._passages: list[tuple[Passage, torch.Tensor]] = []
        self._modules = {path: block.get_submodule(path) for path in (*listed.projections, listed.attention)}

    def attach(self, undo: Undo) -> None:
        block = self._listed.blocks[self._index]
        undo.add(block.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        undo.add(block.register_forward_hook(self._after, always_call=True).remove)
        for path in self._listed.projections:
            undo.add(self._modules[path].register_forward_hook(self._projected).remove)
        attention = self._modules[self._listed.attention]
        undo.add(attention.register_forward_pre_hook(self._before_attention).remove)
        undo.add(attention.register_forward_hook(self._after_attention).remove)

    def _before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        run.group.watch.check()
        for path, module in self._modules.items():
            if block.get_submodule(path) is not module:
                raise SequenceInvalid(
                    f"{path} of block {self._index} is another module than when the model was sharded",
                    hint="Call remove(), inject adapters such as LoRA, then call shard_sequence() again",
                )
        given = dict(zip(self._names, args)) | kwargs
        self._plan = run.plan_for(self._length(given))
        recomputed = _backward_runs()
        run.group.watch.at(f"block {self._index}{', recomputed' * recomputed}")
        if self._first and not recomputed:
            run.enter({name: value for name, value in given.items() if isinstance(value, torch.Tensor)}, self._plan)
        self._passages.clear()
        brought = {name: self._brought(name, value) for name, value in given.items()}
        positional = tuple(brought[name] for name in self._names[: len(args)])
        return positional, {name: brought[name] for name in kwargs}

    def _after(self, block: nn.Module, args: Any, output: Any) -> Any:
        error = sys.exc_info()[1]
        if output is None and error is not None:  # the hook is always called: here the block has failed
            if not isinstance(error, _StopRecomputationError):
                self._run.group.watch.fail_with(error)
            return None
        if self._first and not _backward_runs():
            self._run.arrive()
        if self._last and self._listed.gather and self._listed.exit is None:
            return self._run.gathered(output, self._plan)
        return None

    def _projected(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        which = len(self._passages)
        if self._modules[self._listed.projections[which]] is not module:
            raise SequenceInvalid(
                f"the projections of block {self._index} run in another order than {self._listed.projections}",
                hint="Name them in the order in which the block runs them",
            )
        last = which + 1 == len(self._listed.projections)
        started = self._start(output)
        if last:  # what follows may read the others
            for passage, on_its_way in self._passages[:-1]:
                passage.arrive(on_its_way)
        return started

    def _before_attention(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if len(args) < 3:
            raise SequenceInvalid(
                f"{self._listed.attention} of block {self._index} gets {len(args)} positional arguments",
                expected="query, key and value",
            )
        if self._listed.projections:
            passage, on_its_way = self._passages[-1]
            passage.arrive(on_its_way)
            return None
        started = [self._start(tensor) for tensor in args[:3]]
        for passage, on_its_way in self._passages:
            passage.arrive(on_its_way)
        return (*started, *args[3:])

    def _after_attention(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        passage = Passage(self._run.group, self._plan, to_heads=False)
        tokens = passage.start(output)
        passage.arrive(tokens)
        return tokens

    def _start(self, x: torch.Tensor) -> torch.Tensor:
        passage = Passage(self._run.group, self._plan, to_heads=True)
        started = passage.start(x)
        self._passages.append((passage, started))
        return started

    def _brought(self, name: str, value: Any) -> Any:
        """An argument as this rank's part of the block takes it."""
        if not isinstance(value, torch.Tensor):
            if any(t.requires_grad for t in _tensors_in(value)):
                raise SequenceInvalid(
                    f"argument {name} of block {self._index} is a {type(value).__name__} of tensors with gradients",
                    expected="tensors as arguments of their own",
                )
            return value
        dim = self._token_dim(name, value)
        if dim is None or name in self._listed.whole:
            return self._run.shared(value) if name != self._listed.tokens else value
        if name == self._listed.tokens and not self._first:
            mine = self._plan.tokens[self._run.group.rank]
            if value.size(dim) != mine:
                raise SequenceInvalid(
                    f"block {self._index} gets {value.size(dim)} tokens", expected=f"{mine}, this rank's share"
                )
            return value
        return self._run.local(value, dim, self._plan)

    def _length(self, given: Mapping[str, Any]) -> int:
        """The number of tokens of all ranks, from the arguments that have an entry for each."""
        lengths = {
            name: value.size(dim)
            for name, value in given.items()
            if isinstance(value, torch.Tensor)
            and (dim := self._token_dim(name, value)) is not None
            and (self._first or name != self._listed.tokens)
        }
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise SequenceInvalid(
                f"block {self._index} gets arguments of different lengths: {found}",
                expected="one entry a token in each",
            )
        return next(iter(lengths.values()), sum(self._run.plan.tokens))

    def _token_dim(self, name: str, value: torch.Tensor) -> int | None:
        return self._listed.per_token.get(name, {}).get(value.dim())


def _attach(run: _Run, listed: BlockList, undo: Undo) -> None:
    mine = run.plan.heads[run.group.rank]
    for index, block in enumerate(listed.blocks):
        _Block(run, listed, index).attach(undo)
        for path in listed.num_heads:
            owner, _, name = path.rpartition(".")
            undo.set(block.get_submodule(owner), {name: mine})
    run.parameters += listed.blocks
    if listed.exit is not None:

        def gather(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return run.gathered(args[0], run.plan), *args[1:]

        undo.add(listed.exit.register_forward_pre_hook(gather).remove)


def _blocks_of(model: nn.Module) -> BlockList:
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise SequenceInvalid(
            f"{type(model).__name__} has no ModuleList named blocks",
            expected="a transformer like Wan's",
            hint="Describe its blocks: shard_sequence(model, group, blocks=[BlockList(...)])",
        )
    exit_ = getattr(model, "head", None)
    return BlockList(blocks=list(blocks), exit=exit_ if isinstance(exit_, nn.Module) else None)


def _heads_of(lists: Sequence[BlockList]) -> int:
    """The number of heads, the same in all blocks, of which every named part is there."""
    found: dict[int, str] = {}
    for listed in lists:
        for index, block in enumerate(listed.blocks):
            modules = dict(block.named_modules())
            for path in (*listed.projections, listed.attention):
                if path not in modules:
                    raise SequenceInvalid(
                        f"{type(block).__name__} {index} has no module {path}",
                        hint="Name the block's self-attention: BlockList(attention=..., projections=...)",
                    )
            for path in listed.num_heads:
                owner, _, name = path.rpartition(".")
                heads = getattr(modules.get(owner), name, None)
                if not isinstance(heads, int):
                    raise SequenceInvalid(
                        f"{type(block).__name__} {index} has no number {path}",
                        hint="Name where the block keeps its number of heads: BlockList(num_heads=...)",
                    )
                found.setdefault(heads, f"{path} of {type(block).__name__} {index}")
            missing = listed.per_token.keys() - inspect.signature(block.forward).parameters.keys()
            if listed.tokens in missing:
                raise SequenceInvalid(
                    f"{type(block).__name__} takes no argument {listed.tokens}",
                    hint="Name the argument that carries the tokens: BlockList(tokens=..., per_token=...)",
                )
    if len(found) != 1:
        named = ", ".join(f"{heads} in {where}" for heads, where in found.items())
        raise SequenceInvalid(f"attention heads: {named or 'none named'}", expected="the same number in every block")
    return next(iter(found))


def _check_not_tied(model: nn.Module, lists: Sequence[BlockList]) -> None:
    """A parameter that blocks share with what every rank computes alike has a gradient of two kinds."""
    inside = {id(module) for listed in lists for block in listed.blocks for module in block.modules()}
    held = {id(p): p for listed in lists for block in listed.blocks for p in block.parameters() if p.requires_grad}
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in held:
                raise SequenceInvalid(
                    f"{path}.{name} is also a parameter of a block".lstrip("."),
                    expected="parameters of the blocks that are used in the blocks only",
                )


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    return [t for item in value for t in _tensors_in(item)] if isinstance(value, (list, tuple)) else []


def _backward_runs() -> bool:
    """Whether autograd is at work: a block that is called now is recomputed from its checkpoint."""
    return torch._C._current_graph_task_id() != -1
