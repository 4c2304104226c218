from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from wanshim.core.encoding.collectives import no_collectives
from wanshim.errors import WanshimError


@pytest.fixture(scope="module", autouse=True)
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "call",
    [
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.broadcast(torch.ones(2), 0),
        lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2)),
        lambda: dist.all_gather_object([None], "x"),
        lambda: dist.isend(torch.ones(2), 0),
        lambda: dist._functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD),
        lambda: dist._functional_collectives.all_to_all_single_autograd(torch.ones(2), [2], [2], dist.group.WORLD),
        dist.barrier,
        lambda: dist.new_group([0]),
    ],
    ids=[
        "all_reduce",
        "broadcast",
        "all_to_all",
        "object",
        "send",
        "functional",
        "functional autograd",
        "barrier",
        "new_group",
    ],
)
def test_collective_under_the_guard_is_refused(call: Callable[[], object]) -> None:
    import torch.distributed._functional_collectives  # noqa: F401

    refused = pytest.raises(WanshimError, match=r"Encoding the prompt called the collective (\S*c10d\S+|new_group) on")
    with refused, no_collectives("Encoding the prompt"):
        call()


def test_arithmetic_under_the_guard_runs_and_is_unchanged() -> None:
    x = torch.randn(3, 3)
    with no_collectives("Encoding"):
        assert torch.equal(torch.nn.functional.softmax(x @ x, -1), (x @ x).softmax(-1))
        assert torch.ones(2, dtype=torch.float64).dtype == torch.float64


def test_what_the_program_compiles_is_compiled_under_the_guard_and_its_collectives_refused() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    graphs: list[object] = []
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend=backend)
    reduced = torch.compile(
        lambda x: dist._functional_collectives.all_reduce(x, "sum", dist.group.WORLD) * 2, backend=backend
    )
    with no_collectives("Encoding the prompt"):
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
        assert len(graphs) == 1
        with pytest.raises(Exception, match="Encoding the prompt called the collective"):
            reduced(torch.ones(2))


def test_collective_after_the_guard_runs() -> None:
    with pytest.raises(WanshimError, match="called the collective"), no_collectives("Encoding"):
        dist.new_group([0])
    dist.all_reduce(torch.ones(2))
    dist.new_group([0])
