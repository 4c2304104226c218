"""The first optimizer step of a training process, recorded for tools/prove.py; the process ends after it.

`tools/prove.py` puts this folder on PYTHONPATH, and the sitecustomize of `wanshim run` runs this one as the user's own.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SEED = 0
HERE = Path(__file__).resolve().parent


def record_step(file: Path) -> None:
    """Seed this process, record its first optimizer step and end it there. Rank 0 writes losses, gradients, the weights
    after the step and the outcome of each feature to `file`."""
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
            torch.distributed.barrier()  # no process ends while another still computes
        raise SystemExit(0)

    torch.Tensor.backward = recorded  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    atexit.register(_write, step, file)


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _write(step: dict[str, Any], file: Path) -> None:
    import torch

    from wanshim import activation

    if step.get("rank") == 0:
        outcomes = {row.feature: [row.state, row.outcome] for row in activation.report().selected}
        torch.save({**step, "outcomes": outcomes}, file)


def _run_the_users_own() -> None:
    """Import the sitecustomize that comes after this one and after wanshim's."""
    boot = Path("wanshim", "launch", "boot", "path").parts
    others = [path for path in sys.path if Path(path).resolve() != HERE and Path(path).parts[-4:] != boot]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


# A process that wanshim is active in, and no worker that loads data for one.
if "wanshim.activation" in sys.modules and not any("multiprocessing." in argument for argument in sys.orig_argv):
    record_step(Path(os.environ["PROVE_STEP_FILE"]))
_run_the_users_own()
