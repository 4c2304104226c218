"""Adapters hand the framework's own group of ranks on, and how many of its ranks work: groups are smaller than a job.

The frameworks' jobs (`tests/contract/FRAMEWORK`) have one group of all ranks, so they see no difference; what a group
smaller than the job does is tested in `tests/distributed/decoding/test_groups.py`. FastVideo and vLLM-Omni do not run
without a GPU's kernels: doubles stand for their groups, executors and VAEs.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from wanshim.core.decoding import VaeCache
from wanshim.patching import SeamState
from wanshim.select.catalog import discover

GROUP = object()
TILES = dict.fromkeys(
    ("tile_sample_min_height", "tile_sample_min_width", "tile_sample_stride_height", "tile_sample_stride_width"), 8
)
EXECUTOR = SimpleNamespace(group=GROUP, parallel_size=3)
FASTVIDEO = SimpleNamespace(
    use_feature_cache=True, config=None, encoder=None, dtype=torch.float32, temporal_window=4, model=None,
    scale=(torch.zeros(4), torch.ones(4)), _scale=lambda like: (0.0, 1.0),
)  # fmt: skip
VLLM_OMNI = SimpleNamespace(
    use_slicing=False, use_tiling=True, is_distributed_enabled=lambda: True, distributed_executor=EXECUTOR, **TILES
)
WRAPPER = SimpleNamespace(_vae=VLLM_OMNI, _group_getter=lambda: GROUP, _vae_patch_parallel_size=2)
CALLS = [
    *(("fastvideo.vae_decode", index, FASTVIDEO, {"group": GROUP}) for index in range(3)),
    *(("fastvideo.vae_encode", index, FASTVIDEO, {"group": GROUP}) for index in range(3)),
    ("vllm_omni.vae_allowlist", 1, WRAPPER, {"group": GROUP, "active": 2}),
    ("vllm_omni.vae_decode", 0, VLLM_OMNI, {"group": GROUP, "active": 3}),
    ("vllm_omni.vae_decode", 1, VLLM_OMNI, {"group": GROUP, "active": 3}),
    ("vllm_omni.vae_encode", 0, VLLM_OMNI, {"group": GROUP, "active": 3}),
]


class Handed(BaseException):
    """A call ends with what it hands on: no error that would leave it to the framework."""


@pytest.fixture(autouse=True)
def _groups_of_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ModuleType("parallel_state")
    state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    state.get_sp_group = lambda: SimpleNamespace(device_group=GROUP)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastvideo.distributed.parallel_state", state)

    def run(self: VaeCache, vae: Any, given: torch.Tensor, options: Any, **handed: Any) -> None:
        raise Handed(vae, handed)

    monkeypatch.setattr(VaeCache, "run", run)


@pytest.mark.parametrize(
    ("feature", "index", "vae", "expected"), CALLS, ids=[f"{feature} {index}" for feature, index, *_ in CALLS]
)
def test_call_of_a_vae_goes_to_the_framework_s_group_and_its_active_ranks(
    feature: str, index: int, vae: Any, expected: dict[str, Any]
) -> None:
    state = SeamState(discover().features[feature].seams[index])
    state.off = False
    method = state.seam.replace(lambda *_: pytest.fail("left to the framework"), state)
    with pytest.raises(Handed) as call:
        method(vae, torch.zeros(1, 4, 5, 8, 8))
    handed_vae, handed = call.value.args
    assert handed_vae is (WRAPPER._vae if vae is WRAPPER else vae)
    assert handed["group"] is GROUP
    assert {name: handed[name] for name in expected} == expected
