"""vLLM-Omni's executor of tiles: on which ranks it would work, and when a call stays with it."""

from __future__ import annotations

from typing import Any

MODULES = "vllm_omni.diffusion.distributed.autoencoders"
WAN = f"{MODULES}.autoencoder_kl_wan"
QWEN_IMAGE = f"{MODULES}.autoencoder_kl_qwenimage"
RELIES_ON = (
    f"{MODULES}.distributed_vae_executor:DistributedVaeMixin.is_distributed_enabled",
    f"{MODULES}.distributed_vae_executor:DistributedVaeExecutor.__init__",
)


def ranks_of_executor(vae: Any) -> dict[str, Any]:
    """The group of the executor of `vae`, and how many of its ranks are active, as a `SharedCall` takes them.

    Raises:
        VaeFallback: the executor would not work, or vLLM-Omni was asked for another way than tiles.
    """
    from wanshim.core.decoding import VaeFallback

    if not vae.is_distributed_enabled():
        raise VaeFallback("vae_patch_parallel_size asks for no parallel VAE")
    executor = getattr(vae, "distributed_executor", None) or vae.distributed_decoder  # 0.18 calls it a decoder
    mode = getattr(executor, "parallel_mode", "tile")
    if mode != "tile":
        raise VaeFallback(f"vLLM-Omni's own {mode} is chosen")
    return {"group": executor.group, "active": int(executor.parallel_size)}
