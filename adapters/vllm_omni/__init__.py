"""vLLM-Omni (vllm-project/vllm-omni)."""

from wanshim.patching import Framework

FRAMEWORK = Framework(name="vllm_omni", distribution="vllm-omni")
