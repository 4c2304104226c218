"""Functions that `torch.compile` leaves as they are, in the middle of what it compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OUTSIDE = "this runs outside of graphs"  # as torch names the break


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with all that it calls, as a part that no graph has in it."""
    from torch import _dynamo  # which torch's own optimizers import

    return _dynamo.disable(function, reason=OUTSIDE)  # type: ignore[no-any-return, no-untyped-call]
