"""A script of a user who compiles the transformer, in the way and by the backend that its arguments name: it makes
videos of two sizes, two at once, with a LoRA that is on from the third call on. Writes frames.pt."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig
from torch.utils._pytree import tree_map_only

from tests.contract.diffusers import wan_pipelines


def by_torch(pipe: Any, **options: Any) -> None:
    pipe.transformer = torch.compile(pipe.transformer, **options)


def offloaded(pipe: Any, **options: Any) -> None:
    pipe.enable_model_cpu_offload(device="cpu")
    pipe.transformer.compile_repeated_blocks(**options)


def rounded(graph: Any, _: Any) -> Callable[..., Any]:
    """A backend whose graphs return values of bfloat16."""

    def compute(*args: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.bfloat16().to(tensor.dtype), graph(*args))

    return compute


WAYS: dict[str, Callable[..., Any]] = {
    "blocks": lambda pipe, **options: pipe.transformer.compile_repeated_blocks(**options),
    "module": lambda pipe, **options: pipe.transformer.compile(**options),
    "torch": by_torch,
    "offloaded": offloaded,
}

if __name__ == "__main__":
    way, backend = sys.argv[1:3]
    pipe = wan_pipelines.wan()
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), "lora")
    pipe.transformer.disable_adapters()
    WAYS[way](pipe, backend=backend)
    made = [wan_pipelines.generate(pipe, "wan", prompts=2), wan_pipelines.generate(pipe, "wan", num_frames=9)]
    pipe.transformer.enable_adapters()
    made += [wan_pipelines.generate(pipe, "wan"), wan_pipelines.generate(pipe, "wan", guidance_scale=1.0)]
    torch.save(made, "frames.pt")
