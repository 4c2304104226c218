"""The tiny calls that the contract kit makes, one a feature.

They import nothing but torch and DiffSynth's model: each of some thirty fresh processes pays for it.
"""

from __future__ import annotations

from typing import Any

SIZES = {"dim": 48, "ffn_dim": 64, "text_dim": 32, "freq_dim": 16, "num_heads": 2, "num_layers": 2}


def tiny_model() -> Any:
    import torch
    from diffsynth.models.wan_video_dit import WanModel

    torch.manual_seed(0)
    fixed = {"in_dim": 16, "out_dim": 16, "eps": 1e-6, "patch_size": (1, 2, 2), "has_image_input": False}
    return WanModel(**fixed, **SIZES).eval()


def arguments() -> tuple[Any, ...]:
    """Latents (1, 16, 3, 8, 8), timestep (1,), context (1, 5, 32)."""
    import torch

    generator = torch.Generator().manual_seed(1)
    latents = torch.randn((1, 16, 3, 8, 8), generator=generator)
    return latents, torch.full((1,), 500.0), torch.randn((1, 5, 32), generator=generator)


def direct_forward() -> Any:
    """`WanModel.forward`, called as a user would."""
    import torch

    with torch.no_grad():
        return tiny_model()(*arguments())


def direct_forward_to_compile() -> tuple[Any, tuple[Any, ...]]:
    return tiny_model(), arguments()
