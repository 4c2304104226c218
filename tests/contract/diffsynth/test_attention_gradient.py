"""Attention kernels without a backward: training as by torch's attention, bit for bit, and generation by the kernel."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from diffsynth.core.attention import attention as core
from diffsynth.models import wan_video_dit
from torch.utils.checkpoint import checkpoint

import wanshim
from tests.compiling import use_aot_eager
from tests.contract.diffsynth import video_job, wan_pipelines
from tests.contract.diffsynth.ddp_jobs import forked
from tests.contract.diffsynth.ddp_worker import Job
from tests.contract.diffsynth.kernels import WITHOUT, Kernel, install, other, sage, values_alone
from tests.contract.diffsynth.launched import call
from wanshim.adapters.diffsynth import attention_gradient
from wanshim.adapters.diffsynth.kept_attention import refusal

FEATURE, SPLIT = "diffsynth.attention_gradient", "diffsynth.model_split"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def qkv(dtype: torch.dtype = torch.float32, grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((1, 6, 32), generator=generator).to(dtype).requires_grad_(grad) for _ in range(3)]


def by_torch(tensors: list[torch.Tensor]) -> torch.Tensor:
    return wan_video_dit.flash_attention(*tensors, num_heads=2, compatibility_mode=True)


def gradients(output: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(output.square().sum(), tensors, retain_graph=True)


def notes() -> list[str]:
    return list(wanshim.report(strict=True).row(FEATURE).notes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", WITHOUT, ids=lambda kernel: kernel.__name__)
def test_gradients_are_torchs_bit_for_bit(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, dtype: torch.dtype) -> None:
    install(monkeypatch, kernel)
    wanshim.activate(f"none,{FEATURE}")
    tensors = qkv(dtype)
    expected, found = by_torch(tensors), wan_video_dit.flash_attention(*tensors, num_heads=2)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients(found, tensors), gradients(expected, tensors)))
    layout = dict.fromkeys(("q_pattern", "k_pattern", "v_pattern", "out_pattern"), "b s (n d)")
    found = core.attention_forward(*tensors, **layout, dims={"n": 2})
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients(found, tensors), gradients(expected, tensors)))
    said = notes()
    assert len(said) == 2
    assert "no gradient passes through sage_attention: torch's attention computes where a gradient is wanted" in said[0]
    assert "no gradient passes through sage_attention" in said[1]


@pytest.mark.parametrize("kernel", [*WITHOUT, other], ids=lambda kernel: kernel.__name__)
def test_generation_keeps_the_kernel(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    install(monkeypatch, kernel)
    generate = wan_pipelines.MADE["t2v"]
    plain = wan_pipelines.generate(generate(), "t2v", cfg_scale=1.0)
    wanshim.activate("auto")
    assert torch.equal(wan_pipelines.generate(generate(), "t2v", cfg_scale=1.0), plain)
    tensors = qkv()
    wan_video_dit.flash_attention(*tensors, num_heads=2)  # as a training before it
    with torch.no_grad():
        assert not torch.equal(wan_video_dit.flash_attention(*tensors, num_heads=2), by_torch(tensors))
    assert torch.equal(wan_pipelines.generate(generate(), "t2v", cfg_scale=1.0), plain)


def test_kernel_with_a_backward_computes_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, other)
    tensors = qkv()
    expected = wan_video_dit.flash_attention(*tensors, num_heads=2)
    wanshim.activate(f"none,{FEATURE}")
    state = torch.get_rng_state()
    found = wan_video_dit.flash_attention(*tensors, num_heads=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients(found, tensors), gradients(expected, tensors)))
    row = wanshim.report().row(FEATURE)
    assert (row.state, row.calls, row.notes) == ("applied", 0, ())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("gradient", [True, False])
def test_both_passes_of_a_checkpoint_take_one_kernel(
    monkeypatch: pytest.MonkeyPatch, reentrant: bool, gradient: bool
) -> None:
    """A reentrant checkpoint runs its block without gradients first, and with them in backward."""
    install(monkeypatch, sage)
    wanshim.activate(f"none,{FEATURE}")
    ran: list[bool] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        tensors = [2 * x, x, x]
        output = wan_video_dit.flash_attention(*tensors, num_heads=2)
        ran.append(torch.equal(output, by_torch(tensors)))
        return output

    x = qkv()[0].requires_grad_(gradient)
    with torch.set_grad_enabled(gradient):
        output = checkpoint(block, x, use_reentrant=reentrant)
    if gradient:
        output.sum().backward()
        expected = torch.autograd.grad(by_torch([2 * x, x, x]).sum(), x)[0]
        assert torch.equal(x.grad, expected)
    assert set(ran) == {gradient}  # the second pass of the other kind ends with the last tensor that backward needs


def test_kernel_that_cannot_be_tried_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose memory is full: the caller's own call says so."""
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    nowhere = torch.device("cuda", torch.cuda.device_count())
    assert attention_gradient._probed(lambda q, k, v: q, (1, 16, 128), torch.bfloat16, nowhere)
    assert raised == []


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [sage, values_alone, other], ids=lambda kernel: kernel.__name__)
def test_compiled_caller_has_it_in_one_graph(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    install(monkeypatch, kernel)
    wanshim.activate(f"none,{FEATURE}")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *tensors: wan_video_dit.flash_attention(*tensors, 2), fullgraph=True, backend="eager"
    )
    tensors = qkv()
    expected = by_torch(tensors)
    for _ in range(2):
        found = compiled(*tensors)
        assert torch.equal(found, expected) == (kernel is not other)
        gradients(found, tensors)
    with torch.no_grad():
        assert not torch.equal(compiled(*tensors), expected)
    assert wanshim.report().row(FEATURE).state == ("applied" if kernel is other else "exercised")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of DiffSynth's own run by torch's attention."""
    return video_job.train(tmp_path_factory.mktemp("plain"))[0]


PLANS: dict[str, dict[str, str]] = {
    "as DiffSynth runs it": {},
    "split": {"DEVICES": "cpu,cpu"},
    "streamed": {"PLAN": "stream:3"},
    "attention kept": {"KEEP": "attention"},
    "streamed, attention kept": {"PLAN": "stream:3", "KEEP": "attention"},
}
FEW = ("split", "streamed, attention kept")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.sweep) for n in PLANS])
def test_run_learns_what_it_learns_without_the_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: dict[str, bytes]
) -> None:
    install(monkeypatch, sage)
    lost, _ = video_job.train(tmp_path / "lost")
    assert lost != plain
    for variable, value in {"STRICT": "1", **PLANS[name]}.items():
        monkeypatch.setenv(f"WANSHIM_{variable}", value)
    wanshim.activate("auto")
    found, _ = video_job.train(tmp_path / "found")
    assert found == plain
    assert "no gradient passes through sage_attention" in notes()[0]
    if "KEEP" in PLANS[name]:
        kept = "\n".join(wanshim.report().row("diffsynth.kept_attention").notes)
        assert "attentions kept" in kept
        assert "no attention was kept" not in kept


@pytest.mark.slow
@pytest.mark.sweep
def test_compiled_blocks_learn_q_and_k_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_aot_eager(monkeypatch)
    install(monkeypatch, sage)
    monkeypatch.setenv("WANSHIM_COMPILE", "1")
    torch._dynamo.reset()
    wanshim.activate("auto")
    _, module = video_job.train(tmp_path, 2)
    trained = {n: p for n, p in module.named_parameters() if "lora_B" in n and ".attn" not in n and p.requires_grad}
    fresh = dict(video_job.module_with_video().named_parameters())
    assert [n for n, p in trained.items() if torch.equal(p, fresh[n])] == []
    assert "no gradient passes through sage_attention" in notes()[0]


@pytest.mark.slow
def test_tokens_over_ranks_learn_the_same_with_and_without_the_kernel(tmp_path: Path) -> None:
    jobs = [
        Job(name, samples=1, accumulation=1, sage=name == "sage", variables={"WANSHIM_PLAN": "sequence"})
        for name in ("torch", "sage")
    ]
    forked(tmp_path / "ranks", jobs, MORE_FEATURES=FEATURE)
    for rank in range(2):
        expected, found = ((tmp_path / "ranks" / f"{job.name}.gradients{rank}").read_bytes() for job in jobs)
        assert found == expected


def test_attention_of_such_a_kernel_is_kept_where_torchs_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, sage)
    assert "SageAttention has no backward" in str(refusal(call(torch_dtype=torch.bfloat16)))
    wanshim.activate(f"none,{FEATURE}")
    assert refusal(call(torch_dtype=torch.bfloat16)) is None
