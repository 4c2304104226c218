"""`vllm_omni.generate`: nothing to add, vLLM-Omni generates on several GPUs itself.

`DiffusionParallelConfig(cfg_parallel_size=2, ulysses_degree=2)` computes the two forwards of guidance on two GPUs, and
the tokens of each on two. The feature is here so that WANSHIM_GENERATE and the table of releases say so.
"""

from __future__ import annotations

from wanshim.patching import Feature

CONFIG = "vllm_omni.diffusion.data:DiffusionParallelConfig"
FEATURE = Feature(
    name="vllm_omni.generate",
    summary="generation on several GPUs, which vLLM-Omni has itself (cfg_parallel_size, ulysses_degree)",
    switched_on_by="generate",
    relies_on=(f"{CONFIG}.cfg_parallel_size", f"{CONFIG}.ulysses_degree"),
    seams=(),
)
