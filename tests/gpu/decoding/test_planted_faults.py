"""A fault planted in a strict operator, a Triton kernel or an exchange on GPUs: the user has the framework's frames."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.decoding.faults import FAULTS, calls, spoil_convolutions
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.decoding.tiny import encode, make_latent, make_vae, make_video
from wanshim.core.decoding import parallelize_decode, parallelize_encode
from wanshim.core.decoding.operators import strict_kernels

pytestmark = pytest.mark.timeout(300)


def _spoil_kernel(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The last video of a batch loses a bit of what the kernel has written, but not where the kernel is looked at
    before it is used."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        own = getattr(strict_kernels, name)
        written = 4 if name == "norm_into" else 3

        def spoiled(*args: Any, **options: Any) -> None:
            own(*args, **options)
            if args[written].shape[2:] != (2, 16, 24):  # what `strict_checks` compares the norm's kernel with
                args[written][-1, 0] *= 1 + 2**-6

        patch.setattr(strict_kernels, name, spoiled)

    return spoil


@pytest.mark.gpu(1)
@pytest.mark.parametrize("verb", ["decode", "encode"])
@pytest.mark.parametrize(
    "spoil",
    [spoil_convolutions, _spoil_kernel("norm_into"), _spoil_kernel("sum_into")],
    ids=["operator", "norm's kernel", "sum's kernel"],
)
def test_fault_on_a_gpu_gives_the_framework_s_result_and_one_sentence(
    spoil: Callable[[pytest.MonkeyPatch], None],
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    vae = make_vae("2.1", torch.bfloat16).cuda()
    latent, video = make_latent(4, 9, 14, batch=2).to("cuda", torch.bfloat16), make_video(13, batch=2)
    call = (lambda: vae.decode(latent).sample) if verb == "decode" else (lambda: encode(vae, video))
    video = video.to("cuda", torch.bfloat16)
    expected = call()
    handle = (parallelize_decode if verb == "decode" else parallelize_encode)(vae, engines=False)
    handle.wait_for_kernels((latent if verb == "decode" else video).shape)
    assert torch.equal(call(), expected)
    assert handle.plan.claim == "strict, compared"
    handle.remove()
    handle = (parallelize_decode if verb == "decode" else parallelize_encode)(vae, engines=False)
    handle.wait_for_kernels((latent if verb == "decode" else video).shape)
    spoil(monkeypatch)
    with caplog.at_level(logging.WARNING, "wanshim.decoding"):
        assert all(torch.equal(call(), expected) for _ in range(3))
    handle.remove()
    (said,) = [record.message for record in caplog.records if record.name == "wanshim.decoding"]
    assert f"the {verb} is left to the framework: strict was not equal for a" in said


@pytest.mark.gpu(2)
def test_fault_on_one_of_two_gpus_gives_both_the_framework_s_result_and_the_same_sentence() -> None:
    told = values(run_ranks(calls, 2, "cuda", seconds=280, backend="nccl"))
    for fault in FAULTS:
        assert told[0][fault] == told[1][fault]
        assert [equal for equal, *_ in told[0][fault]] == [True, True], fault
    assert [claim for _, claim, _ in told[0]["none"]] == 2 * ["strict, compared"]
    for fault in FAULTS[1:3]:
        for (_, _, reason), source in zip(told[0][fault], ("latent", "video")):
            assert reason.startswith(f"strict was not equal for a {source} of ["), (fault, reason)
