"""Training runs: their steps, their pace, their log."""

from wanshim.core.training.accounting import GlobalSteps, StepAccounting

__all__ = ["GlobalSteps", "StepAccounting"]
