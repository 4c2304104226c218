"""diffusers (huggingface/diffusers)."""

from wanshim.patching import Framework

FRAMEWORK = Framework(name="diffusers", distribution="diffusers")
