"""Processes that hold copies of this process's modules and take calls of them."""

from .pool import RemoteCall, Replies, Workers

__all__ = ["RemoteCall", "Replies", "Workers"]
