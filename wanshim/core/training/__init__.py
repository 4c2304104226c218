"""Training runs: their steps, their pace, their log."""

from wanshim.core.training.accounting import StepAccounting

__all__ = ["StepAccounting"]
