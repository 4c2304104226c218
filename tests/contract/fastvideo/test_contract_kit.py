"""Every feature of FastVideo under the contract kit."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial

import pytest

from tests.contract.fastvideo.conftest import needs_training
from tests.kit import Contract, contract_tests

TRAINING = "tests.contract.fastvideo.kit_training"
# FastVideo's kernels need a GPU driver to be imported; this module puts None in their place.
PREPARE = ("tests.contract.fastvideo.encode_ranks",)
# What importing FastVideo costs: once for all forks of a contract, it would be twice.
THIRD_PARTY = (
    "torch._inductor.compile_fx",
    "transformers.modeling_utils",
    "accelerate",
    "av",
    "datasets",
    "flashinfer",
    "peft",
    "ray",
)

pytestmark = [  # thirty processes a feature; `make matrix` runs it
    pytest.mark.slow,
    pytest.mark.kit,
    pytest.mark.timeout(1700),
    needs_training,
]

contract = partial(Contract, preload=THIRD_PARTY, timeout_s=1600.0)
PROMPT_CACHE = contract(
    feature="fastvideo.prompt_cache",
    call=f"{TRAINING}:encode_negative_prompt",
    calls={
        "fastvideo.train.models.wan.wan:WanModel.ensure_negative_conditioning": 1,
        "fastvideo.train.methods.base:TrainingMethod.on_train_start": 1,
        "fastvideo.models.loader.component_loader:TextEncoderLoader._get_weights_iterator": 1,
    },
    instance=f"{TRAINING}:conditioned",
    environment={"WANSHIM_CACHE_DIR": f"{tempfile.gettempdir()}/wanshim-contract-kit-cache-{os.getpid()}"},
    prepare=PREPARE,
)
CONTRACTS = (
    # Its releases encode on every rank, so it is checked on the installed one with the fault put back.
    replace(PROMPT_CACHE, feature="fastvideo.negative_prompt", source_tree=f"{TRAINING}:reproduce_rank_zero_only"),
    contract(
        feature="fastvideo.progress",
        call=f"{TRAINING}:train_by_trainer_and_pipeline",
        calls={
            "fastvideo.train.trainer:Trainer.run": 1,
            "fastvideo.training.training_pipeline:TrainingPipeline.train": 1,
        },
        instance=f"{TRAINING}:loops",
        environment={"WANSHIM_PROGRESS_DIR": f"{tempfile.gettempdir()}/wanshim-contract-kit"},
        prepare=PREPARE,
    ),
    PROMPT_CACHE,
    contract(
        feature="fastvideo.vae_decode",
        call="tests.contract.fastvideo.calls:decode_tiny",
        graph="tests.contract.fastvideo.calls:decode_to_compile",
        instance="tests.contract.fastvideo.calls:tiny_vae",
    ),
    contract(
        feature="fastvideo.vae_encode",
        call="tests.contract.fastvideo.calls:encode_tiny",
        graph="tests.contract.fastvideo.calls:encode_to_compile",
        instance="tests.contract.fastvideo.calls:tiny_vae",
    ),
)
test_contract = contract_tests(*CONTRACTS)
