"""DiffSynth-Studio (modelscope/DiffSynth-Studio)."""

from wanshim.patching import Framework

FRAMEWORK = Framework(name="diffsynth", distribution="diffsynth")
