"""The pointwise steps of a transformer's blocks by one kernel each, with the bits of the framework's own steps."""

from .operators import StrictOperators

__all__ = ["StrictOperators"]
