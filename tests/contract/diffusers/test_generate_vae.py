"""One process that generates decodes by strict operators: the script's frames, its tiles, and its say.

`gains_alone` is replaced: on a CPU the operators gain nothing, and the framework decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders import autoencoder_kl_wan

import wanshim
from tests.contract.diffusers import offloading, wan_pipelines
from tests.contract.diffusers.wan_pipelines import generate
from wanshim.activation import Activation
from wanshim.core.decoding import KernelsMissing, vae_cache
from wanshim.core.decoding.call import NOT_COMPILED
from wanshim.core.decoding.run import VaeOperators
from wanshim.core.shared.kernel_compiler import COMPILER
from wanshim.errors import FeatureUnavailable
from wanshim.patching.verdict import Verdict
from wanshim.reporting import ReportRow
from wanshim.select.decision import Decision

KINDS = ("wan", "i2v")


@pytest.fixture
def activate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.setattr(vae_cache, "gains_alone", lambda given: True)
    monkeypatch.setattr(COMPILER, "do", lambda *work, first=False: [each() for each in work])

    def on(**variables: str) -> None:
        for name, value in {"WANSHIM_GENERATE": "1", **variables}.items():
            monkeypatch.setenv(name, value)
        wanshim.activate()

    yield on
    wanshim.deactivate()


def row(verb: str = "decode") -> ReportRow:
    return wanshim.report().row(f"diffusers.vae_{verb}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["none", "model", "block"])
def test_frames_are_the_script_s_own(way: str, kind: str, activate: Callable[..., None]) -> None:
    sizes: tuple[dict[str, Any], ...] = ({"prompts": 2}, {"num_frames": 9})
    pipe = wan_pipelines.MADE[kind]()
    offloading.WAYS[way](pipe)
    expected = [generate(pipe, kind, **size) for size in sizes]
    activate()
    assert all(map(torch.equal, expected, (generate(pipe, kind, **size) for size in sizes)))
    assert (row().state, row().calls, row().fallbacks) == ("exercised", 2, {})
    assert any("strict" in note for note in row().notes)
    assert not row().named, "under strict it may be left out"
    assert row("encode").calls == (2 if kind == "i2v" else 0)


@pytest.mark.parametrize(("kind", "way"), [("wan", "none"), ("i2v", "none"), ("wan", "model"), ("wan", "block")])
def test_kernels_of_the_decode_are_asked_for_while_the_forwards_compute(
    kind: str, way: str, activate: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, asked, latents = wan_pipelines.MADE[kind](), list[Any](), list[Any]()
    offloading.WAYS[way](pipe)
    own = VaeOperators.kernels_of

    def kernels_of(self: VaeOperators, shape: Any, device: torch.device, dtype: torch.dtype) -> Any:
        asked.append((self.graph.verb, tuple(shape), device, dtype))
        return own(self, shape, device, dtype)

    def step(pipe: Any, step: int, time: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        latents.append(("decode", tuple(given["latents"].shape), torch.device("cpu"), torch.float32))
        assert latents[0] in asked
        return {}

    monkeypatch.setattr(VaeOperators, "kernels_of", kernels_of)
    activate()
    generate(pipe, kind, callback_on_step_end=step)
    assert asked.count(latents[0]) == 2, "ahead, and by the decode"


class Tiny(torch.nn.Module):
    """A decoder of the user's own."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return x[:, :3].repeat_interleave(8, -1).repeat_interleave(8, -2)


def test_decoder_of_the_user_s_own_decodes(activate: Callable[..., None]) -> None:
    pipe = wan_pipelines.wan()
    pipe.vae.decoder = Tiny()
    expected = generate(pipe, "wan")
    activate()
    assert torch.equal(generate(pipe, "wan"), expected)
    assert row().state == "ineffective"


