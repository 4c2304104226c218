"""Facts of a training run that decide its memory: the size of its samples, and whether activations are recomputed.

Both are known to the training module alone: it reads the samples, and passes the options of gradient checkpointing to
the forward, whatever the script's arguments say. Before a plan is made, a worker process lets the module work on some
samples until it calls the pipeline; what that changes ends with the worker. Every forward of the run is compared with
the facts that its plan rests on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.utils.checkpoint

from wanshim.adapters.diffsynth.splitting.refusals import family_of
from wanshim.adapters.diffsynth.training_road import CHECKPOINT_OFFLOAD, CHECKPOINTING, RunFacts, TrainingCall
from wanshim.core.strategy import Video, gathered
from wanshim.undo import Undo

log = logging.getLogger("wanshim")

SAMPLES = 8  # looked at, evenly spread over the dataset
SECONDS = 2.0  # after which no further sample is looked at: the first one alone may take longer
TIMEOUT_S = 60  # for one sample
DEFAULTS = {CHECKPOINTING: False, CHECKPOINT_OFFLOAD: False}  # of a pipeline's forward


def read_facts(call: TrainingCall) -> RunFacts:
    """The facts of the largest sample that any rank looked at, the same on all ranks; what no sample shows is assumed
    from the attributes of the training module and the arguments of the script."""
    mine, assumed = _largest(_look_at_samples(call)), assumed_facts(call)
    largest = _largest([facts for facts in gathered(mine, "wanshim/facts") if facts])
    video = Video(**largest["video"]) if "video" in largest else None
    return RunFacts(
        checkpointing=mine.get("checkpointing", assumed.checkpointing),
        offloading=mine.get("offloading", assumed.offloading),
        video=video or assumed.video,
        samples=largest["samples"] if video else 0,
    )


def assumed_facts(call: TrainingCall) -> RunFacts:
    """The facts as the attributes of the training module and the arguments of the script have them."""
    offloading = bool(_of_module(call, CHECKPOINT_OFFLOAD, False))
    return RunFacts(
        checkpointing=offloading or bool(_of_module(call, CHECKPOINTING, True)),
        offloading=offloading,
        video=_largest_video(call),
    )


def _of_module(call: TrainingCall, name: str, default: bool) -> object:
    """The training module's own attribute, which it may have set against the script's argument; else that."""
    return getattr(call.model, name, call.option(name, default))


def _largest_video(call: TrainingCall) -> Video | None:
    """The largest video that the training script's arguments allow, or None where they do not say."""
    frames, height, width = (call.option(name) for name in ("num_frames", "height", "width"))
    pixels = height * width if height and width else call.option("max_pixels")
    return _video(call.pipe, {"num_frames": frames, "pixels": pixels}) if frames and pixels else None


def _video(pipe: Any, inputs: Mapping[str, Any]) -> Video | None:
    """The size of the sample of these inputs; None where the pipeline does not say how it makes latents."""
    family = family_of(getattr(pipe, "dit", None))
    if family is None or not hasattr(pipe, "time_division_factor"):
        return None
    return family.video(pipe, inputs)


