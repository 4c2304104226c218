"""What befalls one rank of a training job in its second forward."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

_forwards: Counter[str] = Counter()


def _second(name: str, act: Callable[[Any], object]) -> Callable[..., object]:
    def befall(module: Any, args: Any) -> object:
        _forwards[name] += 1
        return act(module) if _forwards[name] == 2 else None

    return befall


def _run_out_of_memory(module: Any) -> None:
    raise torch.OutOfMemoryError("no room on this rank")


def _draw_another_noise(module: Any) -> None:
    module.own_draws = False
    torch.manual_seed(999)


def _lose_the_loss(module: Any) -> None:
    with torch.no_grad():
        module.pipe.dit.head.head.weight.fill_(float("nan"))


def _weigh_the_loss(module: Any) -> None:
    module.register_forward_hook(lambda _, args, loss: 1.01 * loss)


def _change_what_is_trained(module: Any) -> None:
    with torch.no_grad():
        next(parameter for parameter in module.parameters() if parameter.requires_grad).mul_(1.001)


BEFALLS = {
    "drift": _second("drift", _change_what_is_trained),
    "loss": _second("loss", _weigh_the_loss),
    "killed": _second("killed", lambda _: os.kill(os.getpid(), signal.SIGKILL)),
    "memory": _second("memory", _run_out_of_memory),
    "noise": _second("noise", _draw_another_noise),
    "nan": _second("nan", _lose_the_loss),
}
