"""MiniMax-H3 of the installed DiffSynth, tiny: its DiT, its pipeline, and samples as its data processing keeps them.

Releases before 2.1.0 have none, and its pipeline imports torchaudio.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffsynth.diffusion import DiffusionTrainingModule
from diffsynth.diffusion.loss import FlowMatchSFTMiniMaxH3AudioVideoLoss
from diffsynth.models.minimax_h3_audio_vae import MiniMaxH3AudioVAE
from diffsynth.models.minimax_h3_controlnet import MiniMaxH3ControlNet
from diffsynth.models.minimax_h3_dit import MiniMaxH3DiT
from diffsynth.models.minimax_h3_video_vae import MiniMaxH3VideoVAE
from diffsynth.pipelines.minimax_h3_audio_video import MiniMaxH3Pipeline
from peft import LoraConfig, inject_adapter_in_model

WIDTHS: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "ffn_hidden_size": 64,
    "time_embed_dim": 24,
    "adaln_out_features": 6 * 48 * 3,
}
TINY: dict[str, Any] = {
    **WIDTHS,
    "num_layers": 4,
    "token_refiner_num_layers": 1,
    "text_dim": 32,
    "timestep_input_dim": 16,
    "time_embed_hidden_size": 24,
    "final_adaln_out_features": 2 * 48,
    "rope_inv_freq_len": 2,
}
CONTROL = {**WIDTHS, "control_layers": (0, 2)}
TARGETS = ["qkv_proj", "out_proj", "fc1", "fc2"]
SIZE = {"num_frames": 22, "height": 64, "width": 96}  # 42 tokens of video, 74 of audio


def lora_model(dtype: torch.dtype = torch.bfloat16, kind: type[MiniMaxH3DiT] = MiniMaxH3DiT) -> MiniMaxH3DiT:
    """A frozen tiny DiT with LoRA whose B matrices are not zero, so that every gradient is real."""
    torch.manual_seed(0)
    model = kind(**TINY)
    for buffer in model.buffers():
        torch.nn.init.normal_(buffer)
    model = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS), model.requires_grad_(False))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


def control_net(dtype: torch.dtype = torch.bfloat16) -> MiniMaxH3ControlNet:
    torch.manual_seed(4)
    return MiniMaxH3ControlNet(**CONTROL).to(dtype).requires_grad_(False)


def pipe_of(dit: Any, **parts: Any) -> MiniMaxH3Pipeline:
    """The pipeline as a training script has it after loading, on the CPU."""
    pipe = MiniMaxH3Pipeline(device="cpu", torch_dtype=next(dit.parameters()).dtype)
    pipe.dit = dit
    for name, part in parts.items():
        setattr(pipe, name, part)
    for scheduler in (pipe.scheduler, pipe.scheduler_audio):
        scheduler.set_timesteps(1000, training=True)
    return pipe


class Latents(torch.nn.Module):
    """In place of both VAEs, whose decode is no forward that is shared: latents of 8 bits hide differences."""

    def decode_video(self, latents: torch.Tensor, **_: Any) -> torch.Tensor:
        return latents

    decode_audio = decode_video


def generating_pipe(kind: type[MiniMaxH3DiT] = MiniMaxH3DiT, **parts: Any) -> MiniMaxH3Pipeline:
    """The pipeline as a script has it that generates latents."""
    torch.manual_seed(0)
    dit = kind(**TINY).requires_grad_(False).eval()
    for buffer in dit.buffers():
        torch.nn.init.normal_(buffer)
    pipe = pipe_of(dit, video_vae=Latents(), audio_vae=Latents(), **parts)
    pipe.vae_output_to_video = pipe.output_audio_format_check = lambda latents, **_: latents
    return pipe


def generate(pipe: MiniMaxH3Pipeline, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of video and audio, of three steps."""
    return pipe(**arguments(**changed))  # type: ignore[no-any-return]


def arguments(**changed: Any) -> dict[str, Any]:
    text = torch.randn((7, 32), generator=torch.Generator().manual_seed(1))
    return {**SIZE, "num_inference_steps": 3, "seed": 1, "text_embedding": text, "negative_prompt": None, **changed}


