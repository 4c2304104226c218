"""`diffusers.strict_blocks`: the blocks of a Wan or Qwen-Image transformer with fewer kernels, and the same bits.

Between its matrix products and attentions a block normalizes, modulates, gates and turns queries and keys, each of
which takes several kernels over all tokens. Here each is one kernel that rounds where diffusers rounds. It is compared
with diffusers' own steps on the data at hand, and where it differs or fails these compute. It serves denoising: without
gradients, on a GPU, in bf16 or fp16, outside of torch.compile.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.strict_steps import steps_seam

if TYPE_CHECKING:
    import torch

    from wanshim.core.strict_blocks import StrictOperators

MODELS = "diffusers.models.transformers"


def wan_block(operators: StrictOperators, original: Any) -> Any:
    """`WanTransformerBlock.forward`."""

    def forward(self: Any, hidden_states: Any, encoder_hidden_states: Any, temb: Any, rotary_emb: Any) -> Any:
        given = (self, hidden_states, encoder_hidden_states, temb, rotary_emb)
        if not _has_known_norms(self):
            return original(*given)
        ours, theirs = partial(_wan, operators, *given), partial(original, *given)
        return operators.whole(self, ours, theirs, hidden_states, encoder_hidden_states, temb)

    return forward


def vace_block(operators: StrictOperators, original: Any) -> Any:
    """`WanVACETransformerBlock.forward`: Wan's block on the control's tokens, between two projections."""

    def vace(block: Any, hidden: Any, prompt: Any, control: Any, temb: Any, rotary: Any) -> Any:
        if block.proj_in is not None:
            control = block.proj_in(control) + hidden
        control = _wan(operators, block, control, prompt, temb, rotary)
        return None if block.proj_out is None else block.proj_out(control), control

    def forward(
        self: Any,
        hidden_states: Any,
        encoder_hidden_states: Any,
        control_hidden_states: Any,
        temb: Any,
        rotary_emb: Any,
    ) -> Any:
        given = (self, hidden_states, encoder_hidden_states, control_hidden_states, temb, rotary_emb)
        if not (_has_known_norms(self) and temb.ndim == 3):
            return original(*given)
        is_first, is_shown = self.proj_in is not None, self.proj_out is not None
        like = (control_hidden_states, encoder_hidden_states, temb, is_first, is_shown)
        return operators.whole(self, partial(vace, *given), partial(original, *given), *like)

    return forward


def attention(operators: StrictOperators, original: Any) -> Any:
    """`WanAttnProcessor.__call__`, where it turns queries and keys: in self-attention."""
    module = sys.modules[original.__module__]

    def call(
        self: Any,
        attn: Any,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        rotary_emb: Any = None,
    ) -> Any:
        of_others = (encoder_hidden_states, attention_mask, attn.add_k_proj, getattr(self, "_parallel_config", None))
        if rotary_emb is None or any(each is not None for each in of_others):
            return original(self, attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        query, key, value = module._get_qkv_projections(attn, hidden_states, None)
        # Both, as in diffusers, before either is read: where tokens go over GPUs they arrive behind the last norm.
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key = (_turned(operators, each, attn.heads, rotary_emb) for each in (query, key))
        value = value.unflatten(2, (attn.heads, -1))
        options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "backend": self._attention_backend}
        out = module.dispatch_attention_fn(query, key, value, **options).flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](out))

    return call


def qwen_block(operators: StrictOperators, original: Any) -> Any:
    """`QwenImageTransformerBlock.forward`."""

    def forward(
        self: Any,
        hidden_states: Any,
        encoder_hidden_states: Any,
        encoder_hidden_states_mask: Any,
        temb: Any,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: Any = None,
        modulate_index: Any = None,
    ) -> Any:
        streams = hidden_states, encoder_hidden_states
        given = (self, *streams, encoder_hidden_states_mask, temb, image_rotary_emb, joint_attention_kwargs)
        given += () if modulate_index is None else (modulate_index,)  # an argument of 0.37 and later
        ours, theirs = partial(_qwen, operators, *given), partial(original, *given)
        return operators.whole(self, ours, theirs, *streams, encoder_hidden_states_mask, temb, modulate_index)

    return forward


def qwen_attention(operators: StrictOperators, original: Any) -> Any:
    """`QwenDoubleStreamAttnProcessor2_0.__call__`. Its norms of queries and keys turn these, too, and it is given no
    angles: so the joint attention of every release, with its masks, stays diffusers' own."""
    module = sys.modules[original.__module__]

    def call(self: Any, attn: Any, hidden_states: Any, *args: Any, image_rotary_emb: Any = None, **kwargs: Any) -> Any:
        if image_rotary_emb is None:
            return original(self, attn, hidden_states, *args, **kwargs)
        changed = copy.copy(attn)
        for angles, names in zip(image_rotary_emb, (("norm_q", "norm_k"), ("norm_added_q", "norm_added_k"))):
            for name in names:  # an attribute comes before the submodule of that name, which both share
                changed.__dict__[name] = partial(_normed_and_turned, operators, module, getattr(attn, name), angles)
        return original(self, changed, hidden_states, *args, **kwargs)

    return call


