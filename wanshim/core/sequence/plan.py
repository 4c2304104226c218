"""The division of tokens and attention heads over ranks: pure arithmetic, no torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from wanshim.errors import ModelInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """One sample over the ranks of a group: tokens outside self-attention, heads inside it.

    `ranks` are global ranks in the order of the group; `heads` and `tokens` count what each of them holds. `tokens`
    is empty until a length is known. Consecutive ranks hold consecutive tokens and heads.
    """

    ranks: tuple[int, ...]
    blocks: int
    heads: tuple[int, ...]
    tokens: tuple[int, ...] = ()

    def with_tokens(self, count: int) -> SequencePlan:
        """The plan for a sample of `count` tokens.

        Raises:
            ModelInvalid: there are fewer tokens than ranks.
        """
        if count < len(self.ranks):
            raise ModelInvalid(
                f"{_counted(count, 'token')} for {_counted(len(self.ranks), 'rank')}",
                expected="at least one token a rank",
                hint="Use a smaller group or a larger video",
            )
        return replace(self, tokens=shares(count, len(self.ranks)))

    def __str__(self) -> str:
        title = f"sequence parallel over {_counted(len(self.ranks), 'rank')}, {_counted(self.blocks, 'block')}, "
        title += _counted(sum(self.heads), "head") + (f", {sum(self.tokens)} tokens" if self.tokens else "")
        lines = []
        for i, rank in enumerate(self.ranks):
            line = f"  rank {rank}: heads {_range(spans(self.heads)[i])}"
            lines.append(line + (f", tokens {_range(spans(self.tokens)[i])}" if self.tokens else ""))
        return "\n".join([title, *lines])


def plan_sequence(ranks: Sequence[int], *, heads: int, blocks: int) -> SequencePlan:
    """The plan for `heads` attention heads over `ranks`, for any number of tokens.

    Raises:
        ModelInvalid: there is one rank only, a rank comes twice, or there are more ranks than heads.
    """
    if len(ranks) < 2 or len(set(ranks)) < len(ranks):
        raise ModelInvalid(
            f"a sequence group of {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks)) or 'none'}",
            expected="two or more different ranks",
            hint="Start one process for each GPU",
        )
    if len(ranks) > heads:
        raise ModelInvalid(
            f"{len(ranks)} ranks for {_counted(heads, 'attention head')}",
            expected="at most as many ranks as heads, because each rank computes whole heads",
            hint=f"Use groups of {heads} ranks or fewer" if heads > 1 else "Train this model without sequence parallel",
        )
    return SequencePlan(ranks=tuple(ranks), blocks=blocks, heads=shares(heads, len(ranks)))


def shares(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` that differ by one at most, the larger ones first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


@lru_cache(maxsize=256)
def spans(counts: tuple[int, ...]) -> tuple[slice, ...]:
    """The span of each of consecutive parts."""
    ends = tuple(accumulate(counts))
    return tuple(slice(end - count, end) for count, end in zip(counts, ends, strict=True))


def _range(span: slice) -> str:
    return f"{span.start} to {span.stop - 1} ({span.stop - span.start})"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