def cached(
    number: int, pipe: MiniMaxH3Pipeline, text: int = 5, references: int = 0, **size: int
) -> tuple[dict[str, Any], ...]:
    """A sample that `--task sft:data_process` has made: latents, prompt, images for reference, and how they are
    packed."""
    given = SIZE | size
    generator = torch.Generator().manual_seed(number)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(pipe.torch_dtype)

    frames = (given["num_frames"] - 5) // 17 * 5 + 2
    latents = noise(1, 24, frames, given["height"] // 16, given["width"] // 16)
    audio = noise(2, 32, round(given["num_frames"] / 24 * 40))
    shared: dict[str, Any] = {
        **given,
        "cfg_scale": 1,
        "video_latents": latents,
        "audio_latents": audio,
        "text_embedding": noise(text, 32),
    }
    kept = dict(given)
    if references:  # as the unit before has encoded them
        image = {"kind": "image", "latent_t": 1, "latent_h": 4, "latent_w": 6, "ref_audio_t": 0}
        shared |= {"ref_blocks": [image] * references, "ref_visual_anchor": noise(6 * references, 96)}
        kept["ref_visual_anchor"] = shared["ref_visual_anchor"]
    inputs: Any = (shared, {"prompt": None}, {})
    for unit in pipe.units[-4:-1]:  # of references, prompts and packing
        inputs = pipe.unit_runner(unit, pipe, *inputs)
    return {**kept, "cfg_scale": 1, "input_latents": latents, "audio_input_latents": audio}, *inputs[1:]


class Training(DiffusionTrainingModule):
    """DiffSynth's training module of H3, over samples that are cached.

    Args:
        cfg_scale: of the guidance that the loss takes out of what the model predicts.
        sizes: of some samples, by number.
        control: the control net's rows are among the inputs.
    """

    def __init__(
        self,
        pipe: MiniMaxH3Pipeline | None = None,
        *,
        cfg_scale: float = 1.0,
        sizes: dict[int, dict[str, int]] | None = None,
        control: bool = False,
    ) -> None:
        super().__init__()
        self.pipe = pipe or pipe_of(lora_model())
        self.cfg_scale, self.sizes, self.control = cfg_scale, sizes or {}, control
        self.seen: list[int] = []
        self.losses: list[torch.Tensor] = []
        self.use_gradient_checkpointing = True
        self.use_gradient_checkpointing_offload = False
        self.units = MiniMaxH3Pipeline(device="cpu", torch_dtype=self.pipe.torch_dtype)  # that have made the samples

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        number = (inputs or data)["number"]
        self.seen.append(number)
        shared, positive, _ = self.transfer_data_to_device(
            cached(number, self.units, **self.sizes.get(number, {})), self.pipe.device, self.pipe.torch_dtype
        )
        shared |= {
            "use_gradient_checkpointing": self.use_gradient_checkpointing,
            "use_gradient_checkpointing_offload": self.use_gradient_checkpointing_offload,
        }
        if self.control:
            rows = shared["input_latents"].shape[2] * shared["height"] * shared["width"] // 1024
            draws = torch.Generator().manual_seed(number)
            shared["control_rows"] = torch.randn((rows, 196), generator=draws).to(self.pipe.torch_dtype)
        loss = FlowMatchSFTMiniMaxH3AudioVideoLoss(
            self.pipe, training_cfg_scale=self.cfg_scale, inputs_nega=dict(positive), **shared, **positive
        )
        self.losses.append(loss.detach().clone())
        return loss

    def trainable_modules(self) -> Any:
        return [p for p in self.parameters() if p.requires_grad]

    def export_trainable_state_dict(self, state_dict: dict[str, Any], remove_prefix: str | None = None) -> Any:
        return {name: tensor for name, tensor in state_dict.items() if "lora" in name}


def step(module: Training, samples: tuple[int, ...] = (1, 2)) -> list[torch.Tensor]:
    """The losses of accumulated micro-batches, then every gradient in order of name, on the host."""
    module.train()
    for number in samples:
        torch.manual_seed(100 + number)
        module({"number": number}).backward()
    trained = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    assert trained
    assert all(gradient is not None and bool(gradient.any()) for gradient in trained.values())
    return [*(loss.cpu() for loss in module.losses), *(trained[name].cpu() for name in sorted(trained))]


# --- a checkpoint in DiffSynth's own file layout


def tiny_video_vae() -> MiniMaxH3VideoVAE:
    """The VAE with a narrow encoder and a decoder of one block."""
    from diffsynth.models import minimax_h3_video_vae as code

    own = code.ViT3DDecoder
    code.ViT3DDecoder = lambda **given: own(**given | {"heads": 1, "dim_head": 48, "num_layers": 1})
    try:
        return MiniMaxH3VideoVAE(ch=32, ch_mult=(1, 1, 1, 1, 1, 1), num_res_blocks=1)
    finally:
        code.ViT3DDecoder = own


def tiny_audio_vae() -> MiniMaxH3AudioVAE:
    """The VAE with a narrow encoder."""
    from diffsynth.models import minimax_h3_audio_vae as code

    own = code.BigVGAN
    code.BigVGAN = torch.nn.Identity  # a waveform is not made here
    try:
        return MiniMaxH3AudioVAE(encoder_dim=8)
    finally:
        code.BigVGAN = own


@dataclass(frozen=True)
class CheckpointFiles:
    folder: Path

    @property
    def models(self) -> list[Path]:
        return [self.folder / f"{name}.safetensors" for name in ("dit", "video_vae", "audio_vae")]


_MADE = (
    ("dit", "diffsynth.models.minimax_h3_dit.MiniMaxH3DiT", partial(MiniMaxH3DiT, **TINY), TINY),
    ("video_vae", f"{__name__}.tiny_video_vae", tiny_video_vae, {}),
    ("audio_vae", f"{__name__}.tiny_audio_vae", tiny_audio_vae, {}),
)


def write(folder: Path) -> CheckpointFiles:
    """DiT and VAEs, random and reproducible."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for name, _, make, _ in _MADE:
        made = {key: _random(key, tensor).to(torch.bfloat16) for key, tensor in make().state_dict().items()}
        save_file(made, folder / f"{name}.safetensors")
    return CheckpointFiles(folder)


def _random(name: str, like: torch.Tensor) -> torch.Tensor:
    """Gains near one, small biases, and matrices that keep the size of what they multiply."""
    noise = torch.randn(like.shape)
    if like.dim() < 2 or like.numel() == max(like.shape):
        return float(name.endswith("weight")) + 0.02 * noise
    return noise * float(like[0].numel()) ** -0.5


def register(files: CheckpointFiles) -> None:
    """Teach DiffSynth the hashes of these files. Registering twice changes nothing."""
    from diffsynth.configs.model_configs import MODEL_CONFIGS
    from diffsynth.core.loader import hash_model_file

    known = {config["model_hash"] for config in MODEL_CONFIGS}
    for path, (name, model_class, _, kwargs) in zip(files.models, _MADE, strict=True):
        digest = hash_model_file(str(path))
        if digest not in known:
            MODEL_CONFIGS.append(
                {
                    "model_hash": digest,
                    "model_name": f"minimax_h3_{name}",
                    "model_class": model_class,
                    "extra_kwargs": kwargs,
                }
            )
