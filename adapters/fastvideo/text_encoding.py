"""FastVideo's text encoders under `wanshim.core.encoding`: what names an encoding, and how one is run.

The loader, tokenizer, pre- and postprocessing are FastVideo's own; the order of the calls is that of
`fastvideo.train.utils.negative_prompt.encode_negative_prompt` (pull request 1178), so the numbers are its
numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanshim.patching import SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.core.encoding import EncoderPlan, EncodingRequest

# Set while this rank encodes and the others wait: nothing in it may count on them. Holds the seams that it called.
_alone: ContextVar[list[SeamState] | None] = ContextVar("wanshim_encodes_alone", default=None)

PACKAGES = ("fastvideo", "transformers", "tokenizers")


def encode_wan_prompt(
    training_config: Any, prompt: str, device: torch.device, dtype: torch.dtype, seam: SeamState, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and attention mask of `prompt` from the first text encoder, the same on every rank.

    Returns:
        embeddings (1, text_len, hidden) and mask (1, tokens), both on `device` in `dtype`.
    """
    from wanshim.core.encoding import choose_device, peer_gpu_bytes

    model = model_folder(training_config)
    where, why = choose_device(seam.settings.encode_on, device, peer_gpu_bytes)

    def encode() -> Mapping[str, Any]:
        return _run_encoder(training_config, model, prompt, where, why, dtype, seam)

    request = name_request(training_config, model, prompt, dtype, encoders=1)
    tensors = once(encode, request, training_config.pipeline_config, device, where, seam, keeps)
    return tensors["embeds"], tensors["mask"]


def once(
    encode: Callable[[], Mapping[str, torch.Tensor]],
    request: EncodingRequest,
    pipeline: Any,
    device: torch.device,
    where: torch.device,
    seam: SeamState,
    keeps: bool,
) -> Mapping[str, torch.Tensor]:
    """`encode_once` with the user's settings; says in the report where the embeddings came from.

    Args:
        keeps: the feature is for embeddings that are kept: without, it has no effect.
    """
    from wanshim.core.encoding import TIMEOUT_S, encode_once

    read = seam.settings
    timeout_s = TIMEOUT_S if read.encode_timeout_s is None else read.encode_timeout_s
    cache_dir = None if read.cache_dir is None else Path(read.cache_dir)

    called: list[SeamState] = []

    def encode_alone() -> Mapping[str, Any]:
        with Undo() as undo, _one_tensor_parallel_rank():
            undo.add(partial(_alone.reset, _alone.set(called)))
            # The loader writes the checkpoint's configuration over the encoders' settings. They are part of the key, so
            # it gets a copy: a rank that encoded and one that waited ask for the same key next time.
            undo.set(pipeline, {"text_encoder_configs": copy.deepcopy(pipeline.text_encoder_configs)})
            return encode()

    try:
        encoded = encode_once(
            encode_alone, request, device=device, encoder_device=where, cache_dir=cache_dir, timeout_s=timeout_s
        )
    except BaseException:
        for each in called:
            each.fail()
        raise
    seam.notes.append(str(encoded))
    if encoded.unkept:
        seam.notes.append(encoded.unkept)
        if keeps:
            for each in (seam, *called):
                each.pass_by()
    return encoded.tensors


