"""`wanshim warm`: what the first calls of a VAE learn and compile on this GPU, ahead of time.

A VAE of the real size, with random weights, decodes and encodes random values: the engines that are fastest do not
depend on values. They are kept where every later process looks them up (`core/decoding/operators/engine_store.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.core.shared import gpus
from wanshim.doctor.known_engines import known_engines
from wanshim.errors import WanshimError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

CALLS = 2  # the first learns and compares, the second compiles what was found equal
MODES, DTYPES = ("strict", "fast"), ("bfloat16", "float16")
NO_GPU = "a machine with an NVIDIA GPU: engines of cuDNN are timed on the GPU that uses them"
LOG = logging.getLogger("wanshim.decoding")


@dataclass(frozen=True)
class Layout:
    """A VAE of Wan's.

    Args:
        channels: of its latents.
        factor: pixels a latent row or column; four frames follow the first in each latent frame.
        config: of diffusers' class, where it is not the default.
        diffsynth: DiffSynth's class.
    """

    channels: int
    factor: int
    config: dict[str, Any]
    diffsynth: str


LAYOUTS = {
    "2.1": Layout(16, 8, {}, "WanVideoVAE"),
    "2.2": Layout(
        48,
        16,
        {
            "base_dim": 160,
            "decoder_base_dim": 256,
            "z_dim": 48,
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
            "scale_factor_spatial": 16,
            "latents_mean": [0.0] * 48,
            "latents_std": [1.0] * 48,
        },
        "WanVideoVAE38",
    ),
}


def warm(*, size: str, vae: str, mode: str | None, dtype: str, decode: bool | None, console: Console) -> None:
    """Learn what `size` needs, with a progress bar.

    Args:
        size: height, width and frames of a video, such as 704x1280x81.
        vae: one of LAYOUTS.
        mode: one of MODES; None: both.
        dtype: one of DTYPES.
        decode: whether to decode, and not to encode; None: both.

    Raises:
        WanshimError: a bad value, no GPU, no framework that has the VAE, or nothing that could be learned or kept.
    """
    _one_of("--vae", vae, LAYOUTS)
    _one_of("--dtype", dtype, DTYPES)
    if mode is not None:
        _one_of("--mode", mode, MODES)
    verbs = ("decode", "encode") if decode is None else ("decode",) if decode else ("encode",)
    shapes = shapes_of(size, LAYOUTS[vae])
    if gpus.in_sight(settings.visible_gpus()) == 0:
        raise WanshimError("no GPU is in sight", expected=NO_GPU)
    import torch

    if not torch.cuda.is_available():
        hint = "Check torch.version.cuda and nvidia-smi"
        raise WanshimError("torch finds no CUDA device", expected=NO_GPU, hint=hint)
    device = torch.device("cuda", torch.cuda.current_device())
    _check_that_engines_can_be_kept(device)
    model = make_vae(vae, device, getattr(torch, dtype))
    learn(model, {verb: shapes[verb] for verb in verbs}, MODES if mode is None else (mode,), console)
    for known in known_engines():
        console.print(str(known), highlight=False, soft_wrap=True)


def _one_of(option: str, value: str, known: Any) -> None:
    if value not in known:
        raise WanshimError(f"{option} {value}", expected=f"one of {', '.join(known)}")


def shapes_of(size: str, layout: Layout) -> dict[str, tuple[int, ...]]:
    """The shapes of latents [1, Z, t, h, w] to decode and videos [1, 3, T, H, W] to encode, of a size."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", size)
    height, width, frames = map(int, found.groups()) if found else (0, 0, 0)
    if not found or height % layout.factor or width % layout.factor or frames % 4 != 1:
        raise WanshimError(
            f"--size {size}",
            expected=f"height x width x frames such as 704x1280x81: multiples of {layout.factor}, and 4n + 1 frames",
        )
    latent = (1, layout.channels, (frames - 1) // 4 + 1, height // layout.factor, width // layout.factor)
    return {"decode": latent, "encode": (1, 3, frames, height, width)}


def _check_that_engines_can_be_kept(device: torch.device) -> None:
    from wanshim.core.decoding.operators.cudnn_graph import Frontend, FrontendMissing
    from wanshim.core.shared.files import engine_folder

    try:
        Frontend(device)
    except FrontendMissing as reason:
        raise WanshimError(
            f"no engine of cuDNN can be timed: {reason}", hint="pip install 'wanshim[cudnn]'"
        ) from reason
    if engine_folder() is None:
        raise WanshimError("this user has no home folder, where engines would be kept", hint="Set HOME")


def make_vae(layout: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The framework's own class with random weights: diffusers', or else DiffSynth's.

    Raises:
        WanshimError: neither is installed, or diffusers' release has no such VAE.
    """
    import torch

    made = LAYOUTS[layout]
    with torch.device(device):
        if find_spec("diffusers") is not None:
            import diffusers

            try:
                vae = diffusers.AutoencoderKLWan(**made.config)
            except (AttributeError, TypeError) as error:
                raise WanshimError(f"diffusers {diffusers.__version__} has no Wan {layout} VAE") from error
        elif find_spec("diffsynth") is not None:
            from diffsynth.models import wan_video_vae

            vae = getattr(wan_video_vae, made.diffsynth)()
        else:
            raise WanshimError(
                "neither diffusers nor DiffSynth-Studio is installed", hint="Run it in your framework's environment"
            )
    return vae.eval().requires_grad_(False).to(dtype)


def learn(vae: Any, shapes: Mapping[str, tuple[int, ...]], modes: Sequence[str], console: Console) -> None:
    """Call each verb with each mode on random values of its shape, until nothing is left to be learned."""
    import torch

    from wanshim.core.decoding import ParallelVae, VaeFallback, VaeOptions, find_binding

    parameter = next(vae.parameters())
    with _bar(console, len(shapes) * len(modes) * CALLS) as advance:
        for verb, shape in shapes.items():
            graph = find_binding(vae, verb).graph
            given = torch.randn(shape, device="cpu").clamp_(-1, 1).to(parameter.device, parameter.dtype)
            for mode in modes:
                options = VaeOptions(strict=mode == "strict")
                ahead = ParallelVae(graph, None, options).operators
                for size in (given.shape, None):  # and usual sizes
                    ahead.wait_for_kernels(size)
                parallel = ParallelVae(graph, None, options, learning=None)
                try:
                    for _ in range(CALLS):
                        parallel(given)
                        advance(f"{verb}, {mode}")
                except VaeFallback as reason:
                    console.print(f"{verb}, {mode}: {reason}", highlight=False, soft_wrap=True)
                finally:
                    parallel.release()


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar over the calls; beside it what the search for engines logs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)

        class Shown(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                progress.update(task, description=record.getMessage())

        handler, level, propagate = Shown(logging.INFO), LOG.level, LOG.propagate
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
        LOG.propagate = False  # the notice that timing takes long is for a call that is waited for
        try:
            yield lambda description: progress.update(task, advance=1, description=description)
        finally:
            LOG.removeHandler(handler)
            LOG.setLevel(level)
            LOG.propagate = propagate
