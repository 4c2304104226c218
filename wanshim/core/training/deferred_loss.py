"""The value of a loss without making the training thread wait for the GPU."""

from __future__ import annotations

from typing import Any


class DeferredLoss:
    """A loss on its way to the host: copied to pinned memory behind the kernels that compute it.

    Args:
        loss: a tensor of any shape (its mean counts), a number, or None. No graph is kept.
    """

    def __init__(self, loss: Any) -> None:
        self._event: Any = None
        self._value: Any = loss
        self._wait: Any = getattr(loss, "wait", None)
        if self._wait is not None:  # a PendingLoss: a micro-batch still computes it, and this thread does not wait
            return
        if hasattr(loss, "detach"):
            detached = loss.detach()
            mean = detached.float() if detached.dim() == 0 else detached.float().mean()
            self._value = self._send(mean) if mean.is_cuda else float(mean)

    def _send(self, mean: Any) -> Any:
        import torch

        from wanshim.core.shared.host_memory import pinned

        target = pinned(mean)
        with torch.cuda.device(mean.device):
            target.copy_(mean, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # a thread that waits sleeps, and holds no GIL
            self._event.record()
        return target

    def value(self) -> float | None:
        """The number, waiting for it; for a thread that may wait."""
        if self._event is not None:
            self._event.synchronize()
        if self._wait is not None:
            try:
                return float(self._wait().float().mean())
            except Exception:  # the micro-batch failed: the training thread raises its error, the log lacks a number
                return None
        return None if self._value is None else float(self._value)
