"""`diffsynth.gradient_accumulation`: every micro-batch of an accumulated step counts.

The training loop of DiffSynth 2.0.0 to 2.0.9 clears the gradients before the forward. accelerate lets the optimizer act
on the last micro-batch of a step alone, and so the call that should begin a step falls just before its last backward:
with `--gradient_accumulation_steps 4` three of four samples are computed and thrown away, and nothing says so. Here
that call acts before the first micro-batch of a step and on no other. With an accumulation of 1 the loop is left as it
is.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.training_road import LAUNCHER, TrainingCall, loop_seam
from wanshim.patching import Feature, Finding, SeamState, SourceTree
from wanshim.patching.verdict import Verdict
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

ACCUMULATES_ITSELF = ("DEEPSPEED", "MEGATRON_LM")  # their engines clear the gradients; accelerate's call does nothing


class GradientsOfOneStep:
    """Clears the gradients before the first micro-batch of each step, in place of one optimizer's `zero_grad`."""

    def __init__(self, accelerator: Any, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator = accelerator
        self.optimizer = optimizer
        self.step_begins = True  # what an earlier task left behind is cleared, as the loop's own first call would

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """The method that the loop calls in every micro-batch, before its forward."""
        if self.step_begins:
            given = {} if set_to_none is None else {"set_to_none": set_to_none}
            self.optimizer.optimizer.zero_grad(**given)  # accelerate's own acts on the last micro-batch alone
        self.step_begins = self.accelerator.sync_gradients


def keep_until_the_step(accelerator: Any, undo: Undo) -> None:
    """Until `undo` ends, the optimizers that the loop prepares clear their gradients once a step."""
    from accelerate.optimizer import AcceleratedOptimizer

    from wanshim.adapters.diffsynth.splitting.pipelined_loop import after_prepare

    waiting: list[Any] = []

    def note(item: object) -> None:
        if isinstance(item, AcceleratedOptimizer):
            waiting.append(item)

    def accumulate(original: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*models: object, **kwargs: object) -> Any:
            # Not in `prepare`: a split's pipeline takes over there and waits at the calls it sees.
            while waiting:
                _take_over(waiting.pop(), accelerator, undo)
            return original(*models, **kwargs)

        return entered

    after_prepare(accelerator, undo, note)
    undo.replace(accelerator, "accumulate", accumulate)


def _take_over(optimizer: Any, accelerator: Any, undo: Undo) -> None:
    """The loop made this optimizer, and a pipeline may replace its `zero_grad` too and end before or after: so none is
    restored, the attribute is removed."""
    optimizer.zero_grad = GradientsOfOneStep(accelerator, optimizer).zero_grad
    undo.add(lambda: vars(optimizer).pop("zero_grad", None))


def _loses_micro_batches(call: TrainingCall) -> bool:
    accelerator = call.accelerator
    itself = accelerator.distributed_type.name in ACCUMULATES_ITSELF
    return accelerator.gradient_accumulation_steps > 1 and not itself


def _count_every_micro_batch(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def launch(*args: object, **kwargs: object) -> Any:
        call = None if seam.off else TrainingCall.bind(signature, args, kwargs)
        if call is None or not _loses_micro_batches(call) or not seam.enter():
            return original(*args, **kwargs)
        count, processes = call.accelerator.gradient_accumulation_steps, call.accelerator.num_processes
        each = f" in each of {processes} processes" if processes > 1 else ""
        seam.notes.append(
            f"{count} micro-batches make a step{each}, and every one counts: without this the last alone would"
        )
        with Undo() as undo:
            keep_until_the_step(call.accelerator, undo)
            return original(*args, **kwargs)

    return launch


def _judge(source: SourceTree) -> Finding | None:
    """Which comes first where the loop accumulates: `backward`, or `zero_grad`?"""
    loop = source.node(LAUNCHER)
    if loop is None:
        return Finding(Verdict.ABSENT, "there is no diffsynth.diffusion.runner.launch_training_task")
    blocks = [n for n in ast.walk(loop) if isinstance(n, ast.With) and "accumulate" in _methods_called(n.items)]
    calls = _methods_called(blocks[0].body) if len(blocks) == 1 else []
    if calls.count("zero_grad") != 1 or calls.count("backward") != 1 or calls.count("step") == 0:
        return None
    if calls.index("zero_grad") < calls.index("backward"):
        return Finding(
            Verdict.PATCH, "launch_training_task clears the gradients before the last micro-batch's backward"
        )
    if calls.index("zero_grad") < calls.index("step"):
        return None
    return Finding(Verdict.NATIVE, "launch_training_task clears the gradients after the optimizer's step")


def _methods_called(nodes: Iterable[ast.AST]) -> list[str]:
    """In the order of the text."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names.append(node.func.attr)
        names += _methods_called(ast.iter_child_nodes(node))
    return names


FEATURE = Feature(
    name="diffsynth.gradient_accumulation",
    summary="every micro-batch of an accumulated step counts, not the last alone",
    auto=True,
    judge=_judge,
    seams=(
        loop_seam(
            LAUNCHER,
            _count_every_micro_batch,
            why="clears the gradients before the last backward of a step: those of its other micro-batches are lost",
            upstream="https://github.com/modelscope/DiffSynth-Studio/issues/1388 (and 1046); fixed in 2.0.10",
            remove_when="the oldest DiffSynth that wanshim knows is 2.0.10",
        ),
    ),
)
