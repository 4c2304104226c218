"""wanshim: multi-GPU Wan abilities for the framework and version already installed.

Importing this package does nothing and imports neither torch nor a framework; `activate()` does the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wanshim.core.decoding import parallelize_decode, parallelize_encode
    from wanshim.core.encoding import encode_once
    from wanshim.core.model_split import split_model
    from wanshim.core.sequence import shard_sequence
    from wanshim.core.training import StepAccounting
    from wanshim.pipeline_call import parallelize_pipeline
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

# Each is imported when its name is looked up (PEP 562): most packages here import torch.
_LAZY = {
    "Report": "wanshim.reporting",
    "StepAccounting": "wanshim.core.training",
    "encode_once": "wanshim.core.encoding",
    "parallelize_decode": "wanshim.core.decoding",
    "parallelize_encode": "wanshim.core.decoding",
    "parallelize_pipeline": "wanshim.pipeline_call",
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


def activate(features: str | None = None, *, strict: bool | None = None) -> Report:
    """Select features and put their patches in, now or when their framework is imported.

    Args:
        features: the WANSHIM_FEATURES grammar, such as `"diffsynth.progress"`, which adds to `auto`, or
            `"none,diffsynth.progress"`, that feature alone. Default: WANSHIM_FEATURES, else `auto`.
        strict: raise where a selected feature is unavailable, instead of warning. Default: WANSHIM_STRICT.

    Returns:
        The report as it stands now; `wanshim.report()` gives a later one.

    Raises:
        FeatureUnknown: a token names no feature; nothing is changed.
        SettingInvalid, MatrixInvalid: a variable or the matrix cannot be read; nothing is changed.
        FeatureUnavailable: strict, and a selected feature is unavailable; nothing is changed.
    """
    from wanshim import activation

    return activation.activate(features, strict=strict)


def deactivate() -> None:
    """Put every original back, by identity, and forget all hooks. Safe to call twice."""
    from wanshim import activation

    activation.deactivate()


def report(*, strict: bool = False) -> Report:
    """What was selected, what is patched, and how often each patch ran.

    Raises:
        FeatureUnavailable: strict, and a feature that the user named (itself, its framework or ability, or by its
            variable) is not in place or had no effect, or one that `auto` or `all` selected failed or was displaced.
    """
    from wanshim import activation

    return activation.report(strict=strict)
