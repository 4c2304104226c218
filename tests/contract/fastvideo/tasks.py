"""Tasks of the ranks beside the start of a training that encode_ranks has. Run as a module."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.contract.fastvideo import encode_ranks, training_jobs
from tests.contract.fastvideo.encode_ranks import Job
from tests.contract.fastvideo.methods import METHODS, training_method


def _doctor(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """What `wanshim doctor` finds in this environment."""
    from wanshim import settings
    from wanshim.doctor.diagnosis import examine

    rows = {row.feature: row for row in examine(settings.read()).rows}
    return {
        "verdicts": {name: row.verdict for name, row in rows.items()},
        "versions": {name: row.version for name, row in rows.items()},
    }


def _method_start(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """`train_start` by the training method that the job names."""
    return encode_ranks.train_start(job, rank, folder, partial(training_method, job["method"]))


def _changed_start(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """`train_start` of a model whose settings the job changes first."""

    def change(model: Any) -> Any:
        from fastvideo.api.sampling_param import SamplingParam

        pipeline = model.training_config.pipeline_config
        if "text_len" in job:
            pipeline.text_encoder_configs[0].arch_config.text_len = job["text_len"]
        if "preprocess" in job:
            pipeline.preprocess_text_funcs = tuple(job["preprocess"])
        if "prompt" in job:
            SamplingParam.from_pretrained = lambda path: SimpleNamespace(negative_prompt=job["prompt"])
        return _Starts(model, job.get("starts", 1))

    return encode_ranks.train_start(job, rank, folder, change)


def _failing_start(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """`changed_start` that fails, and what the report says of it."""
    import wanshim

    try:
        return _changed_start(job, rank, folder)
    except ValueError as error:
        return {"error": type(error).__name__, "features": encode_ranks._features(wanshim.report())}


def _conditioned_start(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """Ask a model that has its embeddings for them."""
    import torch

    report = encode_ranks._activate(job, rank)
    encode_ranks._join(job)
    model = encode_ranks._wan_model(job)
    model.negative_prompt_embeds = model.negative_prompt_attention_mask = torch.ones(1)
    model.ensure_negative_conditioning()
    return {"features": encode_ranks._features(report)}


def _start_on_a_full_disk(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """`train_start` where nothing that is written can be kept, which a test cannot make without a mount of its own."""
    own = os.fsync

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = full
    try:
        return encode_ranks.train_start(job, rank, folder)
    finally:
        os.fsync = own


class _Starts:
    """A trainer that starts its model some times, each time without its embeddings."""

    def __init__(self, model: Any, count: int) -> None:
        self._model, self._count = model, count

    def on_train_start(self) -> None:
        for _ in range(self._count):
            self._model.negative_prompt_embeds = self._model.negative_prompt_attention_mask = None
            self._model.on_train_start()


def _cosmos(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """Start fine-tuning of the plugin that encodes nothing, and refuses a rate of prompts left out."""
    from fastvideo.configs.pipelines.base import PipelineConfig
    from fastvideo.train.models.cosmos.cosmos import CosmosModel
    from fastvideo.train.utils.training_config import TrainingConfig

    model = CosmosModel.__new__(CosmosModel)
    model.training_config = TrainingConfig(pipeline_config=PipelineConfig())
    model.training_config.data.training_cfg_rate, model.training_config.data.seed = job["rate"], 1
    model._requires_negative_conditioning = True
    model.negative_prompt_embeds = model.negative_prompt_attention_mask = None
    report = encode_ranks._activate(job, rank)
    encode_ranks._join(job)
    training_method(f"{METHODS}.fine_tuning.finetune.FineTuneMethod", model).on_train_start()
    return {"encoded": model.negative_prompt_embeds is not None, "features": encode_ranks._features(report)}


def _upstream(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """FastVideo's own `encode_negative_prompt`, which 0.2.0 runs on every rank."""
    from fastvideo.api.sampling_param import SamplingParam
    from fastvideo.train.utils.negative_prompt import encode_negative_prompt

    encode_ranks._join(job)
    model = encode_ranks._wan_model(job)
    prompt = SamplingParam.from_pretrained(job["model"]).negative_prompt
    model.negative_prompt_embeds, model.negative_prompt_attention_mask = encode_negative_prompt(
        model.training_config, prompt=prompt, device=model.device, dtype=model._get_training_dtype()
    )
    encode_ranks._save(folder / f"{rank}.safetensors", model)
    return {}


