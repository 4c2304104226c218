"""What travels where, for any number of ranks, in one process; and what starts before what is awaited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wanshim.core.sequence.exchange import Passage, gather_heads, own_heads, start_to_heads, start_to_tokens
from wanshim.core.sequence.plan import SequencePlan, plan_sequence, spans


class Post:
    """The ranks of a group in one process: delivers once all have sent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parcels: list[tuple[Sequence[Any], Sequence[Any], Callable[[], None] | None]] = []

    def deliver(self) -> None:
        for there, (_, receives, _) in enumerate(self.parcels):
            for here, (sends, _, _) in enumerate(self.parcels):
                if here != there:
                    assert sends[there].is_contiguous()
                    assert receives[here].is_contiguous()
                    receives[here].copy_(sends[there].view(receives[here].shape))
        for _, _, landed in self.parcels:
            if landed is not None:
                landed()
        self.parcels = []


class Rank:
    """Stands for a `SequenceGroup` where nothing waits."""

    def __init__(self, post: Post, rank: int) -> None:
        self.post, self.rank, self.size = post, rank, post.size

    def exchange(self, sends: Any, receives: Any, landed: Any = None) -> None:
        assert sends[self.rank] is None
        assert receives[self.rank] is None
        self.post.parcels.append((sends, receives, landed))


sizes = st.tuples(st.integers(2, 5), st.integers(0, 7), st.integers(0, 9), st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=60)
@given(sizes)
def test_every_element_comes_where_it_belongs_and_back(size: tuple[int, ...]) -> None:
    ranks, more_heads, more_tokens, batch, dim = size
    plan = plan_sequence(range(ranks), heads=ranks + more_heads, blocks=1).with_tokens(ranks + more_tokens)
    heads, tokens = sum(plan.heads), sum(plan.tokens)
    whole = torch.arange(batch * tokens * heads * dim, dtype=torch.float32).view(batch, tokens, heads * dim)
    post = Post(ranks)
    group: list[Any] = [Rank(post, rank) for rank in range(ranks)]
    local = [whole[:, span] for span in spans(plan.tokens)]
    by_head = [start_to_heads(group[rank], plan, local[rank])[0] for rank in range(ranks)]
    post.deliver()
    for rank, span in enumerate(spans(plan.heads)):
        assert torch.equal(by_head[rank], whole.unflatten(2, (heads, dim))[:, :, span].flatten(2))
    back = [start_to_tokens(group[rank], plan, by_head[rank])[0] for rank in range(ranks)]
    post.deliver()
    for rank in range(ranks):
        assert torch.equal(back[rank], local[rank])


@settings(max_examples=30)
@given(sizes)
def test_heads_of_tokens_that_all_ranks_have_come_together_again(size: tuple[int, ...]) -> None:
    ranks, more_heads, tokens, batch, dim = size
    plan = plan_sequence(range(ranks), heads=ranks + more_heads, blocks=1)
    heads = sum(plan.heads)
    whole = torch.arange(batch * tokens * heads * dim, dtype=torch.float32).view(batch, tokens, heads * dim)
    parts = [whole.unflatten(2, (heads, dim)).movedim(2, 0)[span] for span in spans(plan.heads)]

    def gather(mine: torch.Tensor, counts: Sequence[int], rank: int) -> torch.Tensor:
        assert mine.is_contiguous()
        assert torch.equal(mine, parts[rank])
        assert tuple(counts) == plan.heads
        return torch.cat(parts)

    for rank in range(ranks):
        group: Any = SimpleNamespace(rank=rank, gather=partial(gather, rank=rank))
        assert torch.equal(gather_heads(group, plan, own_heads(group, plan, whole)), whole)


class Log:
    """A group of which only this rank is there: notes what starts and what is awaited."""

    def __init__(self) -> None:
        self.rank, self.size, self.events = 0, 2, list[str]()
        self.names: dict[int, str] = {}

    def exchange(self, sends: Any, receives: Any, landed: Any = None) -> Any:
        number = len([e for e in self.events if e.startswith("start")])
        self.events.append(f"start {number}")
        for receive in receives:
            if receive is not None:
                receive.zero_()
        log = self

        class Pending:
            def wait(self) -> None:
                log.events.append(f"wait {number}")
                if landed is not None:
                    landed()

        return Pending()


def test_all_gradients_start_before_the_first_is_awaited() -> None:
    """Query, key and value as hooks meet them: projections, then rotary embedding, then attention."""
    log: Any = Log()
    plan = SequencePlan(ranks=(0, 1), blocks=1, heads=(1, 1), tokens=(2, 2))
    x = torch.randn(1, 2, 4, requires_grad=True)
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    passages = [Passage(log, plan, to_heads=True) for _ in range(3)]
    q, k, v = (passage.start(x @ weight) for passage, weight in zip(passages, weights))
    passages[0].arrive(q)
    passages[1].arrive(k)
    q, k = q * 2, k * 3  # rotary embedding
    passages[2].arrive(v)
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert log.events == ["start 0", "start 1", "start 2", "wait 0", "wait 1", "wait 2"]
    log.events.clear()
    attended.sum().backward()
    started = [e for e in log.events if e.startswith("start")]
    assert log.events == [*started, *(e.replace("start", "wait") for e in started)]
    assert len(started) == 3
    assert all(weight.grad is not None for weight in weights)
