"""Every Wan variant that DiffSynth trains, tiny or of full width, with what its forward takes."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffsynth.models import wan_video_animate_adapter as animate
from diffsynth.models.wan_video_dit import WanModel
from diffsynth.models.wan_video_dit_s2v import WanS2VModel
from diffsynth.models.wan_video_mot import MotWanModel
from diffsynth.models.wan_video_motion_controller import WanMotionControllerModel
from diffsynth.models.wan_video_vace import VaceWanModel
from diffsynth.pipelines.wan_video import model_fn_wan_video

from tests.contract.diffsynth.copies import built_once


@dataclass
class Size:
    """A DiT's widths and a video's latent shape; `layers` are those that a side model works with."""

    dit: dict[str, int]
    latent: tuple[int, int, int]
    layers: tuple[int, ...]
    text: int


TINY = Size(
    {"dim": 48, "ffn_dim": 64, "text_dim": 32, "freq_dim": 16, "num_heads": 2, "num_layers": 7},
    (3, 8, 8),
    (0, 2, 4, 6),
    5,
)
# Of 40 blocks 12, three a stage of four.
FULL_WIDTH = Size(
    {"dim": 5120, "ffn_dim": 13824, "text_dim": 4096, "freq_dim": 256, "num_heads": 40, "num_layers": 12},
    (13, 60, 104),
    tuple(range(0, 12, 2)),
    512,
)


@dataclass
class Variant:
    """Like a pipeline: `dit` and the models beside it; and what one forward takes."""

    dit: torch.nn.Module
    inputs: dict[str, Any]
    beside: dict[str, torch.nn.Module] = field(default_factory=dict)

    @property
    def pipe(self) -> SimpleNamespace:
        return SimpleNamespace(dit=self.dit, **self.beside)

    def modules(self) -> dict[str, torch.nn.Module]:
        return {"dit": self.dit, **self.beside}

    def __call__(self, **options: Any) -> torch.Tensor:
        known = inspect.signature(model_fn_wan_video).parameters
        kwargs = {name: value for name, value in {**self.beside, **self.inputs, **options}.items() if name in known}
        return model_fn_wan_video(self.dit, **kwargs)


def _dit(size: Size, in_dim: int = 16, **kwargs: Any) -> WanModel:
    missing = kwargs.keys() - inspect.signature(WanModel).parameters.keys()
    if missing:
        pytest.skip(f"this DiffSynth's WanModel has no {', '.join(sorted(missing))}")
    kwargs = {"has_image_input": False, **kwargs}
    return WanModel(in_dim=in_dim, out_dim=16, eps=1e-6, patch_size=(1, 2, 2), **size.dit, **kwargs)


def _common(size: Size) -> dict[str, Any]:
    return {
        "latents": torch.randn(1, 16, *size.latent),
        "timestep": torch.full((1,), 500.0),
        "context": torch.randn(1, size.text, size.dit["text_dim"]),
    }


def _image(size: Size) -> dict[str, Any]:
    return {"y": torch.randn(1, 20, *size.latent), "clip_feature": torch.randn(1, 257, 1280)}


def t2v(size: Size) -> Variant:
    return Variant(_dit(size), _common(size))


def i2v(size: Size) -> Variant:
    return Variant(_dit(size, 36, has_image_input=True), {**_common(size), **_image(size)})


def ti2v_5b(size: Size) -> Variant:
    dit = _dit(size, seperated_timestep=True, require_clip_embedding=False, fuse_vae_embedding_in_latents=True)
    return Variant(dit, {**_common(size), "fuse_vae_embedding_in_latents": True})


def fun_control(size: Size) -> Variant:
    dit = _dit(size, 36, has_image_input=True, has_ref_conv=True)
    reference = torch.randn(1, 16, 1, *size.latent[1:])
    return Variant(dit, {**_common(size), **_image(size), "reference_latents": reference})


def camera(size: Size) -> Variant:
    frames, height, width = size.latent
    camera = torch.randn(1, 24, frames, height * 8, width * 8)
    return Variant(_dit(size, add_control_adapter=True), {**_common(size), "control_camera_latents_input": camera})


def motion_controller(size: Size) -> Variant:
    beside = {"motion_controller": WanMotionControllerModel(size.dit["freq_dim"], size.dit["dim"])}
    return Variant(_dit(size), {**_common(size), "motion_bucket_id": torch.full((1,), 40.0)}, beside)


def vace(size: Size) -> Variant:
    widths = {name: size.dit[name] for name in ("dim", "num_heads", "ffn_dim")}
    model = VaceWanModel(vace_layers=size.layers, vace_in_dim=96, **widths)
    context = torch.randn(1, 96, *size.latent)
    return Variant(_dit(size), {**_common(size), "vace_context": context, "vace_scale": 1.0}, {"vace": model})


class AnimateAdapter(animate.WanAnimateAdapter):
    """At any width. The motion encoder looks at faces of 512 pixels whatever the width: a linear stands for it."""

    def __init__(self, dim: int, heads: int, layers: int) -> None:
        torch.nn.Module.__init__(self)
        self.pose_patch_embedding = torch.nn.Conv3d(16, dim, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.motion_encoder = torch.nn.Linear(12, 512)
        self.motion_encoder.get_motion = lambda img: self.motion_encoder(img.flatten(1))
        self.face_adapter = animate.FaceAdapter(heads_num=heads, hidden_dim=dim, num_adapter_layers=layers)
        self.face_encoder = animate.FaceEncoder(in_dim=512, hidden_dim=dim, num_heads=1)


def animate_(size: Size) -> Variant:
    frames, height, width = size.latent
    layers = -(-size.dit["num_layers"] // 5)
    adapter = AnimateAdapter(size.dit["dim"], size.dit["num_heads"], layers)
    pose = torch.randn(1, 16, frames - 1, height, width)
    faces = torch.randn(1, 3, 4 * (frames - 1), 2, 2)
    inputs = {**_common(size), **_image(size), "pose_latents": pose, "face_pixel_values": faces}
    return Variant(_dit(size, 36, has_image_input=True), inputs, {"animate_adapter": adapter})


def wantodance(size: Size) -> Variant:
    if "device='cuda'" in inspect.getsource(WanModel) and not torch.cuda.is_available():
        pytest.skip("this DiffSynth builds WanToDance on a CUDA device, and there is none")
    dit = _dit(
        size,
        wantodance_enable_music_inject=True,
        wantodance_music_inject_layers=list(size.layers),
        wantodance_enable_refimage=True,
        wantodance_enable_global=True,
        wantodance_enable_unimodel=True,
    )
    music = {"music_feature": torch.randn(40, 35), "wantodance_refimage_feature": torch.randn(1, 257, 1280)}
    return Variant(dit, {**_common(size), **music, "wantodance_fps": 15.0})


def s2v(size: Size) -> Variant:
    dit = WanS2VModel(
        in_dim=16, out_dim=16, eps=1e-6, patch_size=(1, 2, 2), cond_dim=16, audio_dim=32, num_audio_token=4,
        audio_inject_layers=list(size.layers), **size.dit,
    )  # fmt: skip
    frames, height, width = size.latent
    sound = torch.randn(1, 25, 32, 4 * (frames - 1))
    motion = torch.randn(1, 16, 19, height, width)
    return Variant(dit, {**_common(size), "audio_embeds": sound, "motion_latents": motion, "drop_motion_frames": True})


def vap(size: Size) -> Variant:
    widths = {name: value for name, value in size.dit.items() if name != "num_layers"}
    model = MotWanModel(mot_layers=size.layers, in_dim=36, **widths)
    inputs = {
        "vap_hidden_state": torch.randn(1, 36, *size.latent),
        "context_vap": torch.randn(1, size.text, size.dit["text_dim"]),
        "vap_clip_feature": torch.randn(1, 257, 1280),
    }
    dit = _dit(size, 36, has_image_input=True)
    return Variant(dit, {**_common(size), **_image(size), **inputs}, {"vap": model})


MAKERS = {
    "t2v": t2v,
    "i2v": i2v,
    "ti2v-5b": ti2v_5b,
    "fun-control": fun_control,
    "camera": camera,
    "motion-controller": motion_controller,
    "vace": vace,
    "animate": animate_,
    "wantodance": wantodance,
    "s2v": s2v,
    "vap": vap,
}


@built_once
def tiny(name: str, device: str = "cpu") -> Variant:
    """The variant with random weights that are all in use: nothing starts at zero."""
    torch.manual_seed(0)
    made = MAKERS[name](TINY)
    for module in made.modules().values():
        for parameter in module.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=1 / math.sqrt(max(parameter.shape[-1], 1)))
        module.to(device).train()
    made.inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.inputs.items()}
    return made


def split(made: Variant, devices: list[str], split_at: list[int] | None = None) -> Any:
    """Split as the feature splits it."""
    from wanshim.adapters.diffsynth.splitting.wan import FAMILY

    return FAMILY.split(made.pipe, tuple(devices), split_at)
