"""Values that a user names and core code computes by: what both must know of seconds, formats and plans."""

from __future__ import annotations

from enum import Enum

from wanshim.errors import SettingInvalid

EIGHT_BIT = ("float8", "int8")  # formats of a stored base, and of its product
# Longer is no deadline: nobody would see it pass. Far longer ones also overflow in what waits (`threading`: 292 years).
LONGEST_S = 30 * 24 * 3600.0
EXPECTED_SECONDS = f"seconds above zero, such as 1800, and at most {LONGEST_S:.0f} (30 days)"


class Strategy(Enum):
    """A way to train over the devices of one host. The first that can run is taken."""

    RESIDENT = "resident"  # data parallel, the whole model on every GPU
    STREAM = "stream"  # data parallel, part of the frozen weights streamed from host memory
    PIPELINE = "pipeline"  # one process, several micro-batches over the stages at once
    SPLIT = "split"  # one process, the stages take turns
    SEQUENCE = "sequence"  # a process for each GPU, and the tokens of one sample over a group of them


def checked_seconds(seconds: object, name: str) -> float:
    """`seconds` as a float, if that many seconds can be waited: the one check of every deadline, timeout and interval
    that a caller can set.

    Args:
        seconds: the value that the caller gave.
        name: of the parameter, option or variable, for the message.

    Raises:
        SettingInvalid: not a number, or not above zero, or above `LONGEST_S`.
    """
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds <= LONGEST_S:
        return float(seconds)
    raise SettingInvalid(f"{name}={seconds!r}", expected=EXPECTED_SECONDS)
