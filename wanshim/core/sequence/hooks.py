"""The hooks of one block: its arguments become this rank's part, its attention sees all tokens of this rank's heads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError

from wanshim.core.shared.graphs import outside_graphs
from wanshim.errors import ModelInvalid
from wanshim.undo import Undo

from .blocks import BlockList, argument_names, random_draw
from .exchange import Passage, gather_heads, own_heads
from .random_state import generator_state
from .run import ShardedModel, backward_runs


def attach(run: ShardedModel, listed: BlockList, undo: Undo, *, first: bool) -> None:
    """Hook every block of a list, the `first` of the model or a later one, and its exit."""
    mine, all_heads = run.plan.heads[run.group.rank], sum(run.plan.heads)
    for index, block in enumerate(listed.blocks):
        BlockHooks(run, listed, index, first and not index).attach(undo)
        for path in () if listed.function else (*listed.num_heads, *listed.widths):
            owner, _, name = path.rpartition(".")
            module = block.get_submodule(owner)
            whole = getattr(module, name)
            run.heads.append((module, name, whole // all_heads * mine, whole))
            undo.set(module, {name: whole // all_heads * mine})
    if listed.function:
        module_name, _, name = listed.function.partition(":")
        undo.replace(import_module(module_name), name, lambda original: _exchanging(run, original))
    if listed.exit is not None:

        def gather(module: nn.Module, args: tuple[Any, ...]) -> Any:
            if run.alone:
                return run.leave()
            return run.gathered(args[0], run.plan), *args[1:]

        undo.add(listed.exit.register_forward_pre_hook(gather).remove)


def _exchanging(run: ShardedModel, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function by which blocks attend: in a block of theirs over the tokens of all ranks."""

    @wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Any:
        exchange, run.exchange = run.exchange, None
        return original(*args, **kwargs) if exchange is None else exchange(original, *args, **kwargs)

    return outside_graphs(attention)


