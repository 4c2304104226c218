"""Strict on one GPU: diffusers' bits in fewer passes."""

from __future__ import annotations

import diffusers
import pytest
import torch

from tests.distributed.decoding.tiny import tiny, vae_config
from wanshim.core.decoding import parallelize_decode, parallelize_encode
from wanshim.core.decoding.operators import strict_kernels
from wanshim.core.decoding.operators.strict_checks import Sizes

from .everything import on_gpu


@pytest.mark.gpu(1)
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_strict_on_one_gpu_has_the_bits_of_diffusers_with_norms_in_one_kernel(layout: str, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    vae, latent = on_gpu(layout, dtype, 5)
    reference = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    handle.wait_for_kernels(latent.shape)
    for _ in range(2):
        assert torch.equal(vae.decode(latent).sample, reference)
    checks = handle.parallel.operators.checks
    handle.remove()
    assert set(checks._norms.values()) == {Sizes.WIDE}
    assert all(checks._cast_inside.values())
    assert checks.silu(dtype) == (dtype == torch.bfloat16)


@pytest.mark.gpu(2)
def test_vae_on_another_gpu_than_the_current_one_has_its_kernels_and_bits() -> None:
    """As behind `.to("cuda:1")`, and in a thread: Triton launches on the current device."""
    vae, latent = (each.to("cuda:1") for each in on_gpu("2.1", torch.bfloat16, 5))
    reference = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    handle.wait_for_kernels(latent.shape)
    assert torch.equal(vae.decode(latent).sample, reference)
    checks = handle.parallel.operators.checks
    handle.remove()
    assert set(checks._norms.values()) == {Sizes.WIDE}
    assert torch.cuda.current_device() == 0


WIDTHS = {
    "2.1": {"base_dim": 96, "z_dim": 16},
    "2.2": vae_config("2.2") | {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48},
}


@pytest.mark.gpu(1)
@pytest.mark.parametrize("layout", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_strict_has_the_bits_of_diffusers_for_each_of_several_videos(layout: str, dtype: torch.dtype) -> None:
    """At the widths of the real VAEs, whose first convolution lies channels last for two videos and more."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    vae = tiny(diffusers.AutoencoderKLWan, WIDTHS[layout], dtype).cuda()
    for batch in (1, 2, 3):
        for height, width in ((8, 12), (15, 13), (30, 52)):
            scale = 16 if layout == "2.2" else 8
            latent = torch.randn(batch, WIDTHS[layout]["z_dim"], 3, height, width, device="cuda", dtype=dtype)
            video = torch.rand(batch, 3, 9, height * scale, width * scale, device="cuda").mul(2).sub(1).to(dtype)
            expected = vae.decode(latent).sample, vae.encode(video).latent_dist.parameters
            handles = [parallelize_decode(vae, engines=False), parallelize_encode(vae, engines=False)]
            for handle, given in zip(handles, (latent, video)):
                handle.wait_for_kernels(given.shape)
            found = vae.decode(latent).sample, vae.encode(video).latent_dist.parameters
            for handle in handles:
                handle.remove()
            for verb, one, other in zip(("decode", "encode"), found, expected):
                wrong = [i for i in range(batch) if not torch.equal(one[i], other[i])]
                assert not wrong, f"{verb} of {batch} videos of {height} x {width} latents: {wrong} differ"


@pytest.mark.gpu(1)
def test_fault_in_a_kernel_gives_the_user_the_framework_s_frames_and_plainer_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vae, latent = on_gpu("2.1", torch.bfloat16, 5)
    reference = vae.decode(latent).sample
    own = strict_kernels.sum_into

    def sum_into(*args: torch.Tensor) -> None:
        own(*args)
        args[-1][-1, 0, -1, 0, 0] *= 1 + 2**-6

    monkeypatch.setattr(strict_kernels, "sum_into", sum_into)
    handle = parallelize_decode(vae, engines=False)
    handle.wait_for_kernels(latent.shape)
    claims = []
    for _ in range(2):
        assert torch.equal(vae.decode(latent).sample, reference)
        claims.append(handle.plan.claim)
    handle.remove()
    assert claims == ["strict, not compared", "strict, compared"]  # the second time without these kernels
    assert len([text for text in caplog.messages if "strict was not equal" in text]) == 1
