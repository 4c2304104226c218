"""The modes of a decode, one file each with its plan and its run. A new mode is a new file and an entry here."""

from wanshim.core.decoding.plan import Mode

from .single import SINGLE
from .spatial import SPATIAL
from .temporal import TEMPORAL
from .tile import TILE

MODES: dict[str, Mode] = {mode.name: mode for mode in (TEMPORAL, SPATIAL, SINGLE, TILE)}

__all__ = ["MODES", "SINGLE", "Mode"]
