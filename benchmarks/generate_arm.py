"""What one process of an arm of generate.py measures, and the arms of one process: alone, and wanshim with its workers.

Weights are random and made on the device, from one seed: they are the same in every arm.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

MODELS = {
    "14B": (40, 40, 13824),
    "1.3B": (12, 30, 8960),
    "tiny": (4, 2, 64),
}  # heads, blocks, width of the feed-forward layers
GUIDANCE = 5.0
SHIFT = 5.0
WARM_FRAMES = 5


@dataclass(frozen=True)
class Job:
    """What generate.py asks of a process. `ranks`: over how many GPUs the arm goes."""

    arm: str
    model: str
    height: int
    width: int
    frames: int
    steps: int
    ranks: int
    rank: int
    folder: str

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32


@dataclass
class Arm:
    """A pipeline and how it is called.

    Args:
        scheduler: whose `step` the pipeline calls once a step.
        call: with numbers of frames and steps; returns the decoded frames, or None where the arm decodes nothing.
        peaks: bytes of each GPU that this process knows of, at the end of the denoising.
        facts: what else is known after the call, by name.
    """

    scheduler: Any
    call: Callable[[int, int], torch.Tensor | None]
    peaks: Callable[[], list[int]]
    facts: Callable[[], dict[str, Any]] = dict


class Clock:
    """When each step of a call ended, and the latents and memory then."""

    def __init__(self, arm: Arm) -> None:
        self._arm, self._step = arm, arm.scheduler.step
        self.ends: list[float] = []
        self._steps = 0
        self.latents: torch.Tensor | None = None
        self.peaks: list[int] = []
        arm.scheduler.step = self._timed_step

    def _timed_step(self, *args: Any, **kwargs: Any) -> Any:
        stepped = self._step(*args, **kwargs)
        synchronize()
        self.ends.append(time.perf_counter())
        self.latents = stepped if isinstance(stepped, torch.Tensor) else stepped[0]
        if len(self.ends) == self._steps:
            self.peaks = self._arm.peaks()
        return stepped

    def call(self, frames: int, steps: int) -> dict[str, Any]:
        """Seconds of a call: of each step, the first with what comes before it, and after the last."""
        self.ends, self._steps = [], steps
        synchronize()
        begun = time.perf_counter()
        decoded = self._arm.call(frames, steps)
        synchronize()
        ended = time.perf_counter()
        seconds = [end - start for start, end in zip([begun, *self.ends], self.ends)]
        found: dict[str, Any] = {"step_seconds": seconds, "after_s": ended - self.ends[-1], "call_s": ended - begun}
        if decoded is not None:
            found["frames_sha256"] = hashlib.sha256(decoded.float().cpu().numpy()).hexdigest()
        return found


def measure(job: Job, arm: Arm) -> dict[str, Any]:
    clock = Clock(arm)
    warm = clock.call(WARM_FRAMES, 1)
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = clock.call(job.frames, job.steps)
    latents, peaks = clock.latents, clock.peaks
    assert latents is not None
    if "frames_sha256" in found and job.arm != "alone":
        found["next_decode_s"] = clock.call(job.frames, 1)["after_s"]
    torch.save(latents.float().cpu(), Path(job.folder, f"{job.rank}.pt"))
    return {"first_call_s": warm["call_s"], **found, **arm.facts(), "peak_bytes": peaks, **versions()}


def versions() -> dict[str, Any]:
    import diffusers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"gpu": gpu, "torch": torch.__version__, "diffusers": diffusers.__version__}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def own_peak() -> list[int]:
    return [torch.cuda.max_memory_allocated()] if torch.cuda.is_available() else []


def inputs(job: Job, frames: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Embeddings of the prompt and of the negative one, (1, 512, 4096); noise, (1, 16, frames, height, width), fp32."""
    seeded = torch.Generator().manual_seed(1)
    text = [torch.randn(1, 512, 4096, generator=seeded).to(job.device, job.dtype) for _ in range(2)]
    shape = (1, 16, (frames - 1) // 4 + 1, job.height // 8, job.width // 8)
    return text, torch.randn(shape, generator=seeded).to(job.device)


def transformer(job: Job, cls: Any = None) -> Any:
    from diffusers import WanTransformer3DModel

    heads, blocks, ffn = MODELS[job.model]
    return made(job, cls or WanTransformer3DModel, num_attention_heads=heads, num_layers=blocks, ffn_dim=ffn)


def made(job: Job, cls: Any, **config: Any) -> Any:
    """A model with random weights, made on the device in its dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(job.dtype)
    try:
        with torch.device(job.device):
            torch.manual_seed(0)
            return cls(**config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def scheduler() -> Any:
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=SHIFT
    )


def pipeline(job: Job, model: Any) -> Any:
    from diffusers import AutoencoderKLWan, WanPipeline

    parts = {"transformer": model, "vae": made(job, AutoencoderKLWan), "scheduler": scheduler()}
    pipe = WanPipeline(tokenizer=None, text_encoder=None, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def caller(job: Job, pipe: Any, decode: bool) -> Callable[[int, int], torch.Tensor | None]:
    """How a pipeline of diffusers is called."""

    def call(frames: int, steps: int) -> torch.Tensor | None:
        (prompt, negative), noise = inputs(job, frames)
        made = pipe(
            prompt_embeds=prompt,
            negative_prompt_embeds=negative,
            latents=noise,
            height=job.height,
            width=job.width,
            num_frames=frames,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            output_type="pt" if decode else "latent",
        ).frames
        return made if decode else None

    return call


def alone(job: Job) -> Arm:
    pipe = pipeline(job, transformer(job))
    return Arm(pipe.scheduler, caller(job, pipe, decode=True), own_peak)


def strict_blocks(job: Job) -> Arm:
    """One GPU with wanshim, as `wanshim generate --gpus 1` has it."""
    import wanshim

    wanshim.activate("diffusers.strict_blocks")
    return alone(job)


def fast(job: Job) -> Arm:
    """One GPU with wanshim, as `wanshim generate --gpus 1 --fast` has it."""
    import wanshim

    os.environ.update(WANSHIM_GENERATE="1", WANSHIM_FAST="1")
    wanshim.activate()
    arm = alone(job)

    def facts() -> dict[str, Any]:
        names = "diffusers.fast_blocks", "diffusers.vae_decode"
        rows = {name: wanshim.report().row(name) for name in names}
        return {name: {"outcome": row.outcome, "notes": list(row.notes)} for name, row in rows.items()}

    return replace(arm, facts=facts)


def compiled(job: Job) -> Arm:
    """diffusers' own compilation of its blocks."""
    model = transformer(job)
    model.compile_repeated_blocks(fullgraph=True)
    pipe = pipeline(job, model)
    return Arm(pipe.scheduler, caller(job, pipe, decode=True), own_peak)


def torchao_float8(job: Job) -> Arm:
    """That, with torchao's float8 products, a scale for each row."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    model = transformer(job)
    quantize_(model.blocks, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    model.compile_repeated_blocks(fullgraph=True)
    pipe = pipeline(job, model)
    return Arm(pipe.scheduler, caller(job, pipe, decode=True), own_peak)


ON_ONE_GPU = {
    "alone": alone,
    "strict_blocks": strict_blocks,
    "fast": fast,
    "compiled": compiled,
    "torchao_float8": torchao_float8,
}


def shared(job: Job) -> Arm:
    """wanshim with its workers, as `wanshim generate` has it."""
    import wanshim

    wanshim.activate("diffusers.strict_blocks")
    pipe = pipeline(job, transformer(job))
    over = job.arm.split(",") if job.arm.startswith("cuda") else job.arm
    handle: Any = wanshim.parallelize_pipeline(pipe, over)
    measured = watched_workers()

    def peaks() -> list[int]:
        if job.device.type != "cuda":
            return []
        workers = handle._shared._workers
        calls = [workers.call(place, torch.cuda.max_memory_allocated) for place in range(len(workers.pids))]
        return own_peak() + [call.result() for call in calls]

    def facts() -> dict[str, Any]:
        plan = {"plan": str(handle.plan), "predicted_bytes": list(handle.plan.peaks.values())}
        return plan | measured()

    return Arm(pipe.scheduler, caller(job, pipe, decode=True), peaks, facts)


def watched_workers() -> Callable[[], dict[str, float]]:
    """Times wanshim's workers from now on. The result returns the seconds, nothing where none was needed."""
    from wanshim.core.workers import Workers

    starts, holds = timed(Workers, "start"), timed(Workers, "hold")

    def within(hold: Timed) -> float:
        return sum(start.seconds for start in starts if hold.begun <= start.begun <= hold.begun + hold.seconds)

    def measured() -> dict[str, float]:
        if not holds:
            return {}
        weights = sum(hold.seconds - within(hold) for hold in holds if hold.result)
        sent = sum(hold.result for hold in holds) / 1e9
        return {
            "start_s": sum(start.seconds for start in starts),
            "weights_s": weights,
            "weights_GB": sent,
            "weights_GB_per_s": sent / weights,
            "recheck_s": sum(hold.seconds for hold in holds if not hold.result),  # whether they are still the same
        }

    return measured


@dataclass(frozen=True)
class Timed:
    """A call: when it began, by `time.perf_counter`, and its seconds and result."""

    begun: float
    seconds: float
    result: Any


def timed(owner: Any, name: str) -> list[Timed]:
    """Each call of a method from now on; the GPU is waited for before it."""
    own, calls = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        synchronize()
        begun = time.perf_counter()
        result = own(*args, **kwargs)
        calls.append(Timed(begun, time.perf_counter() - begun, result))
        return result

    setattr(owner, name, call)
    return calls
