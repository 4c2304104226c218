"""wanshim: multi-GPU Wan abilities for the framework and version already installed.

Importing this package does nothing and imports neither torch nor a framework; `activate()` does the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wanshim import advice as _advice  # noqa: F401 - of errors, whichever part of the package raises them

if TYPE_CHECKING:
    from wanshim.activation import activate, deactivate, report
    from wanshim.core.decoding import parallelize_decode, parallelize_encode
    from wanshim.core.encoding import encode_once
    from wanshim.core.model_split import split_model
    from wanshim.core.sequence import shard_sequence
    from wanshim.core.training import StepAccounting
    from wanshim.pipelines import parallelize_pipeline
    from wanshim.reporting import Report

__version__ = "0.1.0"
__all__ = [
    "Report",
    "StepAccounting",
    "activate",
    "deactivate",
    "encode_once",
    "parallelize_decode",
    "parallelize_encode",
    "parallelize_pipeline",
    "report",
    "shard_sequence",
    "split_model",
]

# Each is imported when its name is looked up (PEP 562): most of these packages import torch.
_LAZY = {
    "Report": "wanshim.reporting",
    "StepAccounting": "wanshim.core.training",
    "activate": "wanshim.activation",
    "deactivate": "wanshim.activation",
    "encode_once": "wanshim.core.encoding",
    "parallelize_decode": "wanshim.core.decoding",
    "parallelize_encode": "wanshim.core.decoding",
    "parallelize_pipeline": "wanshim.pipelines",
    "report": "wanshim.activation",
    "shard_sequence": "wanshim.core.sequence",
    "split_model": "wanshim.core.model_split",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'wanshim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
