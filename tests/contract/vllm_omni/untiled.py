"""Pictures without tiles, by vLLM-Omni's own VAEs: what the tests of decode and encode share."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tests.contract.vllm_omni.vae import make_distributed
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.decoding.tiny import QWEN_IMAGE, encode, make_latent, make_video, tiny, vae_config

LAYERED = "layered"  # Qwen-Image-Layered, a class that no executor serves
CASES = [("2.1", "float32"), ("2.2", "float32"), ("2.1", "bfloat16"), (QWEN_IMAGE, "float32"), (LAYERED, "float32")]


def make_vae(layout: str, size: int, dtype: str) -> Any:
    """Tiling is off, and its tiles are smaller than what `given` makes."""
    if layout != LAYERED:
        vae = make_distributed(layout, size, getattr(torch, dtype))
    else:
        from vllm_omni.diffusion.models.qwen_image.autoencoder_kl_qwenimage import AutoencoderKLQwenImage

        vae = tiny(AutoencoderKLQwenImage, {**vae_config(QWEN_IMAGE), "input_channels": 4}, getattr(torch, dtype))
        vae.enable_tiling(32, 32, 24, 24)
    vae.use_tiling = False
    return vae


def given(verb: str, layout: str, frames: int, width: int, batch: int, dtype: torch.dtype) -> torch.Tensor:
    """A latent, or a video of its size; Qwen-Image-Layered's has an alpha channel."""
    if verb == "decode":
        return make_latent(frames, 5, width, batch, dtype)
    pixels = 16 if layout == "2.2" else 8
    video = make_video(4 * frames - 3, 5 * pixels, width * pixels, batch, dtype)
    return torch.cat([video, video[:, :1]], 1) if layout == LAYERED else video


def compute(verb: str, vae: Any, value: torch.Tensor) -> torch.Tensor:
    return encode(vae, value) if verb == "encode" else vae.decode(value).sample  # type: ignore[no-any-return]


def expect_vllm_omnis_bits_in_one_process(verb: str) -> None:
    (told,) = values(run_ranks(in_one_process, 1, verb, seconds=300))
    assert len(told) == len(CASES)
    for case in told:
        _expect_in_one_process(verb, case)


def expect_each_rank_to_compute_for_itself(verb: str) -> None:
    for told in values(run_ranks(on_two_ranks, 2, verb)):
        for layout, same, state, notes in told:
            assert same, layout
            assert state == "ineffective"
            assert "left to the framework: several GPUs share tiles alone" in notes


def in_one_process(rank: int, size: int, verb: str) -> list[dict[str, Any]]:
    return [_in_one_process(size, verb, *case) for case in CASES]


def _in_one_process(size: int, verb: str, layout: str, dtype: str) -> dict[str, Any]:
    """By vLLM-Omni and then by the feature, where a double says that the operators gain; there is no GPU here."""
    import wanshim
    from wanshim.core.decoding import vae_cache

    feature, vae = f"vllm_omni.vae_{verb}", make_vae(layout, size, dtype)
    sizes = {"first": (2, 7, 1), "again": (2, 7, 1), "wider": (2, 9, 1), "longer": (3, 7, 1), "two": (2, 7, 2)}
    values = {name: given(verb, layout, *extent, vae.dtype) for name, extent in sizes.items()}
    whole = {name: compute(verb, vae, value) for name, value in values.items()}
    vae.use_slicing = True
    slices = compute(verb, vae, values["two"])
    vae.use_slicing, vae.use_tiling = False, True
    tiled = compute(verb, vae, values["wider"])
    vae.use_tiling = False
    parent = next(cls for cls in type(vae).__mro__ if cls.__module__.startswith("diffusers."))
    before, own = dict(vars(parent)), vars(type(vae)).get(f"_{verb}")
    wanshim.activate(f"none,{feature}", strict=True)
    target = f"{type(vae).__module__}:{type(vae).__name__}"
    with mock.patch.object(vae_cache, "gains_alone", return_value=True):
        same = {name: torch.equal(compute(verb, vae, value), whole[name]) for name, value in values.items()}
        vae.use_slicing = True
        same["sliced"] = torch.equal(compute(verb, vae, values["two"]), slices)
        by_name = getattr(vae, f"_{verb}")(**{"z" if verb == "decode" else "x": values["first"]})
        same["by name"] = torch.equal(by_name.sample if verb == "decode" else by_name, whole["first"])
        if verb == "decode":
            (alone,) = vae._decode(values["first"], return_dict=False)
            same["tuple"] = torch.equal(alone, whole["first"])
        calls = {seam.target: seam.calls for seam in wanshim.report().row(feature).seams}[f"{target}._{verb}"]
        vae.use_tiling = True
        with_tiling = compute(verb, vae, values["wider"])
    row = wanshim.report().row(feature)
    unchanged = all(vars(parent)[name] is value for name, value in before.items() if not name.startswith("__"))
    seams = {seam.target.removeprefix(f"{target}."): seam for seam in row.seams if seam.target.startswith(target)}
    wanshim.deactivate()
    return {
        "case": (layout, dtype),
        "same": same,
        "differ": not torch.equal(tiled, whole["wider"]),
        "calls": calls,
        "calls after tiles": seams[f"_{verb}"].calls,
        "tiles": seams[f"tiled_{verb}"].calls if f"tiled_{verb}" in seams else None,
        "with tiling": "whole" if torch.equal(with_tiling, whole["wider"]) else torch.equal(with_tiling, tiled),
        "said": (row.state, "; ".join((*row.notes, *row.fallbacks))),
        "fallbacks": row.fallbacks,
        "parent is unchanged": unchanged,
        "given back": vars(type(vae)).get(f"_{verb}") is own,
    }


def _expect_in_one_process(verb: str, told: dict[str, Any]) -> None:
    """The bits of vLLM-Omni for every size, batch and slice; with tiling on what makes tiles is called, and no more."""
    assert all(told["same"].values()), told
    assert told["differ"], "the tiles show no seams: they prove nothing"
    assert told["said"][0] == "exercised", told
    assert not told["fallbacks"], told
    assert "on 1 rank, strict, compared" in told["said"][1], told
    assert told["calls"] == told["calls after tiles"] == (9 if verb == "decode" else 8), told
    assert (told["tiles"], told["with tiling"]) == ((1, "whole") if told["tiles"] else (told["tiles"], True)), told
    assert told["parent is unchanged"]
    assert told["given back"]


def on_two_ranks(rank: int, size: int, verb: str) -> list[tuple[str, bool, str, str]]:
    """Each has its own result whole, as vLLM-Omni gives it."""
    import wanshim

    told = []
    for layout in ("2.1", QWEN_IMAGE):
        vae = make_vae(layout, size, "float32")
        value = given(verb, layout, 2, 7, 1, vae.dtype)
        reference = compute(verb, vae, value)
        wanshim.activate(f"none,vllm_omni.vae_{verb}", strict=True)
        same = torch.equal(compute(verb, vae, value), reference)
        row = wanshim.report(strict=False).row(f"vllm_omni.vae_{verb}")
        wanshim.deactivate()
        told.append((layout, same, row.state, "; ".join(row.notes)))
    return told
