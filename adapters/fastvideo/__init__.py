"""FastVideo (hao-ai-lab/FastVideo)."""

from wanshim.patching import Framework

FRAMEWORK = Framework(name="fastvideo", distribution="fastvideo")
