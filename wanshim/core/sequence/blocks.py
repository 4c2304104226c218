"""Which modules and arguments of a transformer's blocks sequence parallel works with, and whether they are there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import nn

from wanshim.core.shared.plain import drops, is_one_graph
from wanshim.errors import ModelInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStream:
    """Text beside the sharded tokens, which attend together, as in MMDiT (Esser et al., 2024, arXiv:2403.03206).

    It is short: every rank computes it whole, except for its attention, of which each rank has its own heads.

    Args:
        projections: paths in a block to the modules whose outputs, (b, text tokens, heads*dim), become the text's
            query, key and value.
        output: path to the module that takes the text's part of the attention's result, (b, text tokens, heads*dim),
            as first argument; the heads of all ranks are gathered there.
        mask: argument of the block, (b, text tokens) or None, to which it appends an entry for each token of the other
            stream that it is called with.
    """

    projections: tuple[str, ...]
    output: str
    mask: str


@dataclass(frozen=True, kw_only=True)
class BlockList:
    """The interface of blocks that run one after the other; the defaults are those of Wan's transformer.

    Args:
        blocks: each called with the last one's output, (b, tokens, width) or (tokens, width).
        exit: the module that takes the tokens as its first argument behind the last block; they are gathered there.
            None: the last block's output is gathered.
        gather: False leaves the output sharded, for what is added to the tokens of other blocks.
        attention: path in a block to the module that is called with query, key and value, (b, tokens, heads*dim) each,
            and returns the same shape.
        output: for blocks whose attention is a function: path to the module that takes its result, (b, tokens,
            heads*dim), as first argument; `projections` are named, and `attention` is not looked at.
        projections: paths to the modules whose outputs become query, key and value, in the order in which they run.
            Their outputs travel while the next ones are computed; what happens between them and `attention` sees all
            tokens and this rank's heads. Empty: they travel when `attention` is called.
        function: for blocks that attend by a function: its module and name. The blocks call it with query, key and
            value, (tokens, heads, dim) each, which travel then, and it returns the same shape; `attention`, `output`
            and `projections` are not looked at. All heads are seen everywhere else, so that `num_heads` stay.
        num_heads: paths to the attributes that say how many heads there are where only this rank's are seen.
        widths: paths to those that say how wide all of them are together.
        text: the other stream of the blocks, if they have two. Without gradients alone.
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
    output: str = ""
    function: str = ""
    projections: tuple[str, ...] = ("self_attn.norm_q", "self_attn.norm_k", "self_attn.v")
    num_heads: tuple[str, ...] = ("self_attn.num_heads", "self_attn.attn.num_heads")
    widths: tuple[str, ...] = ()
    text: TextStream | None = None
    tokens: str = "x"
    per_token: Mapping[str, Mapping[int, int]] = field(
        default_factory=lambda: {"x": {3: 1}, "t_mod": {4: 1}, "freqs": {3: 0}}
    )
    whole: tuple[str, ...] = ("freqs",)

    @property
    def inside(self) -> tuple[str, ...]:
        """Paths to the modules at which tokens travel."""
        if self.function:
            return ()
        text = (*self.text.projections, self.text.output) if self.text is not None else ()
        return (*self.projections, self.output or self.attention, *text)


def default_block_list(model: nn.Module) -> BlockList:
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise ModelInvalid(
            f"{type(model).__name__} has no ModuleList named blocks",
            expected="a transformer like Wan's",
            hint="Describe its blocks: shard_sequence(model, group, blocks=[BlockList(...)])",
        )
    exit_ = getattr(model, "head", None)
    return BlockList(blocks=list(blocks), exit=exit_ if isinstance(exit_, nn.Module) else None)


def heads_of(lists: Sequence[BlockList]) -> int:
    """The number of heads, the same in all blocks, of which every named part is there."""
    found: dict[int, str] = {}
    for listed in lists:
        for index, block in enumerate(listed.blocks):
            for path in listed.inside:
                if _module(block, path) is None:
                    raise ModelInvalid(
                        f"{type(block).__name__} {index} has no module {path}",
                        hint="Name the block's self-attention: BlockList(attention=..., projections=...)",
                    )
            for path in (*listed.num_heads, *listed.widths):
                owner, _, name = path.rpartition(".")
                number = getattr(_module(block, owner), name, None)
                if not isinstance(number, int):
                    raise ModelInvalid(
                        f"{type(block).__name__} {index} has no number {path}",
                        hint="Name where the block keeps its number of heads: BlockList(num_heads=...)",
                    )
                if path in listed.num_heads:
                    found.setdefault(number, f"{path} of {type(block).__name__} {index}")
            if listed.tokens not in argument_names(block):
                raise ModelInvalid(
                    f"{type(block).__name__} takes no argument {listed.tokens}",
                    hint="Name the argument that carries the tokens: BlockList(tokens=..., per_token=...)",
                )
    if len(found) != 1:
        named = ", ".join(f"{heads} in {where}" for heads, where in found.items())
        raise ModelInvalid(f"attention heads: {named or 'none named'}", expected="the same number in every block")
    return next(iter(found))


