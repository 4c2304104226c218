"""The order in which gradients are ready, and DDP's buckets in that order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wanshim.core.resume.buckets import arrange_buckets, note_ready
from wanshim.undo import Undo


class Net(nn.Module):
    """Uses its layers in another order than it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (1, 0, 2):
            x = self.layers[number](x)
        return x


@pytest.fixture
def job(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gradients_are_noted_once_in_the_order_in_which_they_are_ready() -> None:
    model, undo = Net(), Undo()
    parameters = list(model.parameters())
    ready = note_ready(parameters, undo)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    assert ready == [2, 0, 1]
    undo.remove()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters)


def test_hooks_of_gradients_that_never_came_go_with_the_rest() -> None:
    model, undo = Net(), Undo()
    ready = note_ready(list(model.parameters()), undo)
    undo.remove()
    model(torch.ones(1, 4)).sum().backward()
    assert ready == []


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("unused", "count"), [(False, 3), (True, 3), (False, 2)])
def test_backwards_go_through_ddp_where_it_rearranges_its_buckets(unused: bool, count: int) -> None:
    model = DistributedDataParallel(Net(), find_unused_parameters=unused)
    parameters = list(model.parameters())
    came: list[int] = []
    for place, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, place=place: came.append(place))
    arrange_buckets(model, parameters, [1, 2, 0][:count])
    assert came == ([1, 2, 0] if not unused and count == 3 else [])
    assert all(parameter.grad is None for parameter in parameters)
    model(torch.ones(1, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)
