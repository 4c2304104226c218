"""Patches: put in, checked and taken out."""

from wanshim.patching.feature import Feature, Framework
from wanshim.patching.probe import Finding, SourceTree
from wanshim.patching.seam import Kind, Seam, SeamState

__all__ = ["Feature", "Finding", "Framework", "Kind", "Seam", "SeamState", "SourceTree"]
