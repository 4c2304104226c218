"""A quantised base under a split: loss, gradients and LoRA file of the same base unsplit, bit for bit."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.core.vram.layers import AutoTorchModule
from diffsynth.diffusion import DiffusionTrainingModule, ModelLogger, runner
from diffsynth.diffusion.training_module import DiffusionTrainingModule as Module
from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline
from safetensors.torch import load_file

import wanshim
from tests.contract.diffsynth import training, wan
from tests.contract.diffsynth.clip_job import FEATURE, OneClip
from tests.contract.diffsynth.stages import stage_devices
from wanshim.adapters.diffsynth.splitting import low_precision as quantized_base
from wanshim.core.model_split import split_model, split_of
from wanshim.core.model_split.quantize import quantize_base, quantized_names
from wanshim.core.pipeline import Pipeline
from wanshim.core.shared.weight_bytes import stored
from wanshim.demo import train_lora, wan_checkpoint
from wanshim.errors import FeatureUnavailable, PlacementInvalid

pytest.importorskip("torchao", reason="a quantised base is an extra: pip install 'wanshim[torchao]'")
pytestmark = pytest.mark.usefixtures("deterministic_kernels")
BASES = pytest.mark.parametrize("base", ["float8", pytest.param("int8", marks=[pytest.mark.slow, pytest.mark.sweep])])
BFLOAT16 = torch.bfloat16
SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep
QUANT_OPTIONS = ("torchao_int8_w8a16", "torchao_fp8_w8a16", "torchao_nvfp4_w4a16")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> wan_checkpoint.CheckpointFiles:
    made = wan_checkpoint.write(tmp_path_factory.mktemp("checkpoint"))
    wan_checkpoint.register(made)
    return made


def quantized(base: str) -> Any:
    model = wan.lora_model(dtype=BFLOAT16)
    assert quantize_base(model.blocks, base) == 10 * len(model.blocks)
    return model


def frozen(model: torch.nn.Module) -> list[torch.Tensor]:
    return [part.clone() for p in model.parameters() if not p.requires_grad for part in stored(p)]


@BASES
@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "checkpoint"])
@pytest.mark.parametrize("stages", [pytest.param(2, marks=[SLOW, SWEEP]), 3, pytest.param(4, marks=[SLOW, SWEEP])])
def test_quantised_split_gives_the_unsplit_loss_gradients_and_steps(
    base: str, checkpointing: bool, stages: int
) -> None:
    def trained(stages: int) -> list[torch.Tensor]:
        model = quantized(base)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if stages > 1:
            assert "frozen weights of the blocks" in str(split_model(model, stage_devices("cpu", stages)).plan)
        before, results = frozen(model), []
        for _ in range(2):
            results += wan.train_step(model, "t2v", "cpu", BFLOAT16, use_gradient_checkpointing=checkpointing)
            optimizer.step()
            optimizer.zero_grad()
        after = frozen(model)
        assert len(before) == len(after)
        assert all(map(torch.equal, before, after))
        return results + [p.detach() for p in model.parameters() if p.requires_grad]

    expected, found = trained(1), trained(stages)
    assert len(found) == len(expected)
    assert all(map(torch.equal, expected, found))


@BASES
def test_quantised_base_changes_the_loss_so_the_comparison_is_not_of_two_plain_models(base: str) -> None:
    plain = wan.train_step(wan.lora_model(dtype=BFLOAT16), "t2v", "cpu", BFLOAT16)
    assert not torch.equal(wan.train_step(quantized(base), "t2v", "cpu", BFLOAT16)[0], plain[0])


@BASES
def test_lanes_over_a_quantised_base_give_its_serial_gradients(base: str) -> None:
    def loss_of(model: Any, seed: int) -> torch.Tensor:
        sample = wan.inputs("t2v", seed, dtype=BFLOAT16)
        output = wan.model_fn_wan_video(model, **sample, use_gradient_checkpointing=True)
        return torch.nn.functional.mse_loss(output.float(), sample["latents"].float())

    plain = quantized(base)
    expected = [loss_of(plain, seed) for seed in range(4)]
    for loss in expected:
        loss.backward()
    model = quantized(base)
    pipeline = Pipeline(split_model(model, ["cpu"] * 3, exits=("head",)))
    pending = []
    for seed in range(4):
        pending.append(pipeline.submit(lambda seed=seed: loss_of(model, seed)))
        pipeline.backward(pending[-1], lambda loss: loss.backward())
    pipeline.join()
    assert [loss.item() for loss in pending] == [loss.item() for loss in expected]
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters() if p.requires_grad)
    pipeline.remove()


class Training(DiffusionTrainingModule):
    """LoRA on a DiT that was loaded as `--fp8_models` or `--quant_options` load it."""

    forward = train_lora.LoraTraining.forward
    checkpointing = True

    def __init__(self, files: wan_checkpoint.CheckpointFiles, unsplit_base: str | None = None, **dit: Any) -> None:
        super().__init__()
        configs = [ModelConfig(path=str(path)) for path in files.models]
        configs[0] = ModelConfig(path=str(files.dit), **dit)
        self.pipe = WanVideoPipeline.from_pretrained(
            torch_dtype=BFLOAT16, device=torch.device("cpu"), model_configs=configs,
            tokenizer_config=ModelConfig(path=str(files.tokenizer)), redirect_common_files=False,
        )  # fmt: skip
        if unsplit_base:
            self.pipe.requires_grad_(False)
            assert quantize_base(self.pipe.dit.blocks, unsplit_base)
        self.switch_pipe_to_training_mode(
            self.pipe, lora_base_model="dit", lora_target_modules=train_lora.TARGETS, lora_rank=4
        )


def train(module: Training, output: Path, accumulation: int = 2) -> bytes:
    from diffsynth.diffusion import runner

    torch.manual_seed(3)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    logger = ModelLogger(str(output), remove_prefix_in_ckpt="pipe.dit.")
    runner.launch_training_task(accelerator, OneClip(), module, logger, learning_rate=1e-2, num_workers=0)
    return (output / "epoch-0.safetensors").read_bytes()


def activate(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """A split into two stages on the CPU, under these variables too."""
    for name, value in {"DEVICES": "cpu,cpu", **variables}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{FEATURE}")


def split_run(
    files: wan_checkpoint.CheckpointFiles, output: Path, monkeypatch: pytest.MonkeyPatch, stages: int, **dit: Any
) -> tuple[bytes, Training]:
    monkeypatch.setenv("WANSHIM_DEVICES", ",".join(["cpu"] * stages))
    wanshim.activate(f"none,{FEATURE}")
    torch.manual_seed(2)
    module = Training(files, **dit)
    assert split_of(module.pipe.dit) is not None
    before = frozen(module.pipe.dit)
    found = train(module, output)
    assert all(map(torch.equal, before, frozen(module.pipe.dit)))
    return found, module


@pytest.mark.slow
@BASES
@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=SWEEP)])
def test_bf16_checkpoint_with_wanshim_base_trains_as_the_quantised_base_unsplit(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, stages: int
) -> None:
    torch.manual_seed(2)
    expected = train(Training(files, unsplit_base=base), tmp_path / "unsplit")
    monkeypatch.setenv("WANSHIM_BASE", base)
    found, module = split_run(files, tmp_path / "split", monkeypatch, stages)
    assert found == expected
    assert len(quantized_names(module.pipe.dit, trained=False)) == 10 * len(module.pipe.dit.blocks)
    notes = wanshim.report().row(FEATURE).notes
    assert any("float8_e4m3fn" in note or "int8" in note for note in notes)


@SLOW
@BASES
def test_pipeline_that_comes_unsplit_with_lora_is_quantised_when_training_starts(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    torch.manual_seed(2)
    expected = train(Training(files, unsplit_base=base), tmp_path / "unsplit")
    torch.manual_seed(2)
    module = Training(files)
    activate(monkeypatch, BASE=base)
    assert train(module, tmp_path / "split") == expected


@pytest.mark.slow
def test_lora_of_a_quantised_base_loads_into_an_unsplit_bf16_model(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_BASE", "float8")
    split_run(files, tmp_path, monkeypatch, 2)
    wanshim.deactivate()
    monkeypatch.delenv("WANSHIM_BASE")
    lora = load_file(tmp_path / "epoch-0.safetensors")
    assert {tensor.dtype for tensor in lora.values()} == {BFLOAT16}
    plain = Training(files).pipe
    missing, unexpected = plain.dit.load_state_dict(plain_names(plain.dit, lora), strict=False)
    assert not unexpected
    assert not [name for name in missing if "lora" in name]


def plain_names(dit: Any, lora: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    known = set(dit.state_dict())
    return {name if name in known else name.replace(".weight", ".default.weight"): t for name, t in lora.items()}


@SLOW
@SWEEP
@pytest.mark.parametrize("method", QUANT_OPTIONS)
def test_quant_options_under_a_split_give_the_unsplit_file(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    if "quantize" not in inspect.signature(ModelConfig).parameters:
        pytest.skip("this DiffSynth has no --quant_options")
    from diffsynth.core.quant import QuantizeConfig

    def config() -> Any:
        return QuantizeConfig(method=method, exclude_modules=["text_embedding.0", "head.head"])

    torch.manual_seed(2)
    expected = train(Training(files, quantize=config()), tmp_path / "unsplit")
    found, module = split_run(files, tmp_path / "split", monkeypatch, 3, quantize=config())
    assert found == expected
    assert quantized_names(module.pipe.dit, trained=False)


def test_quant_options_that_do_not_pass_gradients_exactly_are_refused_by_name(
    files: wan_checkpoint.CheckpointFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "quantize" not in inspect.signature(ModelConfig).parameters:
        pytest.skip("this DiffSynth has no --quant_options")
    from diffsynth.core.quant import QuantizeConfig

    activate(monkeypatch, STRICT="1")
    with pytest.raises(FeatureUnavailable, match=r"torchao_int8_w8a8.*Int8DynamicActivation"):
        Training(files, quantize=QuantizeConfig(method="torchao_int8_w8a8"))


@pytest.mark.parametrize("backend", ["bitsandbytes", "comfy_kitchen", "entropack"])
def test_other_backends_are_refused_by_name_with_the_reason(backend: str) -> None:
    """A stand-in for the configuration: these libraries need a CUDA device to be built."""
    from types import SimpleNamespace as Made

    config = Made(mode="dynamic", method=f"{backend}_x", backend=Made(name=backend, config=None))
    assert f"--quant_options {backend}_x: " in str(quantized_base.options_refusal(config))
    assert "CUDA kernels" in str(quantized_base.options_refusal(config))
    assert quantized_base.options_refusal(Made(**{**vars(config), "mode": "dequant_once"})) is None


def fp8_config() -> dict[str, Any]:
    return dict(Module.parse_vram_config(object(), fp8=True, device="cpu"))


@pytest.fixture
def _cache_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """DiffSynth empties the cache of whatever device it runs on, and the host has none."""
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("_cache_of_the_host")
@pytest.mark.parametrize("stages", [pytest.param(2, marks=SWEEP), 3, pytest.param(4, marks=SWEEP)])
def test_fp8_models_under_a_split_give_the_unsplit_file(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    torch.manual_seed(2)
    wanshim.activate("none,diffsynth.fp8_lora")  # or DiffSynth's copies of the LoRA layers would take the gradients
    reference = Training(files, **fp8_config())
    before = [p.detach().clone() for p in reference.parameters() if p.requires_grad]
    expected = train(reference, tmp_path / "unsplit")
    after = [p for p in reference.parameters() if p.requires_grad]
    assert sum(not torch.equal(*pair) for pair in zip(before, after, strict=True)) > len(after) / 2
    found, module = split_run(files, tmp_path / "split", monkeypatch, stages, **fp8_config())
    assert found == expected
    assert torch.float8_e4m3fn in {p.dtype for p in module.pipe.dit.blocks.parameters()}
    assert any("--fp8_models" in note for note in wanshim.report().row(FEATURE).notes)


def test_each_wrapper_of_fp8_models_has_the_device_of_its_stage_until_the_split_is_removed(
    files: wan_checkpoint.CheckpointFiles,
) -> None:
    """Places as two cards would give them: a wrapper only takes note of its device."""
    dit = Training(files, **fp8_config()).pipe.dit
    wrappers = [module for module in dit.modules() if isinstance(module, AutoTorchModule)]
    before = [dict(vars(wrapper)) for wrapper in wrappers]
    handle = split_model(dit, ["cpu", "cpu"], split_at=5, exits=("head",))
    late = {id(m) for module in (*dit.blocks[5:], dit.head) for m in module.modules()}
    handle.placed = [(m, torch.device("cuda", int(id(m) in late))) for m, _ in handle.placed]
    assert quantized_base.place_wrappers(handle) == len(wrappers)
    for wrapper in wrappers:
        assert {str(vars(wrapper)[name]) for name in quantized_base.DEVICES} == {f"cuda:{int(id(wrapper) in late)}"}
        assert wrapper.offload_dtype == torch.float8_e4m3fn
    handle.remove()
    for wrapper, old in zip(wrappers, before, strict=True):
        assert {k: v for k, v in vars(wrapper).items() if k in quantized_base.DEVICES} == {
            k: old[k] for k in quantized_base.DEVICES
        }
        assert "_copy_with_shared_children" not in vars(wrapper)


def test_fp8_base_is_not_quantised_once_more(
    files: wan_checkpoint.CheckpointFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(monkeypatch, BASE="float8")
    with pytest.raises(PlacementInvalid, match="float8_e4m3fn"):
        Training(files, **fp8_config())


def test_offloaded_dit_is_refused_by_name(
    files: wan_checkpoint.CheckpointFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(monkeypatch, STRICT="1")
    config = Module.parse_vram_config(object(), offload=True, device="cpu")
    with pytest.raises(FeatureUnavailable, match="--offload_models"):
        Training(files, **config)


def test_bad_split_leaves_the_base_as_it_was(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Training(files)
    activate(monkeypatch, BASE="float8", SPLIT_AT="99")
    with pytest.raises(PlacementInvalid, match="99"):
        train(module, tmp_path)
    assert not quantized_names(module.pipe.dit, trained=False)


@pytest.mark.slow
def test_full_training_on_a_quantised_base_is_refused(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(monkeypatch, BASE="int8")
    module = Training(files)
    module.pipe.dit.requires_grad_(True)
    with pytest.raises(FeatureUnavailable, match="80 quantised weights are to be trained"):
        train(module, tmp_path)


class Saving(training.Logger):
    """A script's own, which saves a state by accelerate at each step."""

    options: dict[str, bool] = {}  # noqa: RUF012

    def on_step_end(self, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(accelerator, *args, **kwargs)
        accelerator.save_state(self.output_path, **self.options)
        accelerator.load_state(self.output_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["split", "auto"])
def test_state_that_a_script_saves_by_accelerate_is_refused_as_safetensors_and_written_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    monkeypatch.setenv("WANSHIM_BASE", "float8")
    monkeypatch.setenv(*(("WANSHIM_DEVICES", "cpu,cpu") if plan == "split" else ("WANSHIM_PLAN", "auto")))
    wanshim.activate()

    def run(**options: bool) -> None:
        monkeypatch.setattr(Saving, "options", options)
        runner.launch_training_task(
            accelerator, training.Samples(1), training.Training(), Saving(tmp_path), num_workers=0
        )

    accelerator = Accelerator()
    with pytest.raises(FeatureUnavailable, match=r"save_state writes safetensors, .* Pass safe_serialization=False, "):
        run()
    assert not list(tmp_path.glob("*.safetensors"))
    run(safe_serialization=False)
    assert (tmp_path / "pytorch_model.bin").is_file()
    accelerator = Accelerator()
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
    monkeypatch.setattr(accelerator, "load_state", lambda folder: None)
    run()  # the hook leaves all weights to the script
    assert not list(tmp_path.glob("model*.safetensors"))
