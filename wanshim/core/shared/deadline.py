"""How long to wait: the one check of every deadline, timeout and interval that a caller can set."""

from __future__ import annotations

from wanshim.errors import DeadlineInvalid

# Longer is no deadline: nobody would see it pass. Far longer ones also overflow in what waits (`threading`: 292 years).
LONGEST_S = 30 * 24 * 3600.0
EXPECTED = f"seconds above zero, such as 1800, and at most {LONGEST_S:.0f} (30 days)"


def checked_seconds(seconds: object, name: str) -> float:
    """`seconds` as a float, if that many seconds can be waited.

    Args:
        seconds: the value that the caller gave.
        name: of the parameter, option or variable, for the message.

    Raises:
        DeadlineInvalid: not a number, or not above zero, or above `LONGEST_S`.
    """
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds <= LONGEST_S:
        return float(seconds)
    raise DeadlineInvalid(f"{name}={seconds!r}", expected=EXPECTED)
