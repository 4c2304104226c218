"""`diffsynth.vae_decode` on the installed DiffSynth."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import wanshim
from tests.contract.decoding import BOTH, PARALLELIZE, Case, check_handle, check_removed, check_shared
from tests.contract.diffsynth.decode_subject import SUBJECT
from tests.contract.diffsynth.prepared import Fork
from tests.contract.diffsynth.vae import QWEN_IMAGE, make_qwen_image_2_1, make_vae, qwen_image_cases
from tests.distributed.decoding.ranks import run_ranks, values
from wanshim.core.decoding import VaeCache, find_binding, parallelize_decode, vae_cache
from wanshim.core.decoding.dry_run import dry_run
from wanshim.errors import ModelInvalid


@pytest.mark.slow
def test_decode_shared_by_two_ranks_equals_diffsynth() -> None:
    check_shared(SUBJECT, BOTH, start=Fork)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_decode_of_the_qwen_image_vae_shared_by_ranks_equals_diffsynth(size: int) -> None:
    check_shared(SUBJECT, qwen_image_cases(SUBJECT.verb), size, start=Fork)


@pytest.mark.slow
def test_decode_with_tiles_is_exact_and_of_different_latents_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)], start=Fork)


def test_decode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT, start=Fork)


@pytest.mark.slow
def test_handle_on_the_qwen_image_vae_decodes_the_same_and_is_removed_without_trace() -> None:
    for frames in {case.frames for case in qwen_image_cases(SUBJECT.verb)}:
        check_handle(SUBJECT, QWEN_IMAGE, torch.randn(2, 16, frames, 5, 7).bfloat16())


def test_lengths_of_norms_are_computed_in_the_dtype_of_the_values() -> None:
    """The kernels for others are not compiled ahead."""
    pytest.importorskip("triton", reason="this torch comes without Triton")
    for layout in ("2.1", "2.2"):
        graph = find_binding(make_vae(layout, torch.bfloat16)).graph
        shape = (1, graph.input_channels, 3, 8, 8)
        launches = dry_run(graph, shape, torch.bfloat16, strict=True, by="torch")
        norms = [each for each in launches if each.kernel.arg_names[1] == "SIZE"]
        fused = [each for each in norms if dict(zip(each.kernel.arg_names, each.arguments))["SILU"]]
        assert {each.arguments[1][0] for each in fused} == {torch.bfloat16}


def test_vae_of_qwen_image_2_1_is_refused_by_name() -> None:
    vae = make_qwen_image_2_1()
    with pytest.raises(
        ModelInvalid, match=r"no decoder graph for diffsynth\.models\.qwen_image_21_vae\.QwenImage21VAE"
    ):
        parallelize_decode(vae)


def halved(method: Any) -> Any:
    @functools.wraps(method)
    def decode(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) / 2

    return decode


def decode_by_own_methods(rank: int, size: int) -> list[tuple[bool, str]]:
    """A decode with each method that the core computes in place of replaced, beside the framework's."""
    latent, told = torch.randn(1, 16, 3, 5, 7, generator=torch.Generator().manual_seed(0)), []
    for name in ("single_decode", "model.decode"):
        vae = make_vae("2.1", torch.float32)
        owner = vae if name == "single_decode" else vae.model
        setattr(owner, name.split(".")[-1], halved(getattr(owner, name.split(".")[-1])))
        expected = vae.decode(latent, device="cpu")
        wanshim.activate("none,diffsynth.vae_decode", strict=True)
        same = torch.equal(vae.decode(latent, device="cpu"), expected)
        told.append((same, "; ".join(wanshim.report().row("diffsynth.vae_decode").notes)))
        wanshim.deactivate()
    return told


def test_decode_of_a_vae_with_a_method_of_its_own_is_that_method_s() -> None:
    for single, model in values(run_ranks(decode_by_own_methods, 2, start=Fork)):
        assert single == (True, f"left to the framework: {__name__} brings its own single_decode")
        assert model == (True, f"left to the framework: {__name__} brings its own decode")


@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_subclass_with_a_method_of_its_own_is_refused_by_name(verb: str) -> None:
    vae = make_vae("2.1", torch.float32)
    own = {f"single_{verb}": halved(getattr(type(vae), f"single_{verb}"))}
    vae.__class__ = type("Mine", (type(vae),), own)
    with pytest.raises(ModelInvalid, match=rf"Mine: {__name__} brings its own single_{verb}"):
        PARALLELIZE[verb](vae)


def test_handle_on_a_vae_comes_before_the_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process gains by the feature, as on a GPU."""
    vae, seen = make_vae("2.1", torch.float32), []
    monkeypatch.setattr(vae_cache, "gains_alone", lambda given: True)
    wanshim.activate("none,diffsynth.vae_decode", strict=True)
    handle = parallelize_decode(vae, on_chunk=lambda frames, start: seen.append(frames.shape[2]))
    assert vae.decode(torch.randn(1, 16, 2, 5, 7), device="cpu") is None
    assert sum(seen) == 5
    handle.remove()
    assert vae.decode(torch.randn(1, 16, 2, 5, 7), device="cpu").shape[2] == 5
    assert "parallelize_decode has this VAE" in str(wanshim.report().row("diffsynth.vae_decode").notes)


@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_iterator_is_read_by_the_framework_alone(verb: str) -> None:
    """It reads all, also where it computes because we cannot."""
    vae = make_vae("2.1", torch.float32)
    given = torch.rand(2, 16, 1, 4, 4) if verb == "decode" else torch.rand(2, 3, 1, 32, 32)
    expected = getattr(vae, verb)(given, device="cpu")
    wanshim.activate(f"none,diffsynth.vae_{verb}", strict=True)
    assert torch.equal(getattr(vae, verb)(iter(given), device="cpu"), expected)
    assert f"the {verb} was given an iterator" in str(wanshim.report().row(f"diffsynth.vae_{verb}").notes)


@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_option_that_the_framework_does_not_have_is_its_own_error(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vae = make_vae("2.1", torch.float32)
    wanshim.activate(f"none,diffsynth.vae_{verb}", strict=True)
    monkeypatch.setattr(VaeCache, "run", lambda self, vae, given, **options: torch.zeros(1, 32, 1, 4, 4))
    assert getattr(vae, verb)(torch.zeros(1, 16, 1, 4, 4), device="cpu", tile_size=(4, 4)).numel()
    with pytest.raises(TypeError, match="'tilled'"):
        getattr(vae, verb)(torch.zeros(1, 16, 1, 4, 4), device="cpu", tilled=True)


def test_handle_whose_callback_takes_the_frames_returns_none_in_their_place() -> None:
    vae, seen = make_vae("2.1", torch.float32), []
    latent = torch.randn(2, 16, 2, 5, 7)
    handle = parallelize_decode(vae, on_chunk=lambda frames, start: seen.append(frames.shape[2]))
    assert vae.decode(latent, device="cpu") is None
    assert sum(seen) == 2 * 5
    handle.remove()
    assert vae.decode(latent, device="cpu").shape[2] == 5
    assert not {"decode", "single_decode"} & set(vae.__dict__)
