"""The next step of an error, by its topic: core code names the topic, for it knows no variable and no flag."""

from __future__ import annotations

from wanshim.errors import ADVICE

ADVICE |= {
    "cache_directory": ", or name another directory with WANSHIM_CACHE_DIR, for DiffSynth's with WANSHIM_ENCODE_CACHE",
    "checkpointing": "Pass --use_gradient_checkpointing, or run the block under torch.no_grad()",
    "chunk_off": "Train without LoRA dropout, or set WANSHIM_CHUNK=off",
    "compile_off": "Set WANSHIM_COMPILE=0",
    "compute_off": "Set WANSHIM_COMPUTE=off",
    "encode_on_cpu": "Set WANSHIM_ENCODE_ON=cpu, or free memory before the prompt is encoded",
    "encode_timeout": "Look at that process, or raise WANSHIM_ENCODE_TIMEOUT_S",
    "existing_devices": "Fix WANSHIM_DEVICES or CUDA_VISIBLE_DEVICES",
    "install_torchao": "Run `pip install 'wanshim[torchao]'`, or unset WANSHIM_BASE",
    "keep_off": "Set WANSHIM_KEEP=off",
    "locked_memory": "Check `free -g` and `ulimit -l`; in a container raise its memory limit and --ulimit memlock",
    "name_devices": "Name at least two devices in WANSHIM_DEVICES",
    "pipeline_off": "Switch the pipeline off with WANSHIM_PIPELINE=0",
    "rounded_base": "Unset WANSHIM_BASE: the values are rounded already",
    "same_environment": "Start every rank with the same environment and the same WANSHIM_* variables; "
    "`wanshim doctor` shows what a machine has",
    "split_at": "Fix WANSHIM_SPLIT_AT, or unset it to balance the stages by bytes",
    "stream_off": "Set WANSHIM_PLAN=auto, which streams blocks only if the model does not fit otherwise",
    "trained_base": "Unset WANSHIM_BASE if the base itself is trained",
    "vae_timeout": "Raise WANSHIM_VAE_TIMEOUT_S for a rank that is only late. If each rank has videos of its own, set "
    "WANSHIM_VAE_MODE=off, and WANSHIM_VAE_ENCODE=off",
}
