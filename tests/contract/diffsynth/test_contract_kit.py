"""Every feature of DiffSynth under the contract kit."""

from __future__ import annotations

import tempfile

import pytest

from wanshim.testing import Contract, contract_tests

CALLS = "tests.contract.diffsynth.calls"
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

CONTRACTS = (
    Contract(
        feature="diffsynth.checkpoint_offload",
        call=f"{TRAINING}:train_one_step",
        preload=THIRD_PARTY,
        modules=("diffsynth.diffusion.runner", "diffsynth.diffusion"),
        environment={"WANSHIM_OFFLOAD": "on"},
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffsynth.compiled_blocks",
        call=f"{TRAINING}:train_one_step",
        preload=THIRD_PARTY,
        modules=("diffsynth.diffusion.runner", "diffsynth.diffusion"),
        environment={"WANSHIM_COMPILE": "1"},
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffsynth.eight_bit_compute",
        call=f"{TRAINING}:train_one_step",
        preload=THIRD_PARTY,
        modules=("diffsynth.diffusion.runner", "diffsynth.diffusion"),
        environment={"WANSHIM_COMPUTE": "int8"},
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffsynth.fp8_lora",
        call=f"{CALLS}:cast_with_lora",
        preload=THIRD_PARTY,
        graph=f"{CALLS}:managed_layer_to_compile",
        instance=f"{CALLS}:managed_layer",
    ),
    Contract(
        feature="diffsynth.generate",
        call=f"{CALLS}:generate_tiny",
        preload=THIRD_PARTY,
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffsynth.gradient_accumulation",
        call=f"{TRAINING}:train_two_accumulated",
        preload=THIRD_PARTY,
        modules=("diffsynth.diffusion.runner", "diffsynth.diffusion"),
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffsynth.kept_attention",
        call=f"{TRAINING}:train_one_step",
        preload=THIRD_PARTY,
        modules=("diffsynth.diffusion.runner", "diffsynth.diffusion"),
        environment={"WANSHIM_KEEP": "attention"},
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffsynth.model_split",
        call=f"{TRAINING}:load_train_and_cache",
        preload=THIRD_PARTY,
        calls={
            "diffsynth.models.model_loader:ModelPool.load_model_file": 3,
            "diffsynth.pipelines.wan_video:WanVideoPipeline.from_pretrained": 1,
            "diffsynth.pipelines.flux2_image:Flux2ImagePipeline.from_pretrained": 1,
            "diffsynth.diffusion.runner:launch_training_task": 1,
            "diffsynth.pipelines.wan_video:TeaCache.store": 1,
        },
        instance=f"{TRAINING}:patched_objects",
        environment={"WANSHIM_DEVICES": "cpu,cpu"},
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffsynth.patchify",
        call=f"{CALLS}:direct_forward",
        preload=THIRD_PARTY,
        graph=f"{CALLS}:direct_forward_to_compile",
        instance=f"{CALLS}:tiny_model",
    ),
    Contract(
        feature="diffsynth.progress",
        call=f"{TRAINING}:train_one_step",
        preload=THIRD_PARTY,
        calls={
            "diffsynth.diffusion.runner:launch_training_task": 1,
            "diffsynth.diffusion.logger:ModelLogger.on_step_end": 1,
            "diffsynth.diffusion.logger:ModelLogger.on_epoch_end": 1,
        },
        instance=f"{TRAINING}:logger",
        environment={"WANSHIM_PROGRESS_DIR": f"{tempfile.gettempdir()}/wanshim-contract-kit"},
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffsynth.resume",
        call=f"{TRAINING}:train_one_step",
        preload=THIRD_PARTY,
        modules=("diffsynth.diffusion.runner", "diffsynth.diffusion"),
        environment={"WANSHIM_RESUME": "auto"},  # the folder of the call is a new one
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffsynth.s2v_checkpointing",
        call=f"{CALLS}:inject_sound",
        preload=THIRD_PARTY,
        graph=f"{CALLS}:inject_sound_to_compile",
        instance=f"{CALLS}:tiny_s2v",
    ),
    Contract(
        feature="diffsynth.vae_decode",
        call=f"{CALLS}:decode_tiny",
        preload=THIRD_PARTY,
        instance=f"{CALLS}:tiny_vae",
    ),
    Contract(
        feature="diffsynth.vae_encode",
        call=f"{CALLS}:encode_tiny",
        preload=THIRD_PARTY,
        instance=f"{CALLS}:tiny_vae",
    ),
)
test_contract = contract_tests(*CONTRACTS)
