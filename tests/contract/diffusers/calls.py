"""The tiny calls that the contract kit makes, one a feature."""

from __future__ import annotations

from typing import Any

from tests.contract.vae_calls import VaeCalls

_CALLS = VaeCalls("tests.contract.diffusers.vae", lambda encoded: encoded.latent_dist.parameters)
tiny_vae = _CALLS.vae
decode_tiny, decode_to_compile = _CALLS.decode, _CALLS.decode_to_compile
encode_tiny, encode_to_compile = _CALLS.encode, _CALLS.encode_to_compile


def generate_tiny() -> Any:
    """Three steps without guidance, by this process alone."""
    from tests.contract.diffusers.wan_pipelines import generate, wan

    return generate(wan(), "wan", guidance_scale=1.0)


def _transformer(**changed: int) -> Any:
    import torch
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32, **changed}
    torch.manual_seed(0)
    return WanTransformer3DModel(**sizes, text_dim=16, freq_dim=16, in_channels=4, out_channels=4).eval()


def _tokens() -> tuple[Any, ...]:
    import torch

    seeded = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 4, 1, 4, 4, generator=seeded), torch.randn(1, 5, 16, generator=seeded)
    return x, torch.tensor([500.0]), text, None, False


def forward_by_kernels() -> Any:
    """A forward in fp16, by kernels that Triton interprets on the CPU."""
    import pytest
    import torch

    from wanshim.core.strict_blocks import kernels

    model, (x, times, text, *others) = _transformer().half(), _tokens()
    for block in model.blocks:  # with hooks a block is not run twice to be compared: each call is the same
        block.ffn.register_forward_hook(lambda *_: None)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(kernels, "available", lambda x: x.dtype == torch.float16)
        return model(x.half(), times, text.half(), *others)


def forward_in_eight_bits() -> Any:
    import torch

    model, (_, times, text, *others) = _transformer(attention_head_dim=16), _tokens()
    with torch.no_grad():
        return model(torch.randn(1, 4, 1, 8, 8, generator=torch.Generator().manual_seed(1)), times, text, *others)


def transformer_and_block() -> tuple[Any, Any]:
    model = _transformer()
    return model, model.blocks[0]


def forward_to_compile() -> tuple[Any, tuple[Any, ...]]:
    return _transformer(), _tokens()


def block_and_processor() -> tuple[Any, Any]:
    block = _transformer().blocks[0]
    return block, block.attn1.processor
