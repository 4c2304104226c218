"""Generation on several GPUs as other packages have it, over the same weights, inputs and scheduler as generate_arm.py.

Each peer is a process group that runs the whole program on every GPU. None of them decodes over GPUs here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import generate_arm as base
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Peer:
    """A peer, and modules that are imported before its turn: none that makes a CUDA context, as xfuser does."""

    make: Callable[[base.Job], base.Arm]
    modules: Sequence[str] = ()


def connect(job: base.Job) -> None:
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    dist.init_process_group("nccl" if job.device.type == "cuda" else "gloo")


def context_parallel(job: base.Job, **config: Any) -> base.Arm:
    """diffusers: `enable_parallelism`."""
    from diffusers import ContextParallelConfig

    connect(job)
    pipe = base.pipeline(job, base.transformer(job))
    attention = "native"
    if "ring_degree" in config:  # whose parts are merged by their log-sum-exp, which `native` does not return
        attention = "_native_cudnn"
        pipe.transformer.set_attention_backend(attention)
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(**config))
    facts = {"attention": attention}
    return base.Arm(pipe.scheduler, base.caller(job, pipe, decode=False), base.own_peak, lambda: facts)


def ulysses(job: base.Job) -> base.Arm:
    return context_parallel(job, ulysses_degree=job.ranks)


def ring(job: base.Job) -> base.Arm:
    return context_parallel(job, ring_degree=job.ranks)


def xdit(job: base.Job) -> base.Arm:
    """xDiT's transformer in diffusers' pipeline, as its runner of Wan2.1-T2V makes it; it has no guidance over GPUs."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import get_runtime_state, init_distributed_environment, initialize_runtime_state
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

    init_distributed_environment(rank=job.rank, world_size=job.ranks)
    config, _ = xFuserArgs(ulysses_degree=job.ranks).create_config()
    pipe = base.pipeline(job, base.transformer(job, xFuserWanTransformer3DWrapper))
    initialize_runtime_state(pipe, config)
    facts = {"attention": get_runtime_state().attention_backend.name}
    return base.Arm(pipe.scheduler, base.caller(job, pipe, decode=False), base.own_peak, lambda: facts)


class _Schedule:
    """diffusers' scheduler under the names that DiffSynth's pipeline calls."""

    def __init__(self) -> None:
        self._own = base.scheduler()

    def set_timesteps(self, steps: int, **_: Any) -> None:
        self._own.set_timesteps(steps)
        self.timesteps = self._own.timesteps

    def step(self, prediction: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        stepped: torch.Tensor = self._own.step(prediction, timestep, latents, return_dict=False)[0]
        return stepped


def usp(job: base.Job) -> base.Arm:
    """DiffSynth: what `from_pretrained(use_usp=True)` does, with diffusers' weights.

    DiffSynth rounds latents and timesteps to bf16, so its latents are those of one GPU up to that.
    """
    import yunchang.ring.utils as ring_utils

    ring_utils.update_npu_out = None  # xfuser 0.7.0 imports the name on GPUs too, and no release of yunchang has it
    from diffsynth.models.wan_video_dit import WanModel, precompute_freqs_cis_3d
    from diffsynth.pipelines.wan_video import WanVideoPipeline, WanVideoUnit_PromptEmbedder
    from diffsynth.utils.state_dict_converters.wan_video_dit import WanVideoDiTFromDiffusers
    from diffsynth.utils.xfuser import xdit_context_parallel as parallel

    parallel.initialize_usp(job.device.type)
    attention = "FA"
    if importlib.util.find_spec("flash_attn") is None:  # which `usp_attn_forward` names
        attention = "TORCH_CUDNN"
        parallel.AttnType = SimpleNamespace(FA=parallel.AttnType[attention])
    heads, blocks, ffn = base.MODELS[job.model]
    with torch.device("meta"):
        dit = WanModel(
            dim=128 * heads,
            in_dim=16,
            ffn_dim=ffn,
            out_dim=16,
            text_dim=4096,
            freq_dim=256,
            eps=1e-6,
            patch_size=(1, 2, 2),
            num_heads=heads,
            num_layers=blocks,
            has_image_input=False,
        ).eval()
    dit.load_state_dict(WanVideoDiTFromDiffusers(base.transformer(job).state_dict()), assign=True)
    dit.freqs = precompute_freqs_cis_3d(128)  # no buffer of it
    pipe: Any = WanVideoPipeline(device=str(job.device), torch_dtype=job.dtype)
    pipe.dit, pipe.scheduler = dit, _Schedule()
    pipe.vae = SimpleNamespace(  # decodes nothing
        model=SimpleNamespace(z_dim=16), upsampling_factor=8, decode=lambda latents, **_: latents
    )
    pipe.enable_usp()

    def call(frames: int, steps: int) -> None:
        text, noise = base.inputs(job, frames)
        pipe.generate_noise = lambda *_, **__: noise.to(job.dtype)
        for unit in pipe.units:
            if isinstance(unit, WanVideoUnit_PromptEmbedder):
                unit.process = lambda _, prompt, positive: {"context": text[0 if positive else 1]}
        pipe(
            height=job.height,
            width=job.width,
            num_frames=frames,
            num_inference_steps=steps,
            cfg_scale=base.GUIDANCE,
            sigma_shift=base.SHIFT,
            progress_bar_cmd=lambda steps: steps,
            output_type="floatpoint",
        )

    return base.Arm(pipe.scheduler, call, base.own_peak, lambda: {"attention": attention})


PEERS = {
    "ulysses": Peer(ulysses),
    "usp": Peer(usp, ("diffsynth.pipelines.wan_video",)),
    "xdit": Peer(xdit),
    "ring": Peer(ring),
}
