"""The tiny calls that the contract kit makes, one a feature."""

from __future__ import annotations

from typing import Any


def tiny_model() -> Any:
    import torch

    from tests.contract.diffsynth import wan

    torch.manual_seed(0)
    return wan.wan_model("t2v").eval()


def arguments() -> tuple[Any, ...]:
    from tests.contract.diffsynth import wan

    sample = wan.inputs()
    return sample["latents"], sample["timestep"], sample["context"]


def direct_forward() -> Any:
    """`WanModel.forward`, called as a user would."""
    import torch

    with torch.no_grad():
        return tiny_model()(*arguments())


def direct_forward_to_compile() -> tuple[Any, tuple[Any, ...]]:
    return tiny_model(), arguments()
