"""FLUX.2's double and single blocks, split with the core that splits Wan: the same numbers, the same files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import ModelLogger
from diffsynth.pipelines.flux2_image import model_fn_flux2
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import wanshim
from tests.contract.diffsynth import flux2
from tests.contract.diffsynth.stages import ON_CPU_AND_GPU, stage_devices
from tests.contract.diffsynth.training import FEATURE, Pipe, Samples, Training
from tests.contract.diffsynth.variant_steps import move_fake
from wanshim.adapters.diffsynth.splitting.flux2 import FAMILY
from wanshim.core.model_split import split as placement
from wanshim.core.model_split import split_of


@cache
def unsplit_step(device: str, dtype: torch.dtype, checkpointing: bool) -> list[torch.Tensor]:
    model = flux2.lora_model(device=device, dtype=dtype)
    return flux2.train_step(model, device, dtype, use_gradient_checkpointing=checkpointing)


POINTS = (None, (3,), (1, 5), (2, 3, 6))


@pytest.mark.usefixtures("deterministic_kernels")
@ON_CPU_AND_GPU
@pytest.mark.parametrize(
    ("dtype", "checkpointing", "stages", "split_at"),
    [
        pytest.param(
            *(dtype, checkpointing, len(points or (3,)) + 1, points),
            marks=[pytest.mark.slow, pytest.mark.sweep] * (number not in quick),
        )
        for dtype, checkpointing, quick in (
            (torch.bfloat16, True, (0, 1, 2, 3)),
            (torch.bfloat16, False, ()),
            (torch.float32, True, ()),
            (torch.float32, False, (3,)),
        )
        for number, points in enumerate(POINTS)
    ],
)
def test_split_flux2_gives_the_unsplit_loss_and_gradients(
    device_type: str, dtype: torch.dtype, checkpointing: bool, stages: int, split_at: tuple[int, ...] | None
) -> None:
    """Stage ends among the double blocks, between the two lists, and among the single blocks."""
    devices = stage_devices(device_type, stages)
    options = {"use_gradient_checkpointing": checkpointing}
    expected = unsplit_step(devices[0], dtype, checkpointing)
    model = flux2.lora_model(device=devices[0], dtype=dtype)
    handle = FAMILY.split(SimpleNamespace(dit=model), tuple(devices), split_at)
    found = flux2.train_step(model, devices[0], dtype, **options)
    assert handle.plan.stages[-1].last == len(model.transformer_blocks) + len(model.single_transformer_blocks)
    assert all(map(torch.equal, expected, found))


@pytest.mark.slow
@pytest.mark.parametrize(
    "split_at",
    [None, (4, 8, 30), *(pytest.param(points, marks=pytest.mark.sweep) for points in ((8, 20, 40), (5, 6, 7)))],
)
def test_full_size_flux2_finds_every_tensor_on_its_device(
    monkeypatch: pytest.MonkeyPatch, split_at: tuple[int, ...] | None
) -> None:
    monkeypatch.setattr(placement, "_move_own", move_fake)
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda self: None)  # nothing to fill
    devices = tuple(f"cuda:{i}" for i in range(4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda:0"):
            model = flux2.Flux2DiT(**flux2.FULL)
            sample = {
                "latents": torch.empty((1, 4096, 128)),
                "timestep": torch.empty((1,)),
                "prompt_embeds": torch.empty((1, 512, 15360)),
                "text_ids": torch.empty((1, 512, 4)),
                "image_ids": torch.empty((1, 4096, 4)),
            }
        handle = FAMILY.split(SimpleNamespace(dit=model), devices, split_at)
        output = model_fn_flux2(model, **sample, embedded_guidance=1.0, use_gradient_checkpointing=True)
    assert (output.shape, str(output.device)) == ((1, 4096, 128), "cuda:0")
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    assert len(blocks) == 56
    for stage in handle.plan.stages:
        for block in blocks[stage.first : stage.last]:
            assert {str(p.device) for p in block.parameters()} == {stage.device}
    assert len(model.hf_device_map) == 57
    if split_at is None:  # the double blocks are the heavier ones: by bytes, not by count
        fullest = max(stage.num_bytes for stage in handle.plan.stages)
        assert fullest < 1.1 * sum(stage.num_bytes for stage in handle.plan.stages) / 4
        assert handle.plan.stages[0].last < 14


def train(folder: Path) -> tuple[dict[str, bytes], Training]:
    from diffsynth.diffusion import runner

    torch.manual_seed(11)
    pipe = Pipe(flux2.lora_model(dtype=torch.bfloat16), model_fn_flux2, "FLUX.2", dynamic_shift_len=12)
    module = Training(pipe=pipe, inputs=partial(flux2.inputs, dtype=torch.bfloat16))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    runner.launch_training_task(
        accelerator, Samples(5), module, ModelLogger(str(folder)), learning_rate=1e-2, num_workers=0, num_epochs=2
    )
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}, module


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], Training]:
    return train(tmp_path_factory.mktemp("unsplit"))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.sweep), 4])
def test_split_flux2_training_writes_the_files_of_unsplit_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int, unsplit: tuple[dict[str, bytes], Training]
) -> None:
    expected, plain = unsplit
    monkeypatch.setenv("WANSHIM_DEVICES", ",".join(["cpu"] * stages))
    wanshim.activate(f"none,{FEATURE}")
    found, module = train(tmp_path / "split")
    assert len(expected) == 2
    assert len(set(expected.values())) == 2  # it learns
    assert found == expected
    assert split_of(plain.pipe.dit) is None
    assert len(split_of(module.pipe.dit).plan.stages) == stages
    notes = wanshim.report().row(FEATURE).notes
    assert any("double blocks hand on two activations" in note and "room, not speed" in note for note in notes)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    """A tiny FLUX.2 DiT in DiffSynth's file layout, known to it by its hash."""
    from diffsynth.configs.model_configs import MODEL_CONFIGS
    from diffsynth.core.loader import hash_model_file

    path = tmp_path / "flux2.safetensors"
    torch.manual_seed(0)
    save_file(flux2.tiny().state_dict(), path)
    entry = {
        "model_hash": hash_model_file(str(path)),
        "model_name": "flux2_dit",
        "model_class": "diffsynth.models.flux2_dit.Flux2DiT",
        "extra_kwargs": flux2.TINY,
    }
    MODEL_CONFIGS.append(entry)
    yield path
    MODEL_CONFIGS.remove(entry)


