"""The first optimizer step of a training process, recorded for `wanshim doctor --prove`; the process ends behind it."""

from __future__ import annotations

import atexit
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SEED = 0
FILE = "step.pt"


def record_step(folder: str) -> None:
    """Seed this process, record its first optimizer step and end it there. Rank 0 writes losses, gradients, the weights
    after the step and the outcome of each feature to FILE in `folder`."""
    if any("multiprocessing." in argument for argument in sys.orig_argv):
        return  # a worker that loads data
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    losses: list[torch.Tensor] = []
    step: dict[str, Any] = {}
    backward = torch.Tensor.backward

    def recorded(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.numel() == 1:
            losses.append(self.detach().cpu())
        return backward(self, *args, **kwargs)

    def before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        step["losses"] = list(losses)
        step["gradients"] = [_copy(p.grad) for p in _trained(optimizer) if p.grad is not None]

    def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        step["weights"] = [_copy(p) for p in _trained(optimizer)]
        step["rank"] = 0
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            step["rank"] = torch.distributed.get_rank()
            torch.distributed.barrier()  # nobody ends while another still computes
        raise SystemExit(0)

    torch.Tensor.backward = recorded  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    atexit.register(_write, step, Path(folder))


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _write(step: dict[str, Any], folder: Path) -> None:
    import torch

    from wanshim import activation

    if step.get("rank") == 0:
        outcomes = {row.feature: [row.state, row.outcome] for row in activation.report().selected}
        torch.save({**step, "outcomes": outcomes}, folder / FILE)