def _has_known_norms(block: Any) -> bool:
    from diffusers.models.normalization import FP32LayerNorm

    return type(block.norm1) is type(block.norm3) is FP32LayerNorm


def _wan(operators: StrictOperators, block: Any, x: Any, prompt: Any, temb: Any, rotary: Any) -> torch.Tensor:
    """The result of `WanTransformerBlock.forward`."""
    if temb.ndim == 4:  # an embedding for each token, as of TI2V
        modulation = [each.squeeze(2) for each in (block.scale_shift_table.unsqueeze(0) + temb.float()).chunk(6, 2)]
    else:
        modulation = list((block.scale_shift_table.to(temb.device) + temb.float()).chunk(6, 1))
    shift, scale, gate, last_shift, last_scale, last_gate = modulation
    x = x.contiguous()  # before 0.42 the first block has the patches transposed, and so had all others
    x = operators.gated(x, gate, block.attn1(operators.normalized(x, block.norm1, scale, shift), None, None, rotary))
    is_norm = type(block.norm2) is type(block.norm1)
    normed = operators.affine(x, block.norm2) if is_norm else block.norm2(x.float()).type_as(x)
    x = x + block.attn2(normed, prompt, None, None)
    return operators.gated(x, last_gate, block.ffn(operators.normalized(x, block.norm3, last_scale, last_shift)))


def _turned(operators: StrictOperators, x: torch.Tensor, heads: int, rotary: tuple[Any, Any]) -> torch.Tensor:
    """(batch, tokens, heads, channels of a head), as `apply_rotary_emb` in the processor of diffusers turns them."""
    import torch

    cosine, sine = rotary
    whole = x.unflatten(2, (heads, -1))

    def steps() -> torch.Tensor:
        even, odd = whole.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cosine[..., 0::2], sine[..., 1::2]
        out = torch.empty_like(whole)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out.type_as(whole)

    angles = (1, x.shape[1], 1, whole.shape[-1])
    fits = all(each.shape == angles and each.is_contiguous() and each.dtype == torch.float32 for each in rotary)
    if not (fits and x.is_contiguous()):
        return steps()
    return operators.rotated(x, rotary, whole.shape[-1], steps).view(whole.shape)


