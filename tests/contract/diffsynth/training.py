"""LoRA training over tiny DiTs of the installed DiffSynth: jobs for `launch_training_task`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from diffsynth.diffusion import DiffusionTrainingModule, FlowMatchSFTLoss, ModelLogger
from diffsynth.diffusion.flow_match import FlowMatchScheduler
from diffsynth.pipelines.wan_video import model_fn_wan_video

from tests.contract.diffsynth import wan

FEATURE = "diffsynth.model_split"
BFLOAT16 = torch.bfloat16
Inputs = Callable[[int], dict[str, Any]]  # a sample's number -> what its forward takes
WAN_INPUTS: Inputs = partial(wan.inputs, "t2v", dtype=BFLOAT16)


class Pipe(torch.nn.Module):
    """What the loss asks of a pipeline, around a tiny DiT; the text encoder and VAE have done their work."""

    in_iteration_models = ("dit",)

    def __init__(
        self, dit: Any, model_fn: Callable[..., Any], template: str = "Wan", device: str = "cpu", **shift: Any
    ) -> None:
        super().__init__()
        self.dit = dit
        self.model_fn = model_fn
        self.scheduler = FlowMatchScheduler(template)
        self.scheduler.set_timesteps(1000, training=True, **shift)
        self.device, self.torch_dtype = torch.device(device), next(dit.parameters()).dtype


def wan_pipe(device: str = "cpu", dtype: torch.dtype = BFLOAT16, **sizes: int) -> Pipe:
    """Args: sizes: `layers` and `heads` of the DiT."""
    return Pipe(wan.lora_model(dtype=dtype, **sizes), model_fn_wan_video, device=device)


class Training(DiffusionTrainingModule):
    """Args: fault: the forward that runs out of memory; own_draws: noise and timestep follow from the sample's
    number, whichever process draws them."""

    def __init__(
        self,
        fault: int | None = None,
        own_draws: bool = False,
        pipe: Pipe | None = None,
        inputs: Inputs = WAN_INPUTS,
    ) -> None:
        super().__init__()
        self.pipe = pipe or wan_pipe()
        self.inputs = inputs
        self.seen: list[int] = []
        self.fault = fault
        self.own_draws = own_draws
        self.use_gradient_checkpointing = True  # as in DiffSynth's training scripts
        self.use_gradient_checkpointing_offload = False

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        number = (inputs or data)["number"]
        faulty = len(self.seen) == self.fault
        self.seen.append(number)
        made = self.inputs(number)
        sample = {k: self._place(v) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
        del sample["timestep"]
        latents = sample.pop("latents")
        if self.own_draws:
            torch.manual_seed(number)
        checkpointing = {
            "use_gradient_checkpointing": self.use_gradient_checkpointing,
            "use_gradient_checkpointing_offload": self.use_gradient_checkpointing_offload,
        }
        loss = FlowMatchSFTLoss(self.pipe, input_latents=latents, **sample, **checkpointing)
        if faulty:
            raise torch.OutOfMemoryError("no room for this one")
        return loss

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the pipe's device, and in its dtype unless it counts something."""
        return tensor.to(self.pipe.device, self.pipe.torch_dtype if tensor.is_floating_point() else None)

    def trainable_modules(self) -> Any:
        return [p for p in self.parameters() if p.requires_grad]

    def export_trainable_state_dict(self, state_dict: dict[str, Any], remove_prefix: str | None = None) -> Any:
        return {name: tensor for name, tensor in state_dict.items() if "lora" in name}


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    load_from_cache = False

    def __init__(self, count: int = 7) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "noise": torch.rand(())}  # a draw of the caller's between forwards


class Logger(ModelLogger):
    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.lines: list[tuple[int, float | None]] = []

    def on_step_end(self, accelerator: Any, model: Any, save_steps: Any = None, **kwargs: Any) -> None:
        super().on_step_end(accelerator, model, save_steps, **{k: v for k, v in kwargs.items() if k != "loss"})
        self.lines.append((self.num_steps, kwargs["loss"].item() if "loss" in kwargs else None))


def train(folder: Path, accumulation: int, fault: int | None = None) -> tuple[dict[str, bytes], Any, Training]:
    """Two epochs with a checkpoint every second micro-batch: the files, what was logged, the module."""
    from diffsynth.diffusion import runner

    torch.manual_seed(11)
    module, logger = Training(fault), Logger(folder)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    runner.launch_training_task(
        accelerator, Samples(), module, logger, learning_rate=1e-2, num_workers=0, save_steps=2, num_epochs=2
    )
    assert not {"prepare", "backward", "save"} & vars(accelerator).keys()
    assert "on_step_end" not in vars(logger)
    assert "forward" not in vars(module)
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()}
    return files, (logger.lines, module.seen, torch.rand(())), module


@cache
def unsplit(accumulation: int) -> tuple[dict[str, bytes], Any]:
    """The files and what was logged of DiffSynth's own run, before wanshim is active."""
    with TemporaryDirectory() as folder:
        return train(Path(folder), accumulation)[:2]
