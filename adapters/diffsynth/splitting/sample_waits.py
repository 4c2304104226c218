"""A word at the end of a run on what its GPU waited for: several GPUs take samples faster than the few workers
load them that suffice for one."""

from __future__ import annotations

from functools import partial
from typing import Any

from wanshim.adapters.diffsynth.training_road import Row, Run
from wanshim.core.training.sample_waits import SampleWaits


def apply(run: Run, row: Row) -> None:
    """Time the loader that accelerate prepares, until the run ends."""
    waits, workers = SampleWaits(run.call.device), 0

    def timed(original: Any) -> Any:
        def prepare(*args: Any, **kwargs: Any) -> Any:
            nonlocal workers
            prepared = original(*args, **kwargs)
            if (loader := getattr(prepared, "base_dataloader", None)) is not None:
                workers = loader.num_workers
                own = loader.__iter__
                run.undo.set(loader, {"__iter__": partial(waits.around, own)})
            return prepared

        return prepare

    def say() -> None:
        if (needed := waits.workers_in_time(workers)) is not None:
            row.report(
                f"the GPU waited {waits.waited:.0f} of {waits.seconds:.0f} s for samples, which the data loader "
                f"loads by {workers} workers: --dataset_num_workers {needed} would be in time, on as many free cores"
            )

    run.undo.add(say)
    run.undo.replace(run.call.accelerator, "prepare_data_loader", timed)