def _layers(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """Encode with the encoder resting in the checkpoint's dtype and its blocks visiting the device."""
    import torch
    from fastvideo.api.sampling_param import SamplingParam
    from safetensors.torch import save_file

    from wanshim.adapters.fastvideo import text_encoding
    from wanshim.core.encoding import EncoderPlan

    encode_ranks._join(job)
    model = encode_ranks._wan_model(job)
    root = Path(job["model"])
    plan = EncoderPlan(
        device=torch.device("cpu"),
        residence="layers",
        resident_dtype=torch.bfloat16,
        compute_dtype=torch.float32,
        weight_bytes=0,
        reason="by test",
    )
    config = model.training_config
    encoder = text_encoding._load_encoder(config, root, root / "text_encoder", plan)
    assert {parameter.dtype for parameter in encoder.encoder.block[0].layer[1].DenseReluDense.parameters()} == {
        torch.bfloat16
    }
    prompt = SamplingParam.from_pretrained(job["model"]).negative_prompt
    with torch.no_grad():
        found = text_encoding._forward(
            encoder, plan, config.pipeline_config, root / "tokenizer", prompt, torch.bfloat16
        )
    save_file(dict(found), folder / f"{rank}.safetensors")
    return {}


def _plugin(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """Encode as one of the other model plugins does; what it sets goes to `<rank>.safetensors`."""
    from safetensors.torch import save_file

    model, root = PLUGINS[job["plugin"]](), Path(job["model"])
    model.negative_prompt_embeds = model.negative_prompt_attention_mask = None
    model.training_config.model_path = str(root)
    model.training_config.distributed.hsdp_shard_dim = 1
    if not root.exists():
        _write_two_encoders(root)
    report = encode_ranks._activate(job, rank)
    encode_ranks._join(job)
    model.ensure_negative_conditioning()
    tensors = {name: value for name, value in vars(model).items() if name.startswith("negative_")}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"{rank}.safetensors")
    return {"features": encode_ranks._features(report)}


def _hunyuan() -> Any:
    from fastvideo.configs.pipelines.hunyuan import HunyuanConfig
    from fastvideo.train.models.hunyuan.hunyuan import HunyuanModel
    from fastvideo.train.utils.training_config import TrainingConfig

    model = HunyuanModel.__new__(HunyuanModel)
    model.training_config = TrainingConfig(pipeline_config=HunyuanConfig())
    return model


def _kandinsky5() -> Any:
    """The plugin's own method with stand-ins for its two encoders: Qwen2.5-VL has no tiny published form."""
    import fastvideo.models.loader.component_loader as loader
    import torch
    from fastvideo.configs.pipelines.kandinsky5 import Kandinsky5T2VConfig
    from fastvideo.train.models.kandinsky5.kandinsky5 import Kandinsky5Model
    from fastvideo.train.utils.training_config import TrainingConfig

    class Encoder(torch.nn.Module):
        def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
            states = torch.sin(input_ids[..., None] * torch.arange(1.0, 9.0))
            return SimpleNamespace(hidden_states=(states,), pooler_output=states.mean(1))

    loader.TextEncoderLoader.load = lambda self, path, arguments: Encoder()
    model = Kandinsky5Model.__new__(Kandinsky5Model)
    model._requires_negative_conditioning = True
    model.training_config = TrainingConfig(pipeline_config=Kandinsky5T2VConfig())
    return model


PLUGINS: dict[str, Callable[[], Any]] = {"hunyuan": _hunyuan, "kandinsky5": _kandinsky5}


def _write_two_encoders(root: Path) -> None:
    """A LLaMA and a CLIP of a few weights, as HunyuanVideo has them."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    from tests.contract.fastvideo.umt5_checkpoint import write_tokenizer

    torch.manual_seed(0)
    small = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    LlamaModel(LlamaConfig(num_hidden_layers=3, **small)).save_pretrained(root / "text_encoder")
    CLIPTextModel(CLIPTextConfig(num_hidden_layers=2, eos_token_id=1, **small)).save_pretrained(root / "text_encoder_2")
    for name in ("tokenizer", "tokenizer_2"):
        write_tokenizer(root / name)


if __name__ == "__main__":
    # The ranks are forked from here, so that what they import is already there.
    encode_ranks.TASKS.update(doctor=_doctor, layers=_layers, plugin=_plugin, upstream=_upstream)
    encode_ranks.TASKS.update(changed_start=_changed_start, cosmos=_cosmos, start_on_a_full_disk=_start_on_a_full_disk)
    encode_ranks.TASKS.update(conditioned_start=_conditioned_start, failing_start=_failing_start)
    encode_ranks.TASKS.update(method_start=_method_start, **training_jobs.TASKS)
    encode_ranks.main()
