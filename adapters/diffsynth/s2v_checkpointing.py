"""`diffsynth.s2v_checkpointing`: train Wan2.2-S2V with gradient checkpointing.

DiffSynth checkpoints the audio injection as `lambda x: dit.after_transformer_block(block_id, x, ...)`. The
method writes into `x`, which autograd still needs: backward raises. And `block_id` is looked up when the
lambda runs, so in backward every block would be computed again as the last one: wrong gradients, silently. With
checkpoints on the host, as DiffSynth's own script has them, nothing raises and the gradients are wrong.

A checkpoint computes again when backward comes to a node of its first graph; each node carries its block's number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wanshim.errors import WanshimError
from wanshim.patching import Feature, Seam, SeamState

if TYPE_CHECKING:
    import torch

NUMBER, TASK = "wanshim.s2v.number", "wanshim.s2v.task"  # in a node's metadata


def _inject_out_of_place(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    def after_transformer_block(
        self: Any, block_idx: int, hidden_states: torch.Tensor, *args: object, **kwargs: object
    ) -> Any:
        if not seam.enter():
            return original(self, block_idx, hidden_states, *args, **kwargs)
        import torch

        # Without gradients it is no checkpoint's, but an evaluation in a hook of backward.
        node = torch._C._current_autograd_node() if torch.is_grad_enabled() else None
        if node is None:
            result = original(self, block_idx, hidden_states.clone(), *args, **kwargs)
            _number_nodes(result, (hidden_states, *args, *kwargs.values()), block_idx)
            return result
        task = torch._C._current_graph_task_id()
        if NUMBER not in node.metadata or node.metadata.get(TASK) == task:
            raise WanshimError(
                "S2V's injection is computed again for a node of the graph that it did not make, or behind another "
                "one: the block it belongs to is not known, and the last one's would give wrong gradients",
                expected="a checkpoint for each injection, by torch.utils.checkpoint with use_reentrant=False",
                hint="Train without DeepSpeed's own checkpointing, and with no checkpoint around several blocks",
            )
        node.metadata[TASK] = task
        return original(self, node.metadata[NUMBER], hidden_states.clone(), *args, **kwargs)

    return after_transformer_block


def _number_nodes(result: torch.Tensor, given: Sequence[object], number: int) -> None:
    """Mark the nodes between the arguments of an injection and its result: of these alone a checkpoint has tensors."""
    before = {getattr(each, "grad_fn", None) for each in given}
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in before and node.next_functions and NUMBER not in node.metadata:
            node.metadata[NUMBER] = number
            waiting.extend(each for each, _ in node.next_functions)


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
