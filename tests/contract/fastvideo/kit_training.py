"""What FastVideo's training side does once, for the contract kit: one rank, a model of a few weights."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.contract.fastvideo import encode_ranks, training_jobs, umt5_checkpoint
from tests.contract.fastvideo.encode_ranks import Job
from tests.contract.fastvideo.methods import training_method
from wanshim.demo.meeting import served_store

_import_fastvideo = cache(encode_ranks._import_fastvideo)  # what it replaces, it replaces once
_kept = ExitStack()


@cache
def _served() -> dict[str, str]:
    """For the one process group of this process, until its end."""
    return _kept.enter_context(served_store())


@contextmanager
def _alone() -> Iterator[Path]:
    """One rank of one, whatever launched this process, with an empty folder."""
    variables = _served()
    os.environ.update({**variables, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"})
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    _import_fastvideo()
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def train_by_trainer_and_pipeline() -> list[list[float]]:
    """The losses of two steps by the trainer and of two by the pipeline of old."""
    with _alone() as folder:
        job: Job = {"steps": 2, "output": str(folder / "out"), "world": 1}
        encode_ranks._join(job)
        return [
            training_jobs._trainer(job, training_jobs.Micro(0)),
            training_jobs._pipeline(job, training_jobs.Micro(0)),
        ]


def encode_negative_prompt() -> list[Any]:
    """The embeddings (1, 512, hidden) and the mask that Wan's training starts with."""
    with _alone() as folder:
        cache_folder = Path(os.environ["WANSHIM_CACHE_DIR"])
        assert cache_folder.parent == Path(tempfile.gettempdir()), "the contract's own, and no user's"
        shutil.rmtree(cache_folder, ignore_errors=True)  # or the second call would load nothing
        job: Job = {"model": str(umt5_checkpoint.write(folder)), "world": 1}
        encode_ranks._join(job)
        model = encode_ranks._wan_model(job)
        methods = "fastvideo.train.methods"
        training_method(f"{methods}.distribution_matching.dmd2.DMD2Method", model).on_train_start()
        # Only a method that reads no negative prompt has an effect of its own on the start of a training.
        student = encode_ranks._wan_model(job)
        student.on_train_start = lambda: None
        training_method(f"{methods}.fine_tuning.finetune.FineTuneMethod", student).on_train_start()
        return [model.negative_prompt_embeds, model.negative_prompt_attention_mask]


def reproduce_rank_zero_only(folder: Path) -> None:
    from tests.contract.fastvideo import fastvideo_tree

    fastvideo_tree.reproduce(folder)


def conditioned() -> tuple[Any, ...]:
    """A Wan model, a method and a loader as their constructors find them: nothing is loaded."""
    from fastvideo.models.loader.component_loader import TextEncoderLoader
    from fastvideo.train.methods.distribution_matching.dmd2 import DMD2Method
    from fastvideo.train.models.wan.wan import WanModel

    return tuple(made.__new__(made) for made in (WanModel, DMD2Method, TextEncoderLoader))


def loops() -> tuple[Any, ...]:
    """The trainer and a pipeline of old, as their constructors find them."""
    from fastvideo.train.trainer import Trainer
    from fastvideo.training.wan_training_pipeline import WanTrainingPipeline

    return Trainer.__new__(Trainer), WanTrainingPipeline.__new__(WanTrainingPipeline)
