"""Processes that hold copies of this process's modules and take calls of them."""

from .ahead import AHEAD
from .pool import RemoteCall, Replies, Workers

__all__ = ["AHEAD", "RemoteCall", "Replies", "Workers"]
