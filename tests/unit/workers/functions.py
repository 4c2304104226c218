"""What the workers of these tests hold and call: they import it, so it is a module of its own."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def is_imported(module: str) -> bool:
    return module in sys.modules


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def variable(name: str) -> str | None:
    return os.environ.get(name)


def limit_memory(more: int) -> None:
    """Let this process have so many bytes more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more,) * 2)


class Blocks(nn.Module):
    """A model whose blocks can come from host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Scale(nn.Module):
    """A model with a parameter, a buffer, a tied weight, a transposed one and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.tied = self.linear
        self.register_buffer("offset", torch.arange(7.0), persistent=False)
        self.turned = nn.Parameter(torch.randn(3, 7).t())
        self.plain = (torch.full((1, 7), 2.0).expand(4, 7), torch.ones(7, dtype=torch.complex64))
        self.factor = 1.5

    def forward(self, x: torch.Tensor, *, then: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.factor * self.tied(x) + self.offset * self.plain[0][0] * self.plain[1].real
        return then * y, y @ self.turned


class Read(nn.Module):
    """A part that reads its model by a function made in that model's `__init__`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.get = lambda name, *, default=0.0: getattr(model, name, default)


class Cached(nn.Linear):
    """A VAE of the frameworks: its first call sets what the next one clears."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = 1.0

    def clear_cache(self) -> None:
        self.cache = [None]


class Other(nn.Module):
    def extra_repr(self) -> str:
        return "of another class"


def double(model: Scale) -> None:
    model.factor *= 2


def call_attribute(value: object, name: str) -> object:
    return getattr(value, name)()


class Coded(torch.Tensor):
    """A weight of int8 codes and a scale a row, as libraries that quantize make them."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)
        made.codes, made.scales = codes, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: None, size: object, stride: object) -> Coded:
        return cls(parts["codes"], parts["scales"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scales.detach())
        plain = tree_map_only(cls, lambda coded: coded.codes * coded.scales, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Kind(nn.Parameter):
    """A weight of elements and an attribute, as those of GGUF files are."""

    kind = "none"


class Written(nn.Module):
    """As an adapter of which each forward has a scale: what it writes in place is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {"adapter": torch.ones(1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scales["adapter"] *= 0.5
        scaled = x * self.scales["adapter"]
        self.scales["adapter"] = self.scales["adapter"] / 0.5
        return scaled


def addresses(model: Scale) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
    return model.tied is model.linear, model.turned.stride(), model.plain[0].stride()


def context() -> tuple[bool, bool, bool, torch.dtype, int]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )


def class_of_weight(model: Scale) -> tuple[str, bool]:
    return type(model.linear.weight).__name__, isinstance(model.linear.weight, nn.Parameter)


def kind_of_weight(model: Scale) -> tuple[str, str, bool]:
    weight = model.linear.weight
    return type(weight).__name__, getattr(weight, "kind", ""), model.tied.weight is weight


def described(module: nn.Module, name: str) -> str:
    return name


def read(model: nn.Module, name: str) -> tuple[object, object]:
    return model.part.get(name), model.part.get("missing", default=7.0)


def strides(x: torch.Tensor) -> tuple[int, ...]:
    return x.stride()


def fail(message: str) -> None:
    raise ValueError(message)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(600)


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


def block_beats(seconds: float) -> None:
    """As a hung process: nothing of it runs."""
    os.kill(os.getpid(), signal.SIGSTOP)


def inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def variables(prefix: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def num_tensors() -> int:
    """Of this process."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def lack_a_kernel(model: nn.Module) -> None:
    raise ValueError("no such kernel")
