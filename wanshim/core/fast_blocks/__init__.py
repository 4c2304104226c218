"""Forwards of a transformer that are faster and have other bits: compiled blocks, products in eight bits."""

from .forward import FastForward, Options, compiling

__all__ = ["FastForward", "Options", "compiling"]