def read_alone(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """For the loader's weights: where the ranks of a machine share one reader, read for oneself.

    FastVideo reads on local rank 0 and broadcasts each tensor to the other ranks of the machine.
    """

    def _get_weights_iterator(self: Any, source: Any, to_cpu: bool) -> Any:
        called = _alone.get()
        if called is not None and seam.enter():
            called.append(seam)  # whether encoding alone has an effect is known when it is done
            return original(self, source, True)
        return original(self, source, to_cpu)

    return _get_weights_iterator


def model_folder(training_config: Any) -> Path:
    from fastvideo.utils import maybe_download_model

    return Path(maybe_download_model(training_config.model_path))


def name_request(
    training_config: Any,
    model: Path,
    prompt: str,
    dtype: torch.dtype,
    *,
    encoders: int,
    process: Sequence[Callable[..., Any]] = (),
) -> Any:
    """The request for the first `encoders` text encoders of a model folder.

    Args:
        process: what the model plugin itself does around the encoders, beside the pipeline's own functions.
    """
    from wanshim.core.encoding import EncoderSource, EncodingRequest

    pipeline = training_config.pipeline_config
    sources = tuple(
        EncoderSource(
            encoder=model / f"text_encoder{suffix}",
            tokenizer=model / f"tokenizer{suffix}",
            tokenizer_args=dict(pipeline.text_encoder_configs[index].tokenizer_kwargs),
            precision=pipeline.text_encoder_precisions[index],
            process=[*_pipeline_functions(pipeline, index), *process],
            output_dtype=dtype,
            settings=pipeline.text_encoder_configs[index],
        )
        for index, suffix in enumerate(["", *(f"_{i}" for i in range(2, encoders + 1))])
    )
    return EncodingRequest(prompt=prompt, sources=sources, implementation=_implementation())


def _pipeline_functions(pipeline: Any, index: int) -> list[Callable[..., Any]]:
    """The pipeline's functions around encoder `index`: preprocessing, where it has one, and
    postprocessing."""
    kinds = (getattr(pipeline, "preprocess_text_funcs", None), pipeline.postprocess_text_funcs)
    return [functions[index] for functions in kinds if functions is not None and functions[index] is not None]


def _implementation() -> dict[str, str]:
    from importlib.metadata import version

    import fastvideo.envs as envs

    backend = str(getattr(envs, "FASTVIDEO_ATTENTION_BACKEND", None))
    return {**{package: version(package) for package in PACKAGES}, "attention_backend": backend}


def _run_encoder(
    training_config: Any,
    model: Path,
    prompt: str,
    device: torch.device | str,
    why: str,
    dtype: torch.dtype,
    seam: SeamState,
) -> Mapping[str, Any]:
    """Load the first text encoder where the plan says, encode, and drop it."""
    from fastvideo.utils import PRECISION_TO_TYPE

    from wanshim.core.encoding import plan_encoder, read_checkpoint
    from wanshim.core.shared.gpu_memory import free_bytes

    pipeline = training_config.pipeline_config
    precision = PRECISION_TO_TYPE[pipeline.text_encoder_precisions[0]]
    folder = model / "text_encoder"
    plan = plan_encoder(
        read_checkpoint(folder, default=precision),
        compute_dtype=precision,
        device=device,
        why=why,
        free_bytes=free_bytes,
    )
    seam.notes.append(str(plan))
    encoder = _load_encoder(training_config, model, folder, plan)
    return _forward(encoder, plan, pipeline, model / "tokenizer", prompt, dtype)


class _Alone:
    """A tensor-parallel group of one rank, as FastVideo's layers ask about it."""

    world_size = 1
    rank_in_group = 0

    def all_reduce(self, tensor: torch.Tensor, *args: object, **kwargs: object) -> Any:
        return tensor

    all_gather = all_reduce


def _one_tensor_parallel_rank() -> Any:
    """With tp_size > 1, FastVideo's own switch of the group: a rank that encodes alone holds whole
    weights."""
    from contextlib import nullcontext

    from fastvideo.distributed.parallel_state import get_tp_world_size, patch_tensor_parallel_group

    return patch_tensor_parallel_group(_Alone()) if get_tp_world_size() > 1 else nullcontext()


def _load_encoder(training_config: Any, model: Path, folder: Path, plan: EncoderPlan) -> Any:
    """FastVideo's loader, given only where the weights go and in which dtype they rest."""
    import torch
    from fastvideo.models.loader.component_loader import TextEncoderLoader
    from fastvideo.train.utils.moduleloader import make_inference_args
    from fastvideo.utils import PRECISION_TO_TYPE

    home = plan.device if plan.residence == "whole" else torch.device("cpu")
    names = {dtype: name for name, dtype in PRECISION_TO_TYPE.items()}

    class PlacedLoader(TextEncoderLoader):  # type: ignore[misc, unused-ignore]
        def load_model(
            self, path: str, config: Any, target: Any, args: Any, dtype: str = "fp16", **kwargs: object
        ) -> Any:
            return super().load_model(path, config, home, args, names[plan.resident_dtype], **kwargs)

    arguments = make_inference_args(training_config, model_path=str(model))
    arguments.text_encoder_cpu_offload = False  # offloading shards the encoder over the process group
    return PlacedLoader().load(str(folder), arguments).to(home).eval()


def _forward(
    encoder: Any, plan: EncoderPlan, pipeline: Any, tokenizer: Path, prompt: str, dtype: torch.dtype
) -> Mapping[str, Any]:
    from fastvideo.forward_context import set_forward_context
    from transformers import AutoTokenizer

    preprocess = (getattr(pipeline, "preprocess_text_funcs", None) or [None])[0]
    text = prompt if preprocess is None else preprocess(prompt)
    tokens = AutoTokenizer.from_pretrained(str(tokenizer))(
        text, **dict(pipeline.text_encoder_configs[0].tokenizer_kwargs)
    ).to(plan.device)
    with _visits(encoder, plan), set_forward_context(current_timestep=0, attn_metadata=None):
        outputs = encoder(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
    outputs.attention_mask = tokens["attention_mask"]
    embeds = pipeline.postprocess_text_funcs[0](outputs)
    return {"embeds": embeds.to(dtype), "mask": tokens["attention_mask"].to(dtype)}


def _visits(encoder: torch.nn.Module, plan: EncoderPlan) -> Any:
    """Nothing where the encoder lies whole on its device; else its blocks visit one by one."""
    from contextlib import nullcontext

    from wanshim.core.encoding import visiting_layers

    if plan.residence == "whole":
        return nullcontext()
    return visiting_layers(
        encoder, encoder.encoder.block, device=plan.device, dtype=plan.compute_dtype, lookups=[encoder.shared]
    )