def argument_names(block: nn.Module) -> tuple[str, ...]:
    """Names of its forward's arguments, in their order; of a wrapper that hands on whatever it gets, those of the
    module in it."""
    own = "forward" in vars(block)
    given = _parameters_of.__wrapped__(block.forward) if own else _parameters_of(type(block).forward)[1:]
    inside = _module(block, "module")
    if inside is not None and all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in given):
        return argument_names(inside)
    return tuple(one.name for one in given)


@lru_cache(maxsize=64)
def _parameters_of(called: Callable[..., object]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(called).parameters.values())


def _module(block: nn.Module, path: str) -> nn.Module | None:
    try:
        return block.get_submodule(path)
    except AttributeError:
        return None


def check_no_dropout(lists: Sequence[BlockList]) -> None:
    """Refuse modules that would drop in a call made now; what else draws is found when it does."""
    for listed in lists:
        for index, block in enumerate(listed.blocks):
            if any(drops(module) for module in block.modules()):
                raise random_draw(block, index)


def _refuse_graph(module: nn.Module, name: str) -> None:
    if is_one_graph(module):
        raise ModelInvalid(
            f"{name} is compiled by torch.compile",
            expected="a module that is not, because ranks exchange tokens inside it",
            hint="Leave out the program's own torch.compile",
        )


def check_tokens_apart(lists: Sequence[BlockList], model: nn.Module | None = None) -> None:
    """Refuse blocks in which a token's values depend on the others beside attention: by dropout, or by a layer that
    quantizes all tokens with one scale. Such layers compute a few tokens here, which is not for every forward. And
    refuse the program's own graphs if ranks would exchange tokens inside them.

    Args:
        model: that calls the blocks.
    """
    check_no_dropout(lists)
    if model is not None:
        _refuse_graph(model, type(model).__name__)
    known = set()
    for listed in lists:
        if listed.exit is not None:
            _refuse_graph(listed.exit, f"{type(listed.exit).__name__} behind the blocks")
        for index, block in enumerate(listed.blocks):
            name = f"{type(block).__name__} {index}"
            for path, module in block.named_modules():
                if listed.function or not path or any(f"{each}.".startswith(f"{path}.") for each in listed.inside):
                    _refuse_graph(module, f"{path} of {name}" if path else name)
                is_plain = type(module) is nn.Linear and type(module.weight) in (torch.Tensor, nn.Parameter)
                if not isinstance(module, nn.Linear) or is_plain:
                    continue
                kind = type(module), type(module.weight), module.weight.shape
                if kind not in known and not _has_a_scale_a_token(module):
                    raise ModelInvalid(
                        f"{path} of {name} quantizes all tokens with one scale",
                        expected="a scale for each token, because ranks hold parts of a sample",
                        hint="Quantize activations by rows, or not at all",
                    )
                known.add(kind)


@torch.no_grad()
def _has_a_scale_a_token(module: nn.Linear) -> bool:
    """Whether a quantized layer gives small tokens the same values beside large ones, which leave a scale of all of
    them no bit for these. One that cannot compute here and now is taken to."""
    weight = module.weight
    dtype = weight.dtype if weight.dtype.is_floating_point and weight.dtype.itemsize > 1 else torch.bfloat16
    small = torch.linspace(-1, 1, module.in_features, device=weight.device).to(dtype) * 2.0**-16
    try:
        alone, beside = (module(torch.stack([small, small * factor]))[0].float() for factor in (1.0, 2.0**20))
        return bool((beside - alone).norm() <= 0.5 * alone.norm())
    except (RuntimeError, TypeError, ValueError):  # of its kernels, or without its weights yet
        return True


def random_draw(block: nn.Module, index: int) -> ModelInvalid:
    """The error of a block that draws random numbers: each rank would draw for its tokens what it should for all."""
    names = [f"{path} (p={module.p})" for path, module in block.named_modules() if drops(module)]
    return ModelInvalid(
        f"{type(block).__name__} {index} draws random numbers" + (f": {', '.join(names)}" if names else ""),
        expected="blocks without dropout, because ranks that hold parts of a sample cannot draw as one process does",
        hint="Set its probability to 0 (lora_dropout=0 for LoRA)",
    )
