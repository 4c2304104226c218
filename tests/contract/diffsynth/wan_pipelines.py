"""Tiny random pipelines that `diffsynth.generate` serves, and one call of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.contract.diffsynth import variants
from tests.contract.diffsynth.vae import make_vae

SIZE = variants.Size(
    {"dim": 60, "ffn_dim": 64, "text_dim": 32, "freq_dim": 16, "num_heads": 5, "num_layers": 2}, (2, 8, 8), (0, 1), 5
)
SIXTEENS = variants.Size(  # widths that eight-bit products need
    {"dim": 48, "ffn_dim": 64, "text_dim": 32, "freq_dim": 16, "num_heads": 2, "num_layers": 2}, (2, 8, 8), (0, 1), 5
)


class Tokenizer:
    """In place of one that is loaded: a number for each character."""

    def __call__(self, text: str, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(1, 8, dtype=torch.long)
        ids[0, : len(text[:8])] = torch.tensor([ord(letter) % 64 for letter in text[:8]])
        return ids, (ids > 0).long()


class ImageEncoder(torch.nn.Module):
    """In place of a CLIP of 32 layers, whose class has no sizes to set."""

    def encode_image(self, images: list[torch.Tensor]) -> torch.Tensor:
        return images[0].mean() * torch.ones(1, 257, 1280, dtype=images[0].dtype)


def _made(**models: Any) -> Any:
    from diffsynth.models.wan_video_text_encoder import WanTextEncoder
    from diffsynth.pipelines.wan_video import WanVideoPipeline

    pipe = WanVideoPipeline(device="cpu", torch_dtype=torch.float32)
    pipe.tokenizer = Tokenizer()
    pipe.text_encoder = WanTextEncoder(
        vocab=64, dim=32, dim_attn=32, dim_ffn=32, num_heads=2, num_layers=1, dropout=0.0
    )
    pipe.vae = make_vae("2.1", torch.float32)
    for name, model in models.items():
        setattr(pipe, name, model)
    for parameter in pipe.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    pipe.vae_output_to_video = _as_it_is  # pictures of 8 bits hide differences
    return pipe.eval().requires_grad_(False)


def _as_it_is(video: torch.Tensor) -> torch.Tensor:
    return video


def _of(name: str, **more: Any) -> Any:
    """A pipeline with the models of a variant."""
    torch.manual_seed(0)
    return _made(**variants.MAKERS[name](SIZE).modules(), **more)


def pair() -> Any:
    torch.manual_seed(0)
    return _made(dit=variants._dit(SIZE), dit2=variants._dit(SIZE))


def i2v() -> Any:
    return _of("i2v", image_encoder=ImageEncoder())


def _fun() -> Any:
    torch.manual_seed(0)
    dit = variants._dit(SIZE, 52, has_image_input=True, has_ref_conv=True)
    return _made(dit=dit, image_encoder=ImageEncoder())


def _camera() -> Any:
    torch.manual_seed(0)
    dit = variants._dit(SIZE, 36, add_control_adapter=True, require_clip_embedding=False)
    return _made(dit=dit)


MADE: dict[str, Callable[[], Any]] = {
    "t2v": lambda: _of("t2v"),
    "i2v": i2v,
    "fun": _fun,
    "camera": _camera,
    "motion": lambda: _of("motion-controller"),
    "vace": lambda: _of("vace"),
    "pair": pair,
}


def _picture(seed: int) -> Any:
    from PIL import Image

    noise = torch.randint(0, 256, (32, 32, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.to(torch.uint8).numpy())


def arguments(kind: str) -> dict[str, Any]:
    """What a call of that pipeline needs beyond `generate`'s."""
    clip = [_picture(seed) for seed in range(5)]
    return {
        "i2v": {"input_image": clip[0]},
        "fun": {"control_video": clip, "reference_image": clip[0]},
        "camera": {"input_image": clip[0], "camera_control_direction": "Left"},
        "motion": {"motion_bucket_id": 40},
        "vace": {"vace_video": clip, "vace_reference_image": clip[0]},
    }.get(kind, {})


def generate(pipe: Any, kind: str, **changed: Any) -> torch.Tensor:
    """Frames (1, 3, f, 32, 32) of three guided steps; those of a pair use both DiTs."""
    call = {
        "prompt": "a street",
        "negative_prompt": "blur",
        "seed": 0,
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 3,
        "cfg_scale": 5.0,
        "tiled": False,
        "progress_bar_cmd": lambda steps: steps,
        **arguments(kind),
        **changed,
    }
    frames = pipe(**call)
    assert isinstance(frames, torch.Tensor)
    return frames