def test_call_within_a_call_prepares_for_itself(activate: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    from wanshim.patching import vae_method

    pipe, inner = wan_pipelines.wan(), wan_pipelines.wan()
    prepared, scale = list[Any](), pipe.scheduler.set_timesteps

    def set_timesteps(*args: Any, **kwargs: Any) -> Any:
        generate(inner, "wan", num_frames=9)
        return scale(*args, **kwargs)

    activate()
    monkeypatch.setattr(vae_method, "prepare_decode", lambda vae, latents: prepared.append((vae, latents.shape[2])))
    pipe.scheduler.set_timesteps = set_timesteps
    generate(pipe, "wan")
    assert prepared == [(inner.vae, 3), (pipe.vae, 2)]


def test_tiles_have_frames_of_their_own(activate: Callable[..., None]) -> None:
    pipe = wan_pipelines.wan()
    pipe.vae.enable_tiling(24, 24, 16, 16)
    expected = generate(pipe, "wan")
    pipe.vae.disable_tiling()
    assert not torch.equal(generate(pipe, "wan"), expected)
    pipe.vae.enable_tiling(24, 24, 16, 16)
    activate()
    assert torch.equal(generate(pipe, "wan"), expected)
    assert [*row().fallbacks] == ["tiles, whose frames are others than whole ones"]


def test_variable_of_the_decode_itself_has_the_say(activate: Callable[..., None]) -> None:
    activate(WANSHIM_VAE_MODE="off")
    report = wanshim.report()
    assert [each.feature for each in report.selected if "diffusers.vae" in each.feature] == ["diffusers.vae_encode"]
    activate(WANSHIM_VAE_MODE="auto")
    assert row().named
    assert row().selected_by == "WANSHIM_VAE_MODE"


def test_cpu_gains_nothing(activate: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vae_cache, "gains_alone", lambda given: given.is_cuda)
    activate()
    generate(wan_pipelines.wan(), "wan")
    assert row().fallbacks == {"one process gains nothing by it on cpu": 1}


def test_processes_that_each_generate_share_no_decode(activate: Callable[..., None]) -> None:
    pipe = wan_pipelines.wan()
    expected = generate(pipe, "wan")
    activate(WORLD_SIZE="2")
    assert torch.equal(generate(pipe, "wan"), expected)
    assert [*row().fallbacks] == ["each process generates by itself: none asked to share its decode"]
    activate(WORLD_SIZE="2", WANSHIM_FEATURES="diffusers.vae_decode")
    assert torch.equal(generate(pipe, "wan"), expected)
    assert row().state == "exercised", "it is asked for by name"


def test_decode_for_which_the_framework_has_no_memory_waits_for_its_kernels(
    activate: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = wan_pipelines.wan()
    expected, compiled, waited = generate(pipe, "wan"), list[bool](), list[Any]()

    own = autoencoder_kl_wan.DecoderOutput

    def out_of_memory(**frames: Any) -> Any:
        if compiled:
            return own(**frames)
        pipe.vae._feat_map = [torch.zeros(1)]
        raise torch.OutOfMemoryError("CUDA out of memory")

    def wait(self: KernelsMissing) -> None:
        waited.append(self)
        assert all(each is None for each in pipe.vae._feat_map), "what the framework kept is given back"
        compiled.append(True)

    monkeypatch.setattr(VaeOperators, "are_compiling", lambda *_: not compiled)
    monkeypatch.setattr(KernelsMissing, "wait", wait)
    monkeypatch.setattr(autoencoder_kl_wan, "DecoderOutput", out_of_memory)
    activate()
    found = generate(pipe, "wan")
    assert torch.equal(found, expected)
    assert len(waited) == 1
    assert (row().state, row().fallbacks) == ("exercised", {})
    compiled.clear()
    monkeypatch.setattr(KernelsMissing, "wait", lambda self: None)
    with pytest.raises(torch.OutOfMemoryError):
        generate(pipe, "wan")
    monkeypatch.setattr(autoencoder_kl_wan, "DecoderOutput", own)
    assert torch.equal(generate(pipe, "wan"), expected)
    assert row().fallbacks == {NOT_COMPILED: 2}


def test_strict_asks_for_no_decode_that_nobody_named(
    activate: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = Decision(Verdict.REFUSE, "its code is unlike that of any version")
    decide = Activation._decide

    def of(self: Activation, feature: Any, read: Any) -> Decision:
        return unknown if feature.ability == "vae_decode" else decide(self, feature, read)

    monkeypatch.setattr(Activation, "_decide", of)
    activate(WANSHIM_STRICT="1", WANSHIM_FEATURES="auto,-diffsynth")
    with pytest.raises(FeatureUnavailable, match="vae_decode"):
        activate(WANSHIM_VAE_MODE="auto")


def test_decode_that_the_program_replaced_before_is_its_own_also_under_strict(
    activate: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = wan_pipelines.wan()
    own = type(pipe.vae)._decode
    monkeypatch.setattr(type(pipe.vae), "_decode", lambda self, *args, **kwargs: own(self, *args, **kwargs))
    activate(WANSHIM_STRICT="1")
    assert row().selected_by == "auto with WANSHIM_GENERATE"
    assert row().state == "failed"
    assert row().violation is None
    generate(pipe, "wan")
