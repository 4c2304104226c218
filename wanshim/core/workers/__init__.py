"""Processes that hold copies of this process's modules and take calls of them."""

from .pool import RemoteCall, Workers

__all__ = ["RemoteCall", "Workers"]
