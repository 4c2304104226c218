"""The first line of a run with WANSHIM_FAST: the variables that it set."""

from __future__ import annotations

from wanshim import settings
from wanshim.select import variables
from wanshim.select.features import Selection

READ_BY = variables.VARIABLES["fast"].read_by


def lines(selection: Selection, read: settings.Settings) -> list[str]:
    """The line for the user; none without WANSHIM_FAST."""
    if not read.fast or not any(feature.partition(".")[2] in READ_BY for feature in selection.reasons):
        return []
    turned_on = " ".join(
        f"{variables.names(field)[0]}={_typed(getattr(read, field))}"
        for field in settings.FAST_FIELDS
        if read.sources[field] == settings.FAST
    )
    return [f"{settings.FAST} turned on what changes bits, where it is available: {turned_on or 'nothing'}"]


def _typed(value: object) -> object:
    return 1 if value is True else value