def load(path: Path, device: str = "cpu") -> Any:
    from diffsynth.core import ModelConfig
    from diffsynth.pipelines import flux2_image

    configs = [ModelConfig(path=str(path))]
    return flux2_image.Flux2ImagePipeline.from_pretrained(
        torch_dtype=torch.float32, device=device, model_configs=configs, tokenizer_config=None
    )


def test_flux2_pipeline_is_split_when_it_is_loaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = flux2.inputs()
    expected = model_fn_flux2(load(checkpoint).dit, **sample)
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    pipe = load(checkpoint)
    assert split_of(pipe.dit).plan.devices == ("cpu", "cpu", "cpu")
    assert torch.equal(model_fn_flux2(pipe.dit, **sample), expected)
    assert wanshim.report(strict=True).row(FEATURE).state == "exercised"


class TextEncoder(torch.nn.Module):
    """Stands for Mistral 24B, which needs its own 48 GB; called as FLUX.2's unit calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.seen: list[str] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        self.seen += [str(input_ids.device), str(attention_mask.device)]
        return {"hidden_states": (torch.zeros(1, 2, 4), torch.ones(1, 2, 4))}


def test_model_kept_on_the_host_is_called_from_anywhere_and_stays() -> None:
    from wanshim.core.model_split import pin_to

    parent = torch.nn.ModuleDict({"text_encoder": TextEncoder()})
    handle = pin_to(parent["text_encoder"], "cpu")
    parent.to("meta")
    assert {p.device.type for p in parent.parameters()} == {"cpu"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros((1, 2), dtype=torch.long, device="cuda:1")
        output = parent["text_encoder"](input_ids=ids, attention_mask=ids)
        assert {str(tensor.device) for tensor in output["hidden_states"]} == {"cuda:1"}
    assert parent["text_encoder"].seen == ["cpu", "cpu"]
    handle.remove()
    handle.remove()
    parent.to("meta")
    assert {p.device.type for p in parent.parameters()} == {"meta"}


@pytest.mark.parametrize("variable", ["WANSHIM_ENCODE_ON_CPU", "DIFFSYNTH_DATA_PROCESS_ON_CPU"])
def test_text_encoder_is_loaded_to_the_cpu_and_stays_there(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, variable: str
) -> None:
    """As in a data processing job: the encoder is there, the DiT is not. The device it would go to is `meta`."""
    from diffsynth.configs.model_configs import MODEL_CONFIGS
    from diffsynth.models import flux2_text_encoder

    class Flux2TextEncoder(TextEncoder):
        __module__ = "diffsynth.models.flux2_text_encoder"

    monkeypatch.setattr(flux2_text_encoder, "Flux2TextEncoder", Flux2TextEncoder)
    entry = next(config for config in MODEL_CONFIGS if config["model_name"] == "flux2_text_encoder")
    from diffsynth.core.loader import hash_model_file

    path = checkpoint.with_name("encoder.safetensors")
    save_file(Flux2TextEncoder().state_dict(), path)
    made = {k: v for k, v in entry.items() if k != "state_dict_converter"} | {"model_hash": hash_model_file(str(path))}
    monkeypatch.setattr("diffsynth.models.model_loader.MODEL_CONFIGS", [made])
    for name, value in {"WANSHIM_DEVICES": "cpu,cpu", variable: "true"}.items():
        monkeypatch.setenv(name, value)
    wanshim.activate(f"none,{FEATURE}")
    pipe = load(path, device="meta")
    pipe.to("meta")
    assert type(pipe.text_encoder) is Flux2TextEncoder
    assert {str(p.device) for p in pipe.text_encoder.parameters()} == {"cpu"}
    assert any(f"text_encoder stays on the CPU: {variable}" in n for n in wanshim.report().row(FEATURE).notes)
