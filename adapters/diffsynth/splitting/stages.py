"""A loop over the stages of a split model: it saves whole files, and DDP takes a model that lies on several devices."""

from __future__ import annotations

from wanshim.adapters.diffsynth.splitting import side_models
from wanshim.adapters.diffsynth.splitting.pipelined_loop import BYPASS, keep_out_of_ddp, save_whole
from wanshim.adapters.diffsynth.training_road import Row, Run, Step
from wanshim.core.model_split.quantize import quantized_names


def _apply(run: Run, row: Row) -> None:
    if run.handle is None:
        return

    call, undo = run.call, run.undo
    undo.replace(call.accelerator, "save", save_whole)
    processes = call.accelerator.num_processes
    if processes > 1:
        undo.set_variable(BYPASS, "true")
        row.report(f"{BYPASS}=true: each of {processes} processes trains a split of its own")
        # DDP can neither flatten a quantised weight nor mix GPU and host. Such weights are frozen, and every process
        # has them from the same file.
        frozen = [*quantized_names(call.model, trained=False), *side_models.parameters_on_host(call.model)]
        keep_out_of_ddp(call.model, frozen, undo)


STEP = Step(apply=_apply)
