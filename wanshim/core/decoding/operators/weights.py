"""The weights as the fast operators want them: channels last, in the dtype of the decode.

Where only the layout differs it is changed in the module itself, by reference: the Parameter stays the same object
with the same values, and `restore()` puts the old layout back. Only a weight of another dtype (fp32 weights under
autocast) or one that a framework swaps in per call is copied, for the length of one decode.
"""

from __future__ import annotations

import torch

from wanshim.core.decoding.model.encoder_graph import Graph
from wanshim.core.decoding.model.graph import Conv

_Pair = tuple[torch.Tensor, "torch.Tensor | None"]


class FastWeights:
    """Looks up (weight, bias) of a convolution, ready for the fast operators."""

    def __init__(self, graph: Graph, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._relaid: dict[Conv, tuple[int, ...]] = {}
        self._pairs: dict[Conv, _Pair] = {}
        self._graph = graph

    def __enter__(self) -> FastWeights:
        for conv in self._graph.convs():
            self._pairs[conv] = self._prepare(conv)
        return self

    def __exit__(self, *error: object) -> None:
        self._pairs.clear()

    def of(self, conv: Conv) -> _Pair:
        return self._pairs[conv]

    def restore(self) -> None:
        """Put every weight back into the layout it was found in."""
        for conv, strides in self._relaid.items():
            weight = conv.module.weight
            if weight.stride() != strides:
                weight.data = torch.empty_strided(
                    weight.shape, strides, dtype=weight.dtype, device=weight.device
                ).copy_(weight.data)
        self._relaid.clear()

    def _prepare(self, conv: Conv) -> _Pair:
        module = conv.current()
        weight, bias = module.weight, module.bias
        layout = torch.channels_last_3d if weight.dim() == 5 else torch.channels_last
        if conv.resolve is None and weight.dtype == self.dtype:
            if not weight.is_contiguous(memory_format=layout):
                self._relaid.setdefault(conv, tuple(weight.stride()))
                weight.data = weight.data.contiguous(memory_format=layout)
            return weight.detach(), None if bias is None else bias.detach()
        cast = weight.detach().to(self.dtype).contiguous(memory_format=layout)
        return cast, None if bias is None else bias.detach().to(self.dtype)
