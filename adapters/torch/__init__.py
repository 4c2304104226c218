"""PyTorch itself (pytorch/pytorch)."""

from wanshim.patching import Framework

FRAMEWORK = Framework(name="torch", distribution="torch")
