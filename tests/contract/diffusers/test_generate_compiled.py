"""A transformer that torch.compile has compiled, on a pipeline that is shared: workers compile their copies alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wanshim
from tests.contract import scripts
from tests.contract.diffusers import compiling, wan_pipelines
from tests.contract.diffusers.wan_pipelines import generate
from wanshim.errors import ModelInvalid

SCRIPT = "tests.contract.diffusers.compiling"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "backend"),
    [
        ("blocks", "inductor"),
        pytest.param("module", "inductor", marks=pytest.mark.sweep),
        pytest.param("torch", "inductor", marks=pytest.mark.sweep),
        pytest.param("offloaded", "inductor", marks=pytest.mark.sweep),
    ],
)
def test_script_that_compiles_has_its_frames_over_gpus(way: str, backend: str, tmp_path: Path) -> None:
    said = scripts.check_shared(tmp_path, SCRIPT, way, backend)
    off = "the guidance scale switches guidance off: a step has one forward"
    left = f"1 time: WanPipeline on one GPU: {off}; it is compiled as one device computes it"
    assert f"exercised, 4 calls of WanPipeline.__call__, of which left to the framework {left}" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["blocks", *(pytest.param(way, marks=pytest.mark.slow) for way in compiling.WAYS if way != "blocks")]
)
def test_copies_are_compiled_and_once_only(way: str, request: pytest.FixtureRequest) -> None:
    """Its backend rounds, which a copy that is not compiled does not."""
    pipe = wan_pipelines.wan()
    plain = generate(pipe, "wan")
    compiling.WAYS[way](pipe, backend=compiling.rounded)
    calls: list[dict[str, Any]] = [{}, {"num_frames": 9}, {"callback_on_step_end": lambda *_: {}}]
    expected = [generate(pipe, "wan", **each) for each in calls]
    assert not torch.equal(expected[0], plain)
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    found = [generate(pipe, "wan", **each) for each in calls]
    assert all(map(torch.equal, expected, found))
    assert handle.plan.guidance == 2


@pytest.mark.slow
def test_compiled_model_runs_by_guidance_alone(request: pytest.FixtureRequest) -> None:
    pipe = wan_pipelines.wan()
    compiling.WAYS["blocks"](pipe, backend="eager")
    handle = wanshim.parallelize_pipeline(pipe, gpus=4)
    request.addfinalizer(handle.remove)
    generate(pipe, "wan")
    assert (handle.plan.guidance, handle.plan.sequence) == (2, 1)
    assert "is compiled as one device computes it" in handle.plan.rejected["tokens over 4"]


def test_backend_of_the_program_itself_is_refused_by_name() -> None:
    pipe = wan_pipelines.wan()

    def backend(graph: Any, _: Any) -> Any:
        return graph

    compiling.WAYS["blocks"](pipe, backend=backend)
    with pytest.raises(ModelInvalid, match=r"transformer: .*cannot be copied to another process: .*backend"):
        wanshim.parallelize_pipeline(pipe, gpus=2)