def _qwen(
    operators: StrictOperators,
    block: Any,
    x: Any,
    text: Any,
    mask: Any,
    temb: Any,
    rotary: Any,
    options: Any,
    index: Any = None,
) -> tuple[Any, Any]:
    """The result of `QwenImageTransformerBlock.forward`."""
    import torch

    x, text = x.contiguous(), text.contiguous()
    first, last = block.img_mod(temb).chunk(2, -1)
    if getattr(block, "zero_cond_t", False):  # its second half is for tokens of a picture that is edited
        temb = temb.chunk(2)[0]
    text_first, text_last = block.txt_mod(temb).chunk(2, -1)
    normed, gate = _modulated(operators, block.img_norm1(x), first, index)
    text_normed, text_gate = _modulated(operators, block.txt_norm1(text), text_first)
    given = {"encoder_hidden_states": text_normed, "encoder_hidden_states_mask": mask, "image_rotary_emb": rotary}
    out, text_out = block.attn(hidden_states=normed, **given, **(options or {}))
    x, text = operators.gated(x, gate, out), operators.gated(text, text_gate, text_out)
    normed, gate = _modulated(operators, block.img_norm2(x), last, index)
    x = operators.gated(x, gate, block.img_mlp(normed))
    normed, gate = _modulated(operators, block.txt_norm2(text), text_last)
    text = operators.gated(text, gate, block.txt_mlp(normed))
    limit = torch.finfo(torch.float16).max
    text, x = (each.clip(-limit, limit) if each.dtype == torch.float16 else each for each in (text, x))
    return text, x


def _modulated(operators: StrictOperators, x: Any, parameters: Any, index: Any = None) -> tuple[Any, Any]:
    """The result of `QwenImageTransformerBlock._modulate`."""
    import torch

    parts = parameters.unsqueeze(1).chunk(3, -1)
    if index is not None:  # which of two each token takes
        parts = [torch.where(index.unsqueeze(-1) == 0, *part.chunk(2)) for part in parts]
    shift, scale, gate = parts
    return operators.modulated(x, scale, shift), gate


def _normed_and_turned(operators: StrictOperators, module: Any, norm: Any, angles: Any, x: torch.Tensor) -> Any:
    """(batch, tokens, heads, channels of a head), by the norm and then by `apply_rotary_emb_qwen`."""
    import torch

    from wanshim.core.shared.plain import why_not_plain

    is_known = type(norm) is module.RMSNorm and not why_not_plain((norm,)) and x.is_contiguous()
    if is_known and norm.bias is None and norm.weight is not None and norm.weight.dtype == x.dtype:
        x = operators.rms(x.flatten(2), norm.weight, norm.eps, partial(norm, x)).view(x.shape)
    elif norm is not None:
        x = norm(x)
    steps = partial(module.apply_rotary_emb_qwen, x, angles, use_real=False)
    fits = angles.shape == (x.shape[1], x.shape[-1] // 2) and angles.dtype == torch.complex64
    if not (fits and angles.is_contiguous() and x.is_contiguous()):
        return steps()
    return operators.rotated(x.flatten(2), angles, x.shape[-1], steps).view(x.shape)


def _seam(target: str, method: Any, tokens: int) -> Seam:
    return steps_seam(
        f"{MODELS}.{target}",
        method,
        tokens,
        "hidden_states",
        required=target.startswith("transformer_wan:"),
        upstream="https://github.com/huggingface/diffusers (torch.compile fuses them, and changes bits)",
        remove_when="diffusers' blocks are as fast, with the same bits",
    )


FEATURE = Feature(
    name="diffusers.strict_blocks",
    summary="a Wan or Qwen-Image transformer's blocks with fewer kernels, the same bits",
    switched_on_by="generate",
    families={"Wan": ("transformer_wan",), "Qwen-Image": ("transformer_qwenimage",)},
    relies_on=(
        f"{MODELS}.transformer_wan:_get_qkv_projections",
        f"{MODELS}.transformer_qwenimage:QwenImageTransformerBlock._modulate",
        "diffusers.models.normalization:FP32LayerNorm.forward",
    ),
    seams=(
        _seam("transformer_wan:WanTransformerBlock.forward", wan_block, 1),
        _seam("transformer_wan:WanAttnProcessor.__call__", attention, 2),
        _seam("transformer_wan_vace:WanVACETransformerBlock.forward", vace_block, 1),
        _seam("transformer_wan_animate:WanTransformerBlock.forward", wan_block, 1),  # 0.36 and later
        _seam("transformer_wan_animate:WanAttnProcessor.__call__", attention, 2),
        _seam("transformer_qwenimage:QwenImageTransformerBlock.forward", qwen_block, 1),
        _seam("transformer_qwenimage:QwenDoubleStreamAttnProcessor2_0.__call__", qwen_attention, 2),
    ),
)
