"""`diffsynth.s2v_checkpointing`: train Wan2.2-S2V with gradient checkpointing.

DiffSynth checkpoints the audio injection as `lambda x: dit.after_transformer_block(block_id, x, ...)`. The
method writes into `x`, which autograd still needs: backward raises. And `block_id` is looked up when the
lambda runs, so in backward every block would be computed again as the last one: wrong gradients, silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanshim.errors import WanshimError
from wanshim.patching import Feature, Seam, SeamState

if TYPE_CHECKING:
    import torch


def _inject_out_of_place(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    numbers: Any = None  # input tensor -> the block it was first injected behind

    def after_transformer_block(
        self: Any, block_idx: int, hidden_states: torch.Tensor, *args: object, **kwargs: object
    ) -> Any:
        if not seam.enter():
            return original(self, block_idx, hidden_states, *args, **kwargs)
        import torch
        from torch.utils.weak import WeakTensorKeyDictionary

        nonlocal numbers
        if numbers is None:
            numbers = WeakTensorKeyDictionary()
        if torch._C._current_graph_task_id() == -1:
            numbers[hidden_states] = block_idx
        else:  # a checkpoint runs the injection again, with the tensor it was first given
            if hidden_states not in numbers:
                raise WanshimError(
                    "S2V's injection is computed again for a tensor that it was not given in forward: the block it "
                    "belongs to is not known, and the last one's would give wrong gradients",
                    expected="checkpoints that stay on the GPU",
                    hint="Leave --use_gradient_checkpointing_offload out",
                )
            block_idx = numbers[hidden_states]
        return original(self, block_idx, hidden_states.clone(), *args, **kwargs)

    return after_transformer_block


FEATURE = Feature(
    name="diffsynth.s2v_checkpointing",
    summary="Wan2.2-S2V trains with gradient checkpointing",
    auto=True,
    relies_on=("diffsynth.pipelines.wan_video:model_fn_wans2v",),
    seams=(
        Seam(
            "diffsynth.models.wan_video_dit_s2v:WanS2VModel.after_transformer_block",
            _inject_out_of_place,
            closure_because="a user who compiles the step around the model's blocks reaches it",
            why="writes into the tensor its checkpoint keeps, and is run again under the number of the last block",
            upstream="https://github.com/modelscope/DiffSynth-Studio: no issue is open; found by running it",
            remove_when="DiffSynth adds the injection out of place and binds block_id in its lambda",
        ),
    ),
)
