"""`vllm_omni.vae_allowlist` on vLLM-Omni's own registry, pipelines and VAE wrapper."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.decoding.tiny import make_latent, make_vae
from tests.kit.pytest_tests import verdict_here
from wanshim.patching.verdict import Verdict

from .tiny_model import write_model

pytestmark = pytest.mark.timeout(600)
PIPELINES = ("WanPipeline", "WanImageToVideoPipeline")
FEATURE = "vllm_omni.vae_allowlist"
LISTED = verdict_here(FEATURE)
only_016 = pytest.mark.skipif(LISTED is not Verdict.PATCH, reason="0.16 alone has an allowlist that leaves Wan out")

only_without_the_option = pytest.mark.skipif(LISTED is not Verdict.REFUSE, reason="this release has the option")


def build(pipeline: str, folder: str, size: int) -> Any:
    """`initialize_model` as a worker calls it. The transformer is a stand-in: it needs vLLM's GPU kernels."""
    import importlib

    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig, TransformerConfig
    from vllm_omni.diffusion.registry import initialize_model

    for name in ("pipeline_wan2_2", "pipeline_wan2_2_i2v"):
        module = importlib.import_module(f"vllm_omni.diffusion.models.wan2_2.{name}")
        module.create_transformer_from_config = lambda config, **options: StandIn(config)
        module.get_local_device = lambda: torch.device("cpu")
    config = OmniDiffusionConfig(model=folder, model_class_name=pipeline, dtype=torch.float32)
    config.tf_model_config = TransformerConfig()
    config.parallel_config = DiffusionParallelConfig()
    config.parallel_config.vae_patch_parallel_size = size
    return initialize_model(config)


class StandIn(torch.nn.Module):
    """A transformer that has a config and nothing else."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


class Lines(logging.Handler):
    """The messages of vLLM-Omni's registry."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listen() -> Lines:
    lines = Lines()
    logging.getLogger("vllm_omni.diffusion.registry").addHandler(lines)
    return lines


def with_patch(rank: int, size: int, folder: str) -> list[tuple[str, bool, bool, bool, str]]:
    import wanshim

    wanshim.activate()  # auto: the allowlist is one of the repairs
    from vllm_omni.diffusion.distributed import parallel_state

    parallel_state.init_dit_group(size, "gloo")
    told = []
    for pipeline in PIPELINES:
        lines = listen()
        model = build(pipeline, f"{folder}/{pipeline}", size)
        warned = any("only enabled for" in line for line in lines.lines)
        wrapped = getattr(model.vae, "_vllm_vae_patch_parallel_installed", False)
        latent = make_latent(5)
        with torch.no_grad():
            model.vae.use_tiling = False
            reference = model.vae._vllm_vae_patch_parallel_original_decode(latent).sample
            equal = torch.equal(model.vae.decode(latent).sample, reference)
            os.environ["WANSHIM_VAE_MODE"] = "spatial"
            wanshim.activate()
            equal &= bool((model.vae.decode(latent).sample - reference).abs().max() <= 1e-5)
            del os.environ["WANSHIM_VAE_MODE"]
            wanshim.activate()
        row = wanshim.report().row(FEATURE)
        told.append((pipeline, wrapped, warned, equal, "; ".join(row.notes)))
    return told


@only_016
def test_initialize_model_wraps_the_vae_of_both_wan_pipelines_and_shares_their_decode(tmp_path: Path) -> None:
    for pipeline in PIPELINES:
        write_model(tmp_path / pipeline, pipeline)
    for told in values(run_ranks(with_patch, 2, str(tmp_path), seconds=300)):
        for pipeline, wrapped, warned, equal, notes in told:
            assert wrapped, pipeline
            assert not warned, pipeline
            assert equal, pipeline
            assert "temporal on 2 ranks" in notes
            assert "spatial by width on 2 ranks" in notes


def without_patch(rank: int, size: int, folder: str) -> tuple[bool, bool]:
    from vllm_omni.diffusion.distributed import parallel_state

    parallel_state.init_dit_group(size, "gloo")
    lines = listen()
    model = build("WanPipeline", f"{folder}/WanPipeline", 2)
    warned = any("only enabled for" in line for line in lines.lines)
    return warned, getattr(model.vae, "_vllm_vae_patch_parallel_installed", False)


@only_016
def test_initialize_model_without_the_patch_warns_and_leaves_the_vae(tmp_path: Path) -> None:
    write_model(tmp_path / "WanPipeline", "WanPipeline")
    assert values(run_ranks(without_patch, 1, str(tmp_path), seconds=300)) == [(True, False)]


