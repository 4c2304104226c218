"""The tiny calls that the contract kit makes, one a feature.

They import as little as they can: some thirty processes a feature each import DiffSynth anew.
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


def generate_tiny() -> Any:
    """Three steps without guidance, by this process alone."""
    from tests.contract.diffsynth.wan_pipelines import MADE, generate

    return generate(MADE["t2v"](), "t2v", cfg_scale=1.0)


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


def model_fn_to_compile() -> tuple[Any, tuple[Any, ...]]:
    from functools import partial

    from diffsynth.pipelines import wan_video

    from tests.contract.diffsynth import wan

    return partial(wan_video.model_fn_wan_video, tiny_model(), **wan.inputs("t2v")), ()


def forward_by_kernels() -> Any:
    """A forward in fp16, by kernels that Triton interprets on the CPU."""
    import pytest
    import torch
    from diffsynth.pipelines.wan_video import model_fn_wan_video

    from wanshim.core.strict_blocks import kernels

    latents, timestep, context = (each.half() for each in arguments())
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(kernels, "available", lambda x: x.dtype == torch.float16)
        return model_fn_wan_video(tiny_model().half(), latents=latents, timestep=timestep, context=context)


def forward_in_eight_bits() -> Any:
    import torch
    from diffsynth.models.wan_video_dit import WanModel
    from diffsynth.pipelines.wan_video import model_fn_wan_video

    torch.manual_seed(0)
    sizes = {"dim": 48, "num_heads": 2, "num_layers": 2, "ffn_dim": 64, "text_dim": 16, "freq_dim": 16}
    sizes |= {"in_dim": 4, "out_dim": 4, "patch_size": (1, 2, 2)}
    dit = WanModel(**sizes, eps=1e-6, has_image_input=False).eval()
    latents, text = torch.randn(1, 4, 2, 8, 8), torch.randn(1, 8, 16)
    with torch.no_grad():
        return model_fn_wan_video(dit, latents=latents, timestep=torch.tensor([500.0]), context=text)


def tiny_block() -> Any:
    return tiny_model().blocks[0]


def block_to_compile() -> tuple[Any, tuple[Any, ...]]:
    import torch

    block = tiny_block()
    angles = torch.rand(8, 1, block.dim // block.num_heads // 2)
    sizes = (1, 8, block.dim), (1, 5, block.dim), (1, 6, block.dim)
    return block, (*map(torch.randn, sizes), torch.polar(torch.ones_like(angles), angles))


def gate_and_norm() -> tuple[Any, Any]:
    block = tiny_model().blocks[0]
    return block.gate, block.self_attn.norm_q


def train_through_sage() -> Any:
    """The output of a forward that wants gradients, where the installed kernel gives none."""
    import pytest

    from tests.contract.diffsynth import kernels, wan

    with pytest.MonkeyPatch.context() as patch:
        kernels.install(patch, kernels.sage)
        sample = wan.inputs("t2v")
        return wan.model_fn_wan_video(tiny_model(), **sample).detach()


def attention_to_compile() -> tuple[Any, tuple[Any, ...]]:
    from functools import partial

    from diffsynth.models import wan_video_dit

    return partial(wan_video_dit.flash_attention, num_heads=2), (*arguments()[2].expand(3, 1, 5, 32),)


def tiny_s2v() -> Any:
    import torch
    from diffsynth.models.wan_video_dit_s2v import WanS2VModel

    torch.manual_seed(0)
    fixed = {"in_dim": 16, "out_dim": 16, "eps": 1e-6, "patch_size": (1, 2, 2), "cond_dim": 16, "audio_dim": 32}
    return WanS2VModel(**fixed, **SIZES, num_audio_token=4, audio_inject_layers=[0, 1]).eval()


def sound() -> tuple[Any, ...]:
    """Block 0, hidden states (1, 8, 48) of two frames, and both embeddings of the sound: (1, 2, 1 or 5, 48)."""
    import torch

    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randn((1, 2, count, 48), generator=generator) for count in (1, 5)]
    return 0, torch.randn((1, 8, 48), generator=generator), *tokens, 8


def inject_sound() -> Any:
    """`WanS2VModel.after_transformer_block`, as `model_fn_wans2v` calls it behind every block."""
    import torch

    with torch.no_grad():
        return tiny_s2v().after_transformer_block(*sound())


def inject_sound_to_compile() -> tuple[Any, tuple[Any, ...]]:
    return tiny_s2v().after_transformer_block, sound()


def tiny_vae() -> Any:
    import torch

    from tests.contract.diffsynth.vae import make_vae

    return make_vae("2.1", torch.float32)


def decode_tiny() -> Any:
    """One latent frame (1, 16, 1, 2, 2), decoded by this process alone: the feature hands it back to the framework."""
    import torch

    from tests.contract.diffsynth.vae import decode

    with torch.no_grad():
        return decode(tiny_vae(), torch.ones(1, 16, 1, 2, 2), False)


def encode_tiny() -> Any:
    """One frame (1, 3, 1, 16, 16), encoded by this process alone: the feature hands it back to the framework."""
    import torch

    from tests.contract.diffsynth.vae import encode

    with torch.no_grad():
        return encode(tiny_vae(), torch.ones(1, 3, 1, 16, 16), False)


def managed_layer() -> Any:
    """A frozen layer with one that trains, wrapped as `--fp8_models` wraps a block."""
    import torch
    from diffsynth.core.vram.layers import AutoWrappedModule

    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    block[0].requires_grad_(False)
    return AutoWrappedModule(block, computation_dtype=torch.bfloat16, computation_device="cpu")


def cast_with_lora() -> Any:
    """The weights of the copy that computes."""
    import torch

    layer = managed_layer()
    return dict(layer.cast_to(layer.module, torch.bfloat16, "cpu").state_dict())


def managed_layer_to_compile() -> tuple[Any, tuple[Any, ...]]:
    """The same, loaded in another dtype than it computes in: forward casts a copy."""
    import torch
    from diffsynth.core.vram.layers import AutoWrappedModule

    block = managed_layer().module
    block[1].to(torch.bfloat16)  # what trains keeps its dtype, and has to fit the frozen layer before it
    loaded = {"onload_dtype": torch.float32, "onload_device": "cpu"}
    computes = {"computation_dtype": torch.bfloat16, "computation_device": "cpu"}
    return AutoWrappedModule(block, **loaded, **computes), (torch.ones(1, 2, dtype=torch.bfloat16),)
