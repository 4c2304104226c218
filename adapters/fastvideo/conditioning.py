"""Replacements for the methods of FastVideo's training models that encode the negative prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wanshim.patching import Kind, Seam, SeamState

from . import text_encoding

Replace = Callable[[Any, SeamState], Any]

WAN = "fastvideo.train.models.wan.wan:WanModel.ensure_negative_conditioning"
HUNYUAN = "fastvideo.train.models.hunyuan.hunyuan:HunyuanModel.ensure_negative_conditioning"
KANDINSKY5 = "fastvideo.train.models.kandinsky5.kandinsky5:Kandinsky5Model.ensure_negative_conditioning"
WEIGHTS = "fastvideo.models.loader.component_loader:TextEncoderLoader._get_weights_iterator"
TRAIN_START = "fastvideo.train.methods.base:TrainingMethod.on_train_start"

# What the seams count on without changing it.
RELIES_ON = (
    "fastvideo.models.loader.component_loader:TextEncoderLoader.load",
    "fastvideo.models.loader.component_loader:TextEncoderLoader.load_model",
    "fastvideo.train.utils.moduleloader:make_inference_args",
    "fastvideo.distributed.parallel_state:patch_tensor_parallel_group",
)

# Methods that never ask a model for an unconditional prediction. A subclass may, so only the classes
# themselves.
_METHODS = "fastvideo.train.methods"
NEED_NO_NEGATIVE_PROMPT = {
    f"{_METHODS}.fine_tuning.finetune.FineTuneMethod",
    f"{_METHODS}.fine_tuning.dfsft.DiffusionForcingSFTMethod",
    f"{_METHODS}.fine_tuning.tfsft.TeacherForcingSFTMethod",
    f"{_METHODS}.knowledge_distillation.kd.KDMethod",
    f"{_METHODS}.knowledge_distillation.kd.KDCausalMethod",
}

# FastVideo 0.2.1 asks this attribute itself; before it, only the replacements below do.
_FLAG = "_requires_negative_conditioning"


def encode_wan(original: Callable[..., Any], seam: SeamState, *, keeps: bool) -> Callable[..., Any]:
    """For WanModel and what inherits from it: UMT5, encoded once.

    Args:
        keeps: as `text_encoding.once` takes it.
    """

    def encode(self: Any) -> None:
        config = self.training_config
        prompt = _preset_prompt(original, config)
        dtype = self._get_training_dtype()
        embeds, mask = text_encoding.encode_wan_prompt(config, prompt, self.device, dtype, seam, keeps)
        self.negative_prompt_embeds = embeds
        self.negative_prompt_attention_mask = mask

    return _where_needed(encode, original, seam)


def _where_needed(encode: Callable[[Any], None], original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """`encode`, unless the model has its embeddings or its training method reads none."""

    def ensure_negative_conditioning(self: Any) -> None:
        if not seam.enter():
            original(self)
        elif self.negative_prompt_embeds is not None:
            seam.pass_by()
        elif getattr(self, _FLAG, True):
            try:
                encode(self)
            except BaseException:
                seam.fail()
                raise

    return ensure_negative_conditioning


def keep_result(
    encoders: int, attributes: tuple[str, ...], prompt_of: Callable[[Any, Any], Any], *, keeps: bool
) -> Replace:
    """For a model whose own method encodes on every rank: it runs on one, and what it sets is kept.

    Args:
        encoders: how many text encoders the method uses.
        attributes: what it sets.
        prompt_of: the prompt it encodes, from the original method and the training configuration.
        keeps: as `text_encoding.once` takes it.
    """

    def replace(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        def keep(self: Any) -> None:
            def encode() -> dict[str, Any]:
                original(self)
                return {name: getattr(self, name) for name in attributes}

            if (where := seam.settings.encode_on) not in ("auto", "local"):
                name = type(self).__name__
                seam.notes.append(f"WANSHIM_ENCODE_ON={where} has no effect: {name} encodes on the rank's own device")
            config, dtype = self.training_config, self._get_training_dtype()
            request = text_encoding.name_request(
                config,
                text_encoding.model_folder(config),
                prompt_of(original, config),
                dtype,
                encoders=encoders,
                process=(original,),
            )
            encoded = text_encoding.once(encode, request, config.pipeline_config, self.device, self.device, seam, keeps)
            for name, tensor in encoded.items():
                setattr(self, name, tensor)

        return _where_needed(keep, original, seam)

    return replace


def ask_method_first(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """Before the models start: report when the training method never reads a negative prompt."""

    def on_train_start(self: Any) -> Any:
        models = [model for model in self._role_models.values() if _encodes_by_a_seam(model)]
        if models and needs_no_negative_prompt(self) and seam.enter():
            for model in models:
                setattr(model, _FLAG, False)
            seam.notes.append(f"{type(self).__name__} reads no negative prompt: nothing is encoded")
        return original(self)

    return on_train_start


def _encodes_by_a_seam(model: object) -> bool:
    """Whether the model's method is one of those replaced here. One of its own may do more than encode: that of Cosmos
    refuses settings that FastVideo cannot train with."""
    for kind in type(model).__mro__:
        if "ensure_negative_conditioning" in vars(kind):
            return f"{kind.__module__}:{kind.__qualname__}.ensure_negative_conditioning" in (WAN, HUNYUAN, KANDINSKY5)
    return False


def needs_no_negative_prompt(method: object) -> bool:
    """Whether a training method never uses the negative prompt; unknown methods count as using it."""
    kind = type(method)
    if f"{kind.__module__}.{kind.__qualname__}" in NEED_NO_NEGATIVE_PROMPT:
        return True
    policy = (getattr(method, "_cfg_uncond", None) or {}).get("text")
    return policy is not None and str(policy).strip().lower() != "negative_prompt"


def _seam(target: str, replace: Replace, why: str, *, required: bool = True) -> Seam:
    return Seam(
        target,
        replace,
        why=why,
        kind=Kind.WRAPT,
        required=required,
        upstream="https://github.com/hao-ai-lab/FastVideo/pull/1178",
        remove_when="FastVideo encodes the negative prompt once a machine and keeps it between runs",
    )


def wan_seam(why: str, *, keeps: bool) -> Seam:
    return _seam(WAN, partial(encode_wan, keeps=keeps), why)


def _preset_prompt(original: Callable[..., Any], training_config: Any) -> Any:
    """The model family's negative prompt, from the class that the original method itself asks: it has
    moved. As it is there: FastVideo's tokenizer takes a list too, and refuses None."""
    presets = original.__globals__["SamplingParam"]
    return presets.from_pretrained(training_config.model_path).negative_prompt


_EMBEDS = ("negative_prompt_embeds", "negative_prompt_attention_mask")


def hunyuan_seam(*, keeps: bool) -> Seam:
    return _seam(
        HUNYUAN,
        keep_result(2, _EMBEDS, lambda original, config: "", keeps=keeps),
        "every rank loads LLaMA-8B and CLIP to encode the same empty prompt",
        required=False,
    )


KANDINSKY5_SEAM = _seam(
    KANDINSKY5,
    keep_result(2, (*_EMBEDS, "negative_pooled_embeds"), _preset_prompt, keeps=True),
    "every rank loads Qwen2.5-VL-7B and CLIP to encode the same prompt",
    required=False,
)
TRAIN_START_SEAM = _seam(
    TRAIN_START, ask_method_first, "a method without guidance encodes a negative prompt that nothing reads"
)
WEIGHTS_SEAM = _seam(
    WEIGHTS,
    text_encoding.read_alone,
    "local rank 0 reads the weights and broadcasts them: a rank that loads alone would hang",
)
