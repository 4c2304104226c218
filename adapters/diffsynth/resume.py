"""`diffsynth.resume`: the same command again goes on where the run was.

DiffSynth saves trained weights alone: a run that is started again begins at epoch 0 with a new optimizer and another
shuffle. Here a run saves its state while it trains: trained weights, optimizer, schedule, the random states of every
process, the position in the epoch and DiffSynth's own counts. Started again, it is the run that was never stopped: the
same samples, draws, losses and files, bit for bit with deterministic kernels. What a state is and how it is written is
`wanshim.core.resume`.
"""

from __future__ import annotations

from typing import Any

from wanshim.adapters.diffsynth.training_road import Row, Run, Step, TrainingCall, step_feature
from wanshim.patching import SeamState
from wanshim.settings import Settings

PROCESSES = ("NO", "MULTI_GPU", "MULTI_CPU")  # accelerate's names of the ways to run that are known


def refusal(call: TrainingCall, read: Settings) -> str | None:
    """Why the state of this run cannot be saved and restored exactly, by name, or None."""
    from torch.utils.data import IterableDataset

    accelerator = call.accelerator
    if hasattr(call.model, "dmd2_config"):
        return "DMD2 has several optimizers and a step count of its own"
    if accelerator.distributed_type.name not in PROCESSES:
        return f"{accelerator.distributed_type.name} keeps parameters and optimizer itself"
    if call.option("enable_model_cpu_offload", False):
        return "--enable_model_cpu_offload moves the trained weights and the optimizer itself"
    if isinstance(call.dataset, IterableDataset):
        return f"{type(call.dataset).__name__} is iterated over, and has no position to begin at"
    if accelerator.dispatch_batches or accelerator.dataloader_config.use_stateful_dataloader:
        return "accelerate's data loader is configured to dispatch batches or to keep a state itself"
    return None


def blocked(read: Settings) -> str | None:
    """Why the processes that accelerate starts cannot have it, said before they load a model."""
    if read.engine is None or read.resume is None:
        return None
    return f"{read.engine_named} and WANSHIM_RESUME each keep parameters and optimizer: leave one of the two out"


def _apply(run: Run, row: Row) -> None:
    """Restore the state of this run if there is one, and save states until the run ends."""
    from wanshim.adapters.diffsynth.resuming.run import ResumableRun

    if not run.plan.saves_state:
        STEP.not_asked(row)
        return
    assert run.read.resume is not None  # or the plan had not said so
    ResumableRun(run, run.read.resume, row)


def _compare_arguments(original: Any, seam: SeamState) -> Any:
    """The seam of the parser that takes `--output_path`: what it reads is compared before a model is loaded."""

    def add_output_config(parser: Any) -> Any:
        parse = parser.parse_known_args

        def parse_known_args(*args: Any, **kwargs: Any) -> Any:
            read = parse(*args, **kwargs)
            if not seam.off and seam.settings.resume is not None:
                from wanshim.adapters.diffsynth.resuming.identity import check_arguments

                check_arguments(read[0], seam.settings.resume)
            return read

        parser.parse_known_args = parse_known_args
        return original(parser)

    return add_output_config


STEP = Step(
    feature="diffsynth.resume",
    setting="resume",
    asked=lambda read: read.resume is not None,
    refusal=refusal,
    without="no state is saved",
    required=True,
    apply=_apply,
)

FEATURE = step_feature(
    STEP,
    summary="a run that was ended goes on exactly where it was, by the same command",
    why="makes a new optimizer, schedule and shuffle at each start, and saves trained weights alone",
    upstream="https://github.com/modelscope/DiffSynth-Studio/issues/1104 (and 225, 1406)",
    remove_when="DiffSynth saves and restores the whole state of a run",
    blocked=blocked,
    others={
        "diffsynth.diffusion.parsers:add_output_config": (
            _compare_arguments,
            "has the arguments read minutes before the run that they describe is compared with its state",
        ),
    },
)
