"""wanshim: multi-GPU Wan abilities for the framework and version already installed."""

__version__ = "0.1.0"
