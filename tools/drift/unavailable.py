"""The error of a release that is not at hand."""

from wanshim.errors import WanshimError


class ReleaseUnavailable(WanshimError):
    """The source of a release is not here and could not be fetched; nothing is known about it."""
