"""Placement at full size, on CUDA devices that are not there: FakeTensorMode knows shapes and devices only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.contract.diffsynth import wan
from wanshim.core.model_split import split_model


@pytest.fixture(autouse=True)
def _bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake parameters cannot be cast by Module.to, so they are made in the dtype they need. There is nothing in them to
    fill."""
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda self: None)
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("i2v", 3),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (("t2v", 2), ("t2v", 3), ("t2v", 4), ("i2v", 2), ("i2v", 4))
        ),
    ],
)
def test_full_size_model_runs_forward_over_fake_devices(kind: str, stages: int) -> None:
    devices = [f"cuda:{i}" for i in range(stages)]
    per_stage = -(-40 // stages)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda:0"):
            model = wan.wan_model(kind, wan.FULL_SIZE)
        # A fake parameter cannot be moved by Module.to, so the blocks are made anew where the plan wants them.
        for i, block in enumerate(model.blocks):
            with torch.device(devices[i // per_stage]):
                model.blocks[i] = type(block)(kind == "i2v", 5120, 40, 13824, 1e-6)
        points = list(range(per_stage, 40, per_stage))
        handle = split_model(model, devices, points)
        like = {"device": "cuda:0", "dtype": torch.bfloat16}
        image = {"y": torch.empty((1, 20, 13, 60, 104), **like), "clip_feature": torch.empty((1, 257, 1280), **like)}
        output = wan.model_fn_wan_video(
            model,
            latents=torch.empty((1, 16, 13, 60, 104), **like),
            timestep=torch.empty((1,), **like),
            context=torch.empty((1, 512, 4096), **like),
            **(image if kind == "i2v" else {}),
        )
    assert output.shape == (1, 16, 13, 60, 104)
    assert str(output.device) == "cuda:0"
    for name, parameter in model.named_parameters():
        block = int(name.split(".")[1]) if name.startswith("blocks.") else 0
        assert str(parameter.device) == devices[block // per_stage], name
    assert [stage.num_bytes for stage in handle.plan.stages] == sorted(
        (stage.num_bytes for stage in handle.plan.stages), reverse=True
    )


def test_unbridged_model_fails_on_fake_devices() -> None:
    """What the test above rests on: a missing bridge is an error there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda:0"):
            model = wan.wan_model("t2v", {**wan.FULL_SIZE, "num_layers": 2})
        with torch.device("cuda:1"):
            model.blocks[1] = type(model.blocks[1])(False, 5120, 40, 13824, 1e-6)
        with pytest.raises(RuntimeError, match="device"):
            wan.model_fn_wan_video(
                model,
                latents=torch.empty((1, 16, 13, 60, 104), device="cuda:0"),
                timestep=torch.empty((1,), device="cuda:0"),
                context=torch.empty((1, 512, 4096), device="cuda:0"),
            )
