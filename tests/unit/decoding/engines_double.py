"""A double of cuDNN's frontend: cuDNN computes on GPUs alone. Its engines are made of torch, their times are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from wanshim.core.decoding.operators.convolution import Convolution, torch_convolve
from wanshim.core.decoding.operators.cudnn_graph import Engine

STRIDE, PADDING = (1, 1, 1), (0, 1, 1)
Change = Callable[[torch.Tensor], torch.Tensor]


def inputs(frames: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, 8, frames + 2, 10, 12).bfloat16().to(memory_format=torch.channels_last_3d)
    return x, torch.randn(16, 8, 3, 3, 3).bfloat16().to(memory_format=torch.channels_last_3d)


def key_of(**changed: Any) -> tuple[Any, ...]:
    """Arguments of a convolution that differ in nothing but these."""
    given = {"dtype": torch.bfloat16, "batch": 1, "channels": 8, "rows": 10, "columns": 12, "outputs": 16, "kernel": 3}
    given |= {"stride": STRIDE, "padding": PADDING, "frames": 8} | changed
    torch.manual_seed(0)
    x = torch.randn(given["batch"], given["channels"], given["frames"], given["rows"], given["columns"])
    weight = torch.randn(given["outputs"], given["channels"], 3, given["kernel"], given["kernel"])
    form = {"dtype": given["dtype"], "memory_format": torch.channels_last_3d}
    return x.to(**form), weight.to(**form), given["stride"], given["padding"]


@dataclass
class Made:
    """An engine: how long it takes, what it does to the right result, and the lengths of what it computed."""

    time: float
    change: Change = torch.clone
    lengths: list[int] = field(default_factory=list)


class Double:
    """The frontend with the engines `made`, by number; torch takes 10 ms."""

    def __init__(self, made: dict[int, Made]) -> None:
        self.made = made
        self.searches = 0
        self.took = 10.0

    def facts(self) -> dict[str, str | int]:
        return {"gpu": "double"}

    def milliseconds(self, work: Callable[[], object]) -> float:
        self.took = 10.0
        work()
        return self.took

    def count(self, conv: Convolution, made: Made) -> None:
        self.took = made.time

    def graph(self, conv: Convolution, x: torch.Tensor, out: torch.Tensor) -> Graph:
        return Graph(self, conv, x.shape)


@dataclass
class Graph:
    """Runs of one size alone, as cuDNN's."""

    double: Double
    conv: Convolution
    shape: torch.Size

    def engines(self) -> Iterator[tuple[Engine, Any]]:
        self.double.searches += 1
        return ((Engine(number, {}), self.run(number)) for number in self.double.made)

    def build(self, engine: Engine) -> Any:
        return self.run(engine.number) if engine.number in self.double.made else None

    def run(self, number: int) -> Any:
        def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            assert x.shape == self.shape
            made = self.double.made[number]
            out.copy_(made.change(torch_convolve(x, weight, self.conv.stride, self.conv.padding)))
            made.lengths.append(out.shape[2])
            self.double.count(self.conv, made)

        return run


class Timed(Double):
    """Its engines take `product` ms for one of Winograd's products, and their time for other convolutions."""

    def __init__(self, made: dict[int, Made], product: float) -> None:
        super().__init__(made)
        self.product = product

    def milliseconds(self, work: Callable[[], object]) -> float:
        self.took = 0.0
        work()
        return self.took or 10.0

    def count(self, conv: Convolution, made: Made) -> None:
        self.took += self.product if conv.weight.shape[2] == 1 else made.time
