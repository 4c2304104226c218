"""`diffsynth.model_split`: a DiT over several devices under the unmodified `launch_training_task`.

`from_pretrained` loads the DiT to the host and splits it from there (`splitting/load.py`); LoRA, optimizer,
`model.to` and `accelerator.prepare` come later and find it split. A pipeline made another way is split when
`launch_training_task` receives it (`splitting/launch.py`). With WANSHIM_PLAN=stream it stays whole and its frozen
weights come from the host; with WANSHIM_PLAN=sequence every process has it, and the processes of a group train each
sample together (`splitting/sequence.py`). What is refused is in `splitting/refusals.py`, and where each module goes is
a table for each family of models (`splitting/wan.py`, `splitting/flux2.py`, `splitting/minimax_h3.py`). The split
itself is `wanshim.core.model_split`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from wanshim import hand_over
from wanshim.adapters.diffsynth.training_road import FAMILIES, LAUNCHER, MODEL_SPLIT, loop_seam
from wanshim.patching import Feature, Kind, Seam, SeamState
from wanshim.settings import Settings, visible_gpus

if TYPE_CHECKING:
    import torch


def _in(room: str, name: str, original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """The replacement `name` of a room of the split, which is imported when the seam goes in: `activate` needs to know
    only that it is there."""
    module = import_module(f"wanshim.adapters.diffsynth.splitting.{room}")
    return getattr(module, name)(original, seam)  # type: ignore[no-any-return]


def blocked(read: Settings) -> str | None:
    """Why these processes of one machine cannot have the plan, or each a split; None: they can."""
    processes, wanted = read.local_world_size, read.plan_name
    left_to_wanshim = wanted == "auto" and read.base is None and len(read.devices or ()) < 2
    if read.engine is not None and not left_to_wanshim:
        asking = ("base", "devices") if wanted == "auto" else ("plan", "devices", "base")
        asked = hand_over.as_written(next(filter(None, map(read.sources.get, asking)), MODEL_SPLIT))
        return f"{read.engine_named} and {asked} each take over the parameters: leave one of the two out"
    if wanted in ("stream", "sequence") or (wanted == "auto" and read.devices is None):
        return None  # one device a process, the one accelerate gives it
    if processes is None:
        return None  # the ranks count themselves when the model is loaded
    if read.local_rank >= processes:
        return f"LOCAL_RANK={read.local_rank} is outside LOCAL_WORLD_SIZE={processes}: the launcher must set both"
    if processes == 1:
        return None
    from wanshim.core.shared import gpus

    count = len(read.devices) if read.devices is not None else gpus.in_sight(visible_gpus())
    if count is None or (count >= 2 * processes and count % processes == 0):
        return None
    return (
        f"A split is one process over all its GPUs; {processes} were started for {count} devices: "
        "add --num_processes 1 (torchrun: --nproc_per_node 1), "
        f"or give each process as many devices, at least two: {2 * processes} in all"
    )


def _bring_together(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    def store(self: Any, hidden_states: torch.Tensor) -> Any:
        if seam.enter():
            if hidden_states.device == self.previous_hidden_states.device:
                seam.pass_by()
            hidden_states = hidden_states.to(self.previous_hidden_states.device)
        return original(self, hidden_states)

    return store


_LEDGER: dict[str, Any] = {
    "upstream": "https://github.com/modelscope/DiffSynth-Studio/pull/1436",
    "remove_when": "DiffSynth places a DiT over several devices itself",
}
FEATURE = Feature(
    name=MODEL_SPLIT,
    summary="a Wan, FLUX.2 or MiniMax-H3 DiT over several GPUs: split by blocks, pipelined, its frozen weights "
    "streamed, or each sample over a group of processes",
    switched_on_by=("devices", "plan"),
    needs_devices=2,
    blocked=blocked,
    families=FAMILIES,
    # without the plan a step would have other samples, or the model no room
    insists=lambda read: read.strict or read.plan_name not in (None, "auto") or read.base is not None,
    relies_on=(
        "diffsynth.pipelines.wan_video:model_fn_wan_video",
        "diffsynth.models.wan_video_dit:DiTBlock.forward",
        "diffsynth.models.wan_video_dit:rope_apply",  # in chunks, as are the norms
        "diffsynth.models.wan_video_dit:RMSNorm.forward",
        "diffsynth.models.wan_video_dit:SelfAttention.forward",  # where sequence parallel exchanges tokens for heads
        "diffsynth.models.wan_video_dit:AttentionModule.forward",
        "diffsynth.diffusion.base_pipeline:PipelineUnitRunner.__call__",  # whose units one rank of a group runs
        "diffsynth.models.flux2_dit:Flux2DiT.forward",
        "diffsynth.models.minimax_h3_dit:MiniMaxH3DiT.forward",
        "diffsynth.models.minimax_h3_dit:MiniMaxH3DiTBlock.forward",
        "diffsynth.models.minimax_h3_dit:MiniMaxH3Attention.forward",
        "diffsynth.models.minimax_h3_dit:_sdpa_varlen_attention",  # where it does so in MiniMax-H3's blocks
        "diffsynth.models.minimax_h3_dit_comfy:_comfy_attention_forward",
        "diffsynth.pipelines.minimax_h3_audio_video:model_fn_minimax_h3",
        "diffsynth.diffusion.base_pipeline:BasePipeline.to",
        "diffsynth.diffusion.training_module:DiffusionTrainingModule.to",
    ),
    seams=(
        Seam(
            "diffsynth.models.model_loader:ModelPool.load_model_file",
            partial(_in, "load", "load_to_host"),
            kind=Kind.WRAPT,
            why="loads the whole DiT onto one device, which a model that needs a split does not fit",
            **_LEDGER,
        ),
        *(
            Seam(
                f"diffsynth.pipelines.{target}.from_pretrained",
                partial(_in, "load", "split_after_loading"),
                kind=Kind.WRAPT,
                stacks=True,
                required=required,
                why=why,
                **{**_LEDGER, "upstream": f"https://github.com/modelscope/DiffSynth-Studio{upstream}"},
            )
            for target, upstream, why, required in (
                (
                    "wan_video:WanVideoPipeline",
                    "/pull/1436",
                    "the one place where every training and inference script gets its DiT",
                    True,
                ),
                ("flux2_image:Flux2ImagePipeline", "/pull/1434", "the same for FLUX.2", True),
                ("minimax_h3_audio_video:MiniMaxH3Pipeline", ": no issue is open", "the same for MiniMax-H3", False),
            )
        ),
        loop_seam(
            LAUNCHER,
            partial(_in, "own_loop", "with_plan"),
            why="moves the whole model to one device before training",
            **_LEDGER,
        ),
        loop_seam(
            "diffsynth.diffusion.runner:launch_data_process_task",
            partial(_in, "data_process", "over_processes"),
            required=False,
            why="encodes the first samples a second time where the processes have no equal parts",
            **_LEDGER,
        ),
        loop_seam(
            "diffsynth.diffusion.dmd2:launch_dmd2_training_task",
            partial(_in, "own_loop", "without_plan"),
            required=False,
            why="trains a student and a fake score in turn beside a teacher, whatever plan was asked for",
            **_LEDGER,
        ),
        Seam(
            "diffsynth.pipelines.wan_video:TeaCache.store",
            _bring_together,
            closure_because="a user who compiles model_fn_wan_video reaches it; DiffSynth compiles blocks alone",
            why="subtracts what entered the first block, on one device, from what left the last, on another",
            **_LEDGER,
        ),
    ),
)
