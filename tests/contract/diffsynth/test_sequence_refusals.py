"""What sequence parallel does not train is refused by name, and the job ends: a step would have more samples."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffsynth.configs import MODEL_CONFIGS
from diffsynth.diffusion import runner
from diffsynth.models import model_loader
from diffsynth.models.model_loader import ModelPool

import wanshim
from tests.contract.diffsynth import variants
from tests.contract.diffsynth.fp8_models import manage
from tests.contract.diffsynth.training import FEATURE, Logger, Samples, Training
from wanshim.core.model_split import split_of
from wanshim.core.sequence import sequence_of
from wanshim.errors import FeatureUnavailable, PlacementInvalid
from wanshim.hand_over import RUN_OPTIONS


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", "sequence")
    wanshim.activate(f"none,{FEATURE}")


def module_of(name: str) -> Training:
    module, made = Training(), variants.tiny(name)
    module.pipe.dit = made.dit
    for attribute, part in made.beside.items():
        setattr(module.pipe, attribute, part)
    return module


def with_deepspeed() -> Any:
    """Stands for an Accelerator with DeepSpeed, which does not come up without GPUs."""
    state = SimpleNamespace(deepspeed_plugin=object())
    return SimpleNamespace(state=state, num_processes=2, device="cpu", gradient_accumulation_steps=1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("s2v", "the tokens of Wan's blocks are not sharded"),
        ("vap", "vap works between the blocks"),
        ("animate", "animate_adapter works between the blocks"),
        ("wantodance", "dit.music_injector works between the blocks"),
        ("usp", "use_usp: DiffSynth shards this pipeline's tokens itself"),
        ("heads", "99 ranks for 2 attention heads"),
        ("deepspeed", "DeepSpeed places the parameters"),
        ("manager", "--enable_model_cpu_offload"),
        ("fp8", "--fp8_models and --offload_models copy self_attn"),
        ("block", "DiTBlock 1 is compiled by torch.compile"),
        ("dynamo", "accelerate compiles the training module (dynamo_backend EAGER)"),
    ],
)
def test_refusal_names_what_it_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, reason: str
) -> None:
    module = module_of(change) if change in variants.MAKERS else module_of("vace") if change == "fp8" else Training()
    if change == "fp8":
        manage(module.pipe.vace, "cpu")
    if change == "usp":
        module.pipe.use_unified_sequence_parallel = True
    if change == "heads":
        monkeypatch.setenv("WANSHIM_PLAN", "sequence:99")
        wanshim.activate(f"none,{FEATURE}")
    if change == "block":
        module.pipe.dit.blocks[1].compile()
    if change == "dynamo":
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
        monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # which would be that of another test
    accelerator = with_deepspeed() if change == "deepspeed" else Accelerator()
    script = Namespace(enable_model_cpu_offload=True) if change == "manager" else None
    with pytest.raises(FeatureUnavailable) as caught:
        runner.launch_training_task(accelerator, Samples(), module, Logger(tmp_path), args=script)
    assert reason in str(caught.value)
    assert sequence_of(module.pipe.dit) is None
    assert wanshim.report().row(FEATURE).state == "ineffective"


@pytest.mark.parametrize(
    ("plan", "processes", "way"),
    [
        ("sequence", 3, "3 ranks for 2 attention heads, of which each computes whole ones: start 2"),
        ("sequence", 4, "start 2 or set WANSHIM_PLAN=sequence:2"),
        ("sequence:4", 4, "4 ranks for 2 attention heads"),
    ],
)
def test_more_ranks_than_heads_are_refused_before_the_model_is_loaded_with_what_would_do(
    monkeypatch: pytest.MonkeyPatch, plan: str, processes: int, way: str
) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", plan)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    wanshim.activate(f"none,{FEATURE}")
    config = {"model_class": "diffsynth.models.wan_video_dit.WanModel", "extra_kwargs": {"num_heads": 2}}
    pool = ModelPool()
    with pytest.raises(FeatureUnavailable, match=f"WANSHIM_PLAN=sequence cannot train this model: .*{way}"):
        pool.load_model_file(config, "no such file", pool.default_vram_config())


def test_model_that_is_refused_before_it_is_loaded_is_refused_by_the_option_that_chose_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RUN_OPTIONS, "--gpus 2\tWANSHIM_PLAN=sequence")
    monkeypatch.setenv("WANSHIM_PLAN", "sequence")
    wanshim.activate(f"none,{FEATURE}")
    pool, config = ModelPool(), {"model_class": "diffsynth.models.flux2_dit.Flux2DiT"}
    with pytest.raises(FeatureUnavailable, match=r"^--gpus 2 cannot train this model: Flux2DiT: .* Leave out --gpus 2"):
        pool.load_model_file(config, "no such file", pool.default_vram_config())


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        ("qwen_image_dit.QwenImageDiT", "QwenImageDiT: not one of Wan or FLUX.2 or MiniMax-H3. Leave"),
        ("longcat_video_dit.LongCatVideoTransformer3DModel", "LongCat-Video keeps caches of its own"),
    ],
)
def test_dit_of_no_family_is_refused_before_it_is_loaded(model_class: str, reason: str) -> None:
    """Each rank would load all models of the pipeline before the launcher refuses it."""
    config = next(c for c in MODEL_CONFIGS if c["model_class"] == f"diffsynth.models.{model_class}")
    pool = ModelPool()
    with pytest.raises(FeatureUnavailable, match=f"WANSHIM_PLAN=sequence cannot train this model: .*{reason}"):
        pool.load_model_file(config, "no such file", pool.default_vram_config())


@pytest.mark.parametrize(
    ("model_class", "arguments"),
    [
        ("qwen_image_text_encoder.QwenImageTextEncoder", []),
        ("qwen_image_dit.QwenImageDiT", ["--task", "sft:data_process"]),
        ("flux2_dit.Flux2DiT", ["--task=direct_distill:data_process"]),
    ],
)
def test_what_encodes_a_data_set_is_loaded_under_any_plan(
    model_class: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loader, "load_model", lambda *args, **kwargs: "loaded")
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    config = next(c for c in MODEL_CONFIGS if c["model_class"] == f"diffsynth.models.{model_class}")
    pool = ModelPool()
    assert pool.load_model_file(config, "no such file", pool.default_vram_config()) == "loaded"


def test_one_process_is_told_how_to_start_more(tmp_path: Path) -> None:
    with pytest.raises(PlacementInvalid, match=r"one process was launched.*wanshim run --gpus N"):
        runner.launch_training_task(Accelerator(), Samples(), Training(), Logger(tmp_path))
    assert not list(tmp_path.iterdir())


def test_model_that_is_split_already_is_refused(tmp_path: Path) -> None:
    from wanshim.adapters.diffsynth.splitting.wan import FAMILY

    module = Training()
    FAMILY.split(module.pipe, ("cpu", "cpu"))
    with pytest.raises(FeatureUnavailable, match="is split over cpu, cpu and the plan is sequence"):
        runner.launch_training_task(Accelerator(), Samples(), module, Logger(tmp_path))
    assert split_of(module.pipe.dit) is not None
    assert isinstance(module.pipe.dit, torch.nn.Module)