def image_decode(rank: int, size: int, active: bool) -> torch.Tensor:
    """An image VAE through vLLM-Omni's wrapper, tiles on two ranks."""
    if active:
        import wanshim

        wanshim.activate()
    from diffusers import AutoencoderKL
    from vllm_omni.diffusion.distributed.vae_patch_parallel import VaePatchParallelism

    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        sample_size=16,
    ).eval()
    vae.enable_tiling()
    wrapper = VaePatchParallelism(vae, vae_patch_parallel_size=2, group_getter=lambda: dist.group.WORLD)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        sample = wrapper.decode(torch.randn(1, 4, 20, 20, generator=generator)).sample
    assert isinstance(sample, torch.Tensor)
    return sample


@only_016
def test_image_decode_is_the_same_with_and_without_the_patch() -> None:
    plain = values(run_ranks(image_decode, 2, False, seconds=200))
    patched = values(run_ranks(image_decode, 2, True, seconds=200))
    assert all(torch.equal(a, b) for a, b in zip(plain, patched))


def sliced_decode(rank: int, size: int) -> tuple[bool, list[int], str]:
    import wanshim
    from wanshim.core.decoding import VaeCache

    batches: list[int] = []
    run: Any = VaeCache.run

    def counted(self: Any, vae: Any, z: torch.Tensor, **how: Any) -> Any:
        batches.append(len(z))
        return run(self, vae, z, **how)

    VaeCache.run = counted  # type: ignore[method-assign]
    os.environ["WANSHIM_VAE_MODE"] = "temporal"
    wanshim.activate(f"none,{FEATURE}", strict=True)  # the variable would switch diffusers' on, too
    from vllm_omni.diffusion.distributed.vae_patch_parallel import VaePatchParallelism

    vae, latent = make_vae("2.1", torch.float32), make_latent(3, batch=2)
    vae.enable_slicing()
    wrapper = VaePatchParallelism(vae, vae_patch_parallel_size=2, group_getter=lambda: dist.group.WORLD)
    with torch.no_grad():
        reference = vae.decode(latent).sample
        equal = torch.equal(wrapper.decode(latent).sample, reference)
    return equal, batches, "; ".join(wanshim.report().row(FEATURE).notes)


@only_016
def test_sliced_decode_of_a_batch_has_the_bits_of_each_video_alone() -> None:
    """`vae_use_slicing`."""
    for equal, batches, notes in values(run_ranks(sliced_decode, 2, seconds=200)):
        assert equal, notes
        assert batches == [1, 1]  # of both at once the bits may be others
        assert "temporal on 2 ranks, strict, compared" in notes


def tiles_of(rank: int, size: int, folder: str, pipeline: str) -> tuple[int, bool]:
    """How many of four tiles this rank decodes where vLLM-Omni itself built the pipeline, and whether it warned."""
    from types import SimpleNamespace

    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.diffusion.distributed.autoencoders import distributed_vae_executor

    parallel_state._PP = SimpleNamespace(world_size=1)  # the transformer is in one stage
    world: Any = dist.group.WORLD
    for name, group in (("get_world_group", SimpleNamespace(device_group=world)), ("get_dit_group", world)):
        if hasattr(distributed_vae_executor, name):
            setattr(distributed_vae_executor, name, lambda group=group: group)
    lines = listen()
    vae = build(pipeline, f"{folder}/{pipeline}", size).vae
    pixels = int(vae.config.scale_factor_spatial)
    vae.enable_tiling(4 * pixels, 4 * pixels, 3 * pixels, 3 * pixels)
    decoded, decode_tile = [], vae.tile_exec
    vae.tile_exec = lambda task: (decoded.append(task), decode_tile(task))[1]
    with torch.no_grad():
        vae.decode(make_latent(1, 6, 6))
    return len(decoded), any("NOT enabled for" in line for line in lines.lines)


@pytest.mark.skipif(LISTED is not Verdict.NATIVE, reason="this release leaves Wan's VAE out")
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_release_without_an_allowlist_divides_the_tiles_of_wans_vae_by_itself(tmp_path: Path, pipeline: str) -> None:
    """Without wanshim: what the word native says."""
    write_model(tmp_path / pipeline, pipeline)
    assert values(run_ranks(tiles_of, 2, str(tmp_path), pipeline, seconds=300)) == [(2, False), (2, False)]


@only_without_the_option
def test_release_that_is_refused_has_no_option_for_a_parallel_decode() -> None:
    from vllm_omni.diffusion.data import DiffusionParallelConfig

    with pytest.raises(TypeError, match="vae_patch_parallel_size"):
        DiffusionParallelConfig(vae_patch_parallel_size=2)


@only_without_the_option
def test_release_that_is_refused_has_no_parallel_decode_that_wan_could_be_admitted_to() -> None:
    import vllm_omni.diffusion.registry as registry

    assert importlib.util.find_spec("vllm_omni.diffusion.distributed.vae_patch_parallel") is None
    assert not [name for name in vars(registry) if "ALLOWLIST" in name]