class BlockHooks:
    """The hooks of one block."""

    def __init__(self, run: ShardedModel, listed: BlockList, index: int, begins: bool) -> None:
        self._run, self._listed, self._index, self._begins = run, listed, index, begins
        self._first, self._last = index == 0, index == len(listed.blocks) - 1
        block = listed.blocks[index]
        self._names = argument_names(block)
        self._plan = run.plan
        self._device = torch.device("cpu")
        self._random = torch.empty(0)  # what that device draws from next, where the block begins
        self._passages: list[tuple[Passage, torch.Tensor]] = []
        self._modules = {path: block.get_submodule(path) for path in listed.inside}

    def attach(self, undo: Undo) -> None:
        block = self._listed.blocks[self._index]
        undo.add(block.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        undo.add(block.register_forward_hook(self._after, always_call=True).remove)
        if self._listed.function:
            return
        of_all = self._unless_alone
        for path in self._listed.projections:
            undo.add(self._modules[path].register_forward_hook(of_all(self._projected)).remove)
        text = self._listed.text
        if text is not None:
            for path in text.projections:
                undo.add(self._modules[path].register_forward_hook(of_all(self._text_projected)).remove)
            undo.add(self._modules[text.output].register_forward_pre_hook(of_all(self._before_text_output)).remove)
        if self._listed.output:
            undo.add(self._modules[self._listed.output].register_forward_pre_hook(of_all(self._before_output)).remove)
            return
        attention = self._modules[self._listed.attention]
        undo.add(attention.register_forward_pre_hook(of_all(self._before_attention)).remove)
        undo.add(attention.register_forward_hook(of_all(self._after_attention)).remove)

    def _unless_alone(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        run = self._run
        return lambda *given: None if run.alone else hook(*given)

    def _before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        run.group.watch.check()
        for path, module in self._modules.items():
            if block.get_submodule(path) is not module:
                raise ModelInvalid(
                    f"{path} of block {self._index} is another module than when the model was sharded",
                    hint="Call remove(), inject adapters such as LoRA, then call shard_sequence() again",
                )
        given = dict(zip(self._names, args)) | kwargs
        recomputed = backward_runs()
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        if self._first and not recomputed:
            run.decide(tensors, first=self._begins)
        if run.alone:
            return None
        self._plan = run.plan_for(self._length(given))
        run.group.watch.at(f"block {self._index}{', recomputed' * recomputed}")
        if self._first and not recomputed:
            run.enter(tensors, self._plan)
        self._passages.clear()
        self._device = given[self._listed.tokens].device
        self._random = generator_state(self._device)
        brought = {name: self._brought(name, value) for name, value in given.items()}
        if self._listed.function:
            run.exchange = self._attend
        positional = tuple(brought[name] for name in self._names[: len(args)])
        return positional, {name: brought[name] for name in kwargs}

    def _after(self, block: nn.Module, args: Any, output: Any) -> Any:
        self._passages.clear()
        has_attended, self._run.exchange = self._run.exchange is None, None
        error = sys.exc_info()[1]
        if self._run.alone:
            if (output is None and error is not None) or (self._last and self._listed.gather and not self._listed.exit):
                self._run.leave()
            return None
        if output is None and error is not None:  # the hook is always called: here the block has failed
            if not isinstance(error, _StopRecomputationError):
                self._run.group.watch.fail_with(error)
            return None
        if not has_attended:
            raise ModelInvalid(
                f"block {self._index} attends by another function than {self._listed.function}",
                hint="Name the function that it calls: BlockList(function=...)",
            )
        if not torch.equal(self._random, generator_state(self._device)):
            raise random_draw(block, self._index)
        if self._first and not backward_runs():
            self._run.arrive()
        if self._last and self._listed.gather and self._listed.exit is None:
            return self._run.gathered(output, self._plan)
        return None

    def _projected(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        which = len(self._passages)
        if self._modules[self._listed.projections[which]] is not module:
            raise ModelInvalid(
                f"the projections of block {self._index} run in another order than {self._listed.projections}",
                hint="Name them in the order in which the block runs them",
            )
        last = which + 1 == len(self._listed.projections)
        started = self._start(output)
        if last:  # what follows may read the others; and this one, unless a module reads it first
            for passage, on_its_way in self._passages if self._listed.output else self._passages[:-1]:
                passage.arrive(on_its_way)
        return started

    def _before_attention(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if len(args) < 3:
            raise ModelInvalid(
                f"{self._listed.attention} of block {self._index} gets {len(args)} positional arguments",
                expected="query, key and value",
            )
        if self._listed.projections:
            passage, on_its_way = self._passages[-1]
            passage.arrive(on_its_way)
            self._passages.clear()  # kept, they would hold the graph of the whole block
            return None
        return (*self._of_all_tokens(*args[:3]), *args[3:])

    def _of_all_tokens(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        started = [self._start(tensor) for tensor in tensors]
        for passage, on_its_way in self._passages:
            passage.arrive(on_its_way)
        self._passages.clear()
        return started

    def _attend(self, attention: Callable[..., Any], *qkv: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        qkv, rest = qkv[:3], qkv[3:]
        mine, all_heads = self._plan.heads[self._run.group.rank], sum(self._plan.heads)
        arrived = self._of_all_tokens(*(tensor.flatten(1)[None] for tensor in qkv))
        result = attention(*(tensor[0].unflatten(1, (mine, -1)) for tensor in arrived), *rest, **kwargs)
        return self._tokens_of(result.flatten(1)[None])[0].unflatten(1, (all_heads, -1))

    def _before_output(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        self._passages.clear()
        return self._tokens_of(args[0]), *args[1:]

    def _text_projected(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return own_heads(self._run.group, self._plan, output)

    def _before_text_output(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        return gather_heads(self._run.group, self._plan, args[0]), *args[1:]

    def _after_attention(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return self._tokens_of(output)

    def _tokens_of(self, output: torch.Tensor) -> torch.Tensor:
        passage = Passage(self._run.group, self._plan, to_heads=False, late=self._run.late)
        tokens = passage.start(output)
        passage.arrive(tokens)
        return tokens

    def _start(self, x: torch.Tensor) -> torch.Tensor:
        passage = Passage(self._run.group, self._plan, to_heads=True, late=self._run.late)
        started = passage.start(x)
        self._passages.append((passage, started))
        return started

    def _brought(self, name: str, value: Any) -> Any:
        """An argument as this rank's part of the block takes it."""
        if not isinstance(value, torch.Tensor):
            if any(t.requires_grad for t in _tensors_in(value)):
                raise ModelInvalid(
                    f"argument {name} of block {self._index} is a {type(value).__name__} of tensors with gradients",
                    expected="tensors as arguments of their own",
                )
            return value
        if self._listed.text is not None and name == self._listed.text.mask:
            others = sum(self._plan.tokens) - self._plan.tokens[self._run.group.rank]
            return nn.functional.pad(value, (0, others), value=True)
        dim = self._token_dim(name, value)
        if dim is None or name in self._listed.whole:
            return self._run.shared(value) if name != self._listed.tokens else value
        if name == self._listed.tokens and not self._first:
            mine = self._plan.tokens[self._run.group.rank]
            if value.size(dim) != mine:
                raise ModelInvalid(
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
            raise ModelInvalid(
                f"block {self._index} gets arguments of different lengths: {found}",
                expected="one entry a token in each",
            )
        return next(iter(lengths.values()), sum(self._run.plan.tokens))

    def _token_dim(self, name: str, value: torch.Tensor) -> int | None:
        return self._listed.per_token.get(name, {}).get(value.dim())


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    return [t for item in value for t in _tensors_in(item)] if isinstance(value, (list, tuple)) else []
