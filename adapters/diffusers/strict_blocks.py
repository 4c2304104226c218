"""`diffusers.strict_blocks`: the blocks of a Wan transformer with fewer kernels, and the same bits.

Between its matrix products and attentions a block normalizes, modulates, gates and turns queries and keys, each of
which takes several kernels over all tokens. Here each is one kernel that rounds where diffusers rounds. It is compared
with diffusers' own steps on the data at hand, and where it differs or fails these compute. It serves denoising: without
gradients, on a GPU, in bf16 or fp16, outside of torch.compile.
"""

from __future__ import annotations

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
        query = _turned(operators, attn.norm_q(query), attn.heads, rotary_emb)
        key = _turned(operators, attn.norm_k(key), attn.heads, rotary_emb)
        value = value.unflatten(2, (attn.heads, -1))
        options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "backend": self._attention_backend}
        out = module.dispatch_attention_fn(query, key, value, **options).flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](out))

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
    summary="a Wan transformer's blocks with fewer kernels, the same bits",
    switched_on_by="generate",
    relies_on=(
        f"{MODELS}.transformer_wan:_get_qkv_projections",
        "diffusers.models.normalization:FP32LayerNorm.forward",
    ),
    seams=(
        _seam("transformer_wan:WanTransformerBlock.forward", wan_block, 1),
        _seam("transformer_wan:WanAttnProcessor.__call__", attention, 2),
        _seam("transformer_wan_vace:WanVACETransformerBlock.forward", vace_block, 1),
        _seam("transformer_wan_animate:WanTransformerBlock.forward", wan_block, 1),  # 0.36 and later
        _seam("transformer_wan_animate:WanAttnProcessor.__call__", attention, 2),
    ),
)
