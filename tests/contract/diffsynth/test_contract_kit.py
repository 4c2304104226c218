"""Every feature of DiffSynth under the contract kit."""

from __future__ import annotations

import tempfile
from functools import partial

import pytest

from tests.kit import Contract, contract_tests

CALLS = "tests.contract.diffsynth.calls"
DIT = "diffsynth.models.wan_video_dit"
TRAINING = "tests.contract.diffsynth.kit_training"

# What importing DiffSynth costs: once for all forks of a contract, it would be twice.
THIRD_PARTY = (
    "torch._inductor.compile_fx",
    "transformers.modeling_utils",
    "accelerate",
    "imageio",
    "modelscope",
    "pandas",
    "peft",
    "torchvision",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.kit,
    pytest.mark.timeout(1700),
]  # thirty processes a feature; `make matrix` runs it

RUNNER = ("diffsynth.diffusion.runner", "diffsynth.diffusion")
contract = partial(Contract, preload=THIRD_PARTY, timeout_s=1600.0)
training = partial(contract, call=f"{TRAINING}:train_one_step", modules=RUNNER)
CONTRACTS = (
    contract(
        feature="diffsynth.attention_gradient",
        call=f"{CALLS}:train_through_sage",
        calls={"diffsynth.models.wan_video_dit:flash_attention": 4},  # self- and cross-attention of two blocks
        graph=f"{CALLS}:attention_to_compile",
    ),
    training(feature="diffsynth.checkpoint_offload", environment={"WANSHIM_OFFLOAD": "on"}),
    training(feature="diffsynth.compiled_blocks", environment={"WANSHIM_COMPILE": "1"}),
    training(feature="diffsynth.eight_bit_compute", environment={"WANSHIM_COMPUTE": "int8"}),
    training(feature="diffsynth.encode_cache", environment={"WANSHIM_ENCODE_CACHE": tempfile.mkdtemp()}),
    contract(
        feature="diffsynth.fp8_lora",
        call=f"{CALLS}:cast_with_lora",
        graph=f"{CALLS}:managed_layer_to_compile",
        instance=f"{CALLS}:managed_layer",
    ),
    contract(
        feature="diffsynth.fast_blocks",
        call=f"{CALLS}:forward_in_eight_bits",
        calls={"diffsynth.pipelines.wan_video:model_fn_wan_video": 1},
        graph=f"{CALLS}:block_to_compile",
        instance=f"{CALLS}:tiny_block",
        environment={"WANSHIM_COMPUTE": "int8", "WANSHIM_COMPILE": "0"},
    ),
    contract(
        feature="diffsynth.generate",
        call=f"{CALLS}:generate_tiny",
        graph=f"{CALLS}:model_fn_to_compile",
        calls={"diffsynth.pipelines.wan_video:WanVideoPipeline.__call__": 1},  # what is watched counts other calls
    ),
    contract(feature="diffsynth.gradient_accumulation", call=f"{TRAINING}:train_two_accumulated", modules=RUNNER),
    training(feature="diffsynth.kept_attention", environment={"WANSHIM_KEEP": "attention"}),
    contract(
        feature="diffsynth.model_split",
        call=f"{TRAINING}:load_train_and_cache",
        calls={
            "diffsynth.models.model_loader:ModelPool.load_model_file": 3,
            "diffsynth.pipelines.wan_video:WanVideoPipeline.from_pretrained": 1,
            "diffsynth.pipelines.flux2_image:Flux2ImagePipeline.from_pretrained": 1,
            "diffsynth.diffusion.runner:launch_training_task": 1,
            "diffsynth.pipelines.wan_video:TeaCache.store": 1,
        },
        instance=f"{TRAINING}:patched_objects",
        environment={"WANSHIM_DEVICES": "cpu,cpu"},
    ),
    contract(
        feature="diffsynth.patchify",
        call=f"{CALLS}:direct_forward",
        graph=f"{CALLS}:direct_forward_to_compile",
        instance=f"{CALLS}:tiny_model",
    ),
    contract(
        feature="diffsynth.progress",
        call=f"{TRAINING}:train_one_step",
        calls={
            "diffsynth.diffusion.runner:launch_training_task": 1,
            "diffsynth.diffusion.logger:ModelLogger.on_step_end": 1,
            "diffsynth.diffusion.logger:ModelLogger.on_epoch_end": 1,
        },
        instance=f"{TRAINING}:logger",
        environment={"WANSHIM_PROGRESS_DIR": f"{tempfile.gettempdir()}/wanshim-contract-kit"},
    ),
    training(
        feature="diffsynth.resume",
        environment={"WANSHIM_RESUME": "auto"},  # the folder of the call is a new one
    ),
    contract(
        feature="diffsynth.s2v_checkpointing",
        call=f"{CALLS}:inject_sound",
        graph=f"{CALLS}:inject_sound_to_compile",
        instance=f"{CALLS}:tiny_s2v",
    ),
    contract(
        feature="diffsynth.strict_blocks",
        call=f"{CALLS}:forward_by_kernels",
        calls={
            f"{DIT}:modulate": 4,
            f"{DIT}:GateModule.forward": 4,
            f"{DIT}:RMSNorm.forward": 8,
            f"{DIT}:rope_apply": 4,
        },
        graph=f"{CALLS}:model_fn_to_compile",
        instance=f"{CALLS}:gate_and_norm",
        environment={"TRITON_INTERPRET": "1"},
    ),
    contract(feature="diffsynth.vae_decode", call=f"{CALLS}:decode_tiny", instance=f"{CALLS}:tiny_vae"),
    contract(feature="diffsynth.vae_encode", call=f"{CALLS}:encode_tiny", instance=f"{CALLS}:tiny_vae"),
)
test_contract = contract_tests(*CONTRACTS)