def _largest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of the sample with most tokens, and how many there were; nothing of no sample."""

    def tokens(facts: Mapping[str, Any]) -> int:
        return Video(**facts["video"]).tokens if "video" in facts else 0

    return {"samples": len(found)} | max(found, key=tokens) if found else {}


def _look_at_samples(call: TrainingCall) -> list[dict[str, Any]]:
    """The facts of some samples; none if the dataset has no length, or the module does not come to the pipeline."""
    try:
        count = len(call.dataset)
        numbers = sorted({index * (count - 1) // max(1, SAMPLES - 1) for index in range(SAMPLES)}) if count else []
        loader = torch.utils.data.DataLoader(
            call.dataset,
            sampler=numbers,
            collate_fn=lambda batch: _facts_of_sample(call, batch[0]),
            num_workers=1,
            timeout=TIMEOUT_S,
            multiprocessing_context="fork",  # nothing of the run is pickled
            generator=torch.Generator(),  # the run's own draws stay as they are
        )
        begin, found = time.monotonic(), []
        for facts in loader:
            found.append(facts)
            if time.monotonic() - begin > SECONDS:
                break
    except Exception as error:  # the plan then rests on what the script says, and says so
        log.debug("wanshim: no sample could be looked at: %s", error)
        return []
    return [facts for facts in found if facts]


class _Reached(Exception):
    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.inputs = inputs


def _facts_of_sample(call: TrainingCall, sample: Any) -> dict[str, Any]:
    """In a worker process, whose objects are copies: the facts that the module gives to the pipeline with this sample,
    or nothing if it fails before."""

    def unit_runner(unit: object, pipe: object, *inputs: Mapping[str, Any]) -> None:
        raise _Reached({name: value for given in inputs for name, value in given.items()})

    def model_fn(*args: object, **inputs: Any) -> None:
        raise _Reached(DEFAULTS | inputs)

    pipe, model = call.pipe, call.model
    vars(pipe).update(unit_runner=unit_runner, model_fn=model_fn)
    pipe.device = "cpu"  # a forked process has no GPU
    try:
        if getattr(call.dataset, "load_from_cache", False):
            model({}, inputs=sample)
        else:
            model(sample)
    except _Reached as reached:
        return _facts_of_inputs(pipe, reached.inputs)
    except Exception as error:
        log.debug("wanshim: the training module did not come to its pipeline: %s", error)
    return {}


def _facts_of_inputs(pipe: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The facts in the inputs of a pipeline's units or of its forward, as JSON; what they do not show is left out."""
    facts: dict[str, Any] = {}
    offloading = bool(inputs.get(CHECKPOINT_OFFLOAD))
    if CHECKPOINTING in inputs:
        facts |= {"checkpointing": bool(inputs[CHECKPOINTING] or offloading), "offloading": offloading}
    size: list[Any] = [inputs.get(name) for name in ("num_frames", "height", "width")]
    if all(isinstance(number, int) for number in size):
        inputs = {**inputs, "pixels": size[1] * size[2]}
    if (video := _video(pipe, inputs)) is not None:
        facts["video"] = asdict(video)
    return facts


class ForwardWatch:
    """The forwards of a run, compared with the facts that its plan rests on, until `undo` ends.

    Args:
        differs: called before each forward that is larger than all known before it, or whose inputs ask for other
            checkpoints than the facts of `call` say, and after the first one, if checkpoints ran in it against its
            inputs; gets the new facts, and as `ran` whether the forward has been computed; raises if the run cannot go
            on.
    """

    def __init__(self, call: TrainingCall, undo: Undo, differs: Callable[..., None]) -> None:
        self._pipe, self._facts, self._differs = call.pipe, call.facts, differs
        self._first, self._checkpoints = True, 0
        undo.replace(call.pipe, "model_fn", self._compared)

    def _compare(self, found: RunFacts, *, ran: bool) -> None:
        if found != self._facts:
            self._differs(found, ran=ran)
            self._facts = found

    def _compared(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def model_fn(*args: Any, **inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **inputs)
            shown = DEFAULTS | inputs if self._first else {n: v for n, v in inputs.items() if n not in DEFAULTS}
            self._compare(self._facts.with_forward(**_facts_of_inputs(self._pipe, shown)), ran=False)
            if not self._first:
                return original(*args, **inputs)
            self._first = False
            with Undo() as counting:
                counting.replace(torch.utils.checkpoint, "checkpoint", self._counted)
                result = original(*args, **inputs)
            self._compare(replace(self._facts, checkpointing=self._checkpoints > 0), ran=True)
            return result

        return model_fn

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(*args: object, **kwargs: object) -> Any:
            self._checkpoints += 1
            return original(*args, **kwargs)

        return checkpoint
