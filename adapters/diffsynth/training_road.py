"""The one road of a training call: read the job, decide, share the plan with all ranks, apply it step by step, undo.
The road itself is `splitting/launch.py`.

Each thing that a run does otherwise is a `Step`, in a file of its own. A new one is that file with its `Step`, a place
in the list of `splitting/steps.py`, which says when it is applied, and what the plan says of it (`TrainingPlan`, with
what the job asks for in `splitting/job.py`). A step that a feature of its own switches on makes it by `step_feature`:
whichever of the seams of these features a call comes to first takes the road for all that are on.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from wanshim.errors import FeatureUnavailable
from wanshim.patching import Feature, Kind, Seam, SeamState
from wanshim.settings import Settings, names_of
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.core.model_split import SplitHandle
    from wanshim.core.strategy import TrainingPlan, Video

MODEL_SPLIT = "diffsynth.model_split"  # which plans over devices and processes; without it a run is DiffSynth's own
LAUNCHER = "diffsynth.diffusion.runner:launch_training_task"
FAMILIES = {"Wan": ("wan_",), "FLUX.2": ("flux2_",), "MiniMax-H3": ("minimax_h3_",)}
CHECKPOINTING = "use_gradient_checkpointing"
CHECKPOINT_OFFLOAD = "use_gradient_checkpointing_offload"
Report = Callable[[str], None]
loop_seam = partial(Seam, kind=Kind.WRAPT, stacks=True)  # of the training loop, which several features may wrap


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a training run that decide its memory.

    Args:
        checkpointing: activations are recomputed in backward.
        offloading: DiffSynth's own option keeps checkpoints in host memory.
        video: the largest sample; None where its size is not known.
        samples: how many were looked at; 0: the size is assumed from the script's arguments.
    """

    checkpointing: bool
    offloading: bool
    video: Video | None
    samples: int = 0

    @property
    def sizes(self) -> str:
        """The source of the size, as a statement."""
        if self.samples or self.video is None:
            return ""
        return (
            f"sizes are assumed: {self.video.tokens} tokens, the largest video that the script's arguments or their "
            "defaults (num_frames, height, width, max_pixels) allow; no sample could be looked at before"
        )

    def with_forward(self, *, video: Mapping[str, int] | None = None, **seen: Any) -> RunFacts:
        """These facts once a forward has been seen: its size in place of an assumed one, or of a smaller one."""
        from wanshim.core.strategy import Video

        found = replace(self, **seen)
        if video is None:
            return found
        known = self.video if self.samples else None
        size = Video(**video)
        larger = known is None or size.tokens > known.tokens
        return replace(found, video=size if larger else known, samples=self.samples or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCall:
    """The arguments of `launch_training_task` or `launch_dmd2_training_task`.

    Args:
        accelerator: the `accelerate.Accelerator`.
        model: DiffSynth's training module, which holds the pipeline as `pipe`.
        logger: DiffSynth's `ModelLogger`, which saves checkpoints.
        dataset: the samples.
        options: all arguments of the launcher, by name.
        script: the training script's arguments, which take precedence; None if the launcher is called without them.
        known: its facts, once they have been read.
    """

    accelerator: Any
    model: Any
    logger: Any
    dataset: Any
    options: Mapping[str, object]
    script: object
    known: RunFacts | None = None

    @classmethod
    def bind(cls, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingCall:
        """The call of a launcher with this signature."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        return cls(
            accelerator=given["accelerator"],
            model=given.get("model"),
            logger=given.get("model_logger"),
            dataset=given.get("dataset"),
            options=given,
            script=given.get("args"),
        )

    @property
    def device(self) -> torch.device:
        """The device on which accelerate puts this process's model, always with an index."""
        from wanshim.core.shared.gpu_memory import indexed

        return indexed(self.accelerator.device)

    @property
    def pipe(self) -> Any:
        return getattr(self.model, "pipe", None)

    @property
    def dit(self) -> Any:
        return getattr(self.pipe, "dit", None)

    def end_others(self, error: BaseException) -> None:
        """The other ranks of the group stop with this rank's error, where the model is sharded."""
        from wanshim.core.sequence import sequence_of

        handle = sequence_of(self.dit) if self.dit is not None else None
        if handle is not None:
            handle.fail(error)

    def option(self, name: str, default: object = None) -> Any:
        """The value of an option; `default` if neither the script nor the launcher has it."""
        return getattr(self.script, name, self.options.get(name, default))

    @property
    def facts(self) -> RunFacts:
        """The facts that are known, or those that are assumed before."""
        if self.known is not None:
            return self.known
        from wanshim.adapters.diffsynth.splitting.facts import assumed_facts

        return assumed_facts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training call on its way.

    Args:
        plan: what all steps carry out.
        handle: the split that it runs over, or None.
        undo: ends with the task, and takes back what was changed.
    """

    call: TrainingCall
    read: Settings
    plan: TrainingPlan
    handle: SplitHandle | None
    undo: Undo


class Row:
    """The row of the report for a step's statements: that of its feature, or that of the plan if the feature is off.

    Args:
        notes: has `append`, and `lead` for the statement that the whole report begins with.
        seam: of the feature in this run; None: the feature is off.
        ran: whether the run has trained a step.
    """

    def __init__(self, notes: Any, seam: SeamState | None = None, ran: Callable[[], bool] = lambda: True) -> None:
        self._notes, self._seam, self._ran = notes, seam, ran
        self.own = seam is not None
        self.muted = False  # while what a step has done is not done by the end of the run

    @classmethod
    def of(cls, report: Report) -> Row:
        """A row of which every statement goes to `report`."""
        return cls(SimpleNamespace(append=report, lead=report))

    def report(self, text: str) -> None:
        if not self.muted:
            self._notes.append(text)

    def lead(self, text: str) -> None:
        """Report a statement that the whole report begins with."""
        self._notes.lead(text)

    def without_effect(self, reason: str) -> None:
        """Report why the feature does nothing in this run; the call is left to the framework once."""
        if not self.muted:
            (self._notes.append if self._seam is None else self._seam.fall_back)(reason)
            self._seam = None

    def not_needed(self, reason: str) -> None:
        """Report why there was nothing to do for the feature in this run."""
        if not self.muted and self._seam is not None:
            self._seam.not_needed(reason)
            self._seam = None

    def end(self, effect: object, text: str) -> None:
        """Report what a step has done by the end of the run, or, without an effect, why nothing. A run that has trained
        no step, as one that had ended before, had nothing for it to do."""
        if effect:
            self.report(text)
        elif self._ran():
            self.without_effect(text)
        else:
            self.not_needed("no step was trained")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that a training run does otherwise.

    Args:
        feature: whose setting asks for it.
        setting: the field of the settings; empty: the plan alone asks for it.
        asked: whether the settings ask for it by name.
        refusal: why it cannot be done in this job, by name, or None.
        without: the statement that it is not done.
        changes_blocks: the statement that bits change, of a step that makes blocks compute otherwise; `{value}` stands
            for the setting's value. It is applied if the plan has the statement, which is reported.
        required: without it the run would be another one, and so a refusal ends the job.
        on: whether the plan of the run has it.
        apply: makes the run as `Run.plan` says until `Run.undo` ends.
    """

    feature: str = MODEL_SPLIT
    setting: str = ""
    asked: Callable[[Settings], bool] = lambda read: False
    refusal: Callable[[TrainingCall, Settings], str | None] = lambda call, read: None
    without: str = ""
    changes_blocks: str = ""
    required: bool = False
    on: Callable[[Run], object] = lambda run: True
    apply: Callable[[Run, Row], None]

    def not_asked(self, row: Row) -> None:
        """Report that its feature is on and its variable asks for nothing."""
        if row.own:
            row.without_effect(f"{self.without}: {names_of(self.setting)[0]} is not set, or off")

    def warn(self, reason: str) -> None:
        """Log why the run goes on without it."""
        import logging  # needed by few: not at activation

        logging.getLogger("wanshim").warning("wanshim: %s: %s: %s", self.feature, self.without, reason)


_seams: dict[str, dict[str, SeamState]] = {}  # launcher -> feature -> its seam there
_taken: ContextVar[bool] = ContextVar("wanshim_training_road", default=False)


def in_training_call() -> bool:
    """Whether one of DiffSynth's training launchers is running."""
    return _taken.get()


def from_module(module: str, function: str = "apply") -> Callable[[Run, Row], None]:
    """The function of a module of this adapter, which is imported when the step is on."""

    def apply(run: Run, row: Row) -> None:
        getattr(import_module(f"{__package__}.{module}"), function)(run, row)

    return apply


def take_road(feature: str, original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """The replacement of a launcher for a feature with a step."""
    signature = inspect.signature(original)
    features = _seams.setdefault(seam.seam.target, {})
    features[feature] = seam

    def launch(*args: object, **kwargs: object) -> Any:
        if seam.off or _taken.get():
            return original(*args, **kwargs)
        on = {name: state for name, state in features.items() if state.enter()}
        with _on_the_road(TrainingCall.bind(signature, args, kwargs), on):
            return original(*args, **kwargs)

    return launch


def share_output_folder(call: TrainingCall) -> None:
    """Let every rank's logger, and the script's arguments that it comes from, have the first rank's output folder."""
    import logging  # needed by few: not at activation

    from wanshim.core.strategy import output_folders

    own = getattr(call.logger, "output_path", None)
    if own is None:
        return
    named = output_folders(str(own))
    if len(named) == 1:
        return
    if call.accelerator.is_main_process:
        logging.getLogger("wanshim").warning(
            "wanshim: the ranks name different folders as the run's output: %s; all use %s, of the first rank",
            ", ".join(named),
            named[0],
        )
    for holder in (call.logger, call.script):
        if getattr(holder, "output_path", None) == own:
            vars(holder)["output_path"] = type(own)(named[0])


@contextmanager
def _on_the_road(call: TrainingCall, on: Mapping[str, SeamState]) -> Iterator[None]:
    from wanshim.adapters.diffsynth.splitting.launch import prepare

    with Undo() as undo:
        undo.add(partial(_taken.reset, _taken.set(True)))
        try:
            with _counted_as_failed(on.values()):
                share_output_folder(call)
                prepare(call, on, undo)
            yield
        except BaseException as error:
            call.end_others(error)
            raise


@contextmanager
def _counted_as_failed(seams: Iterable[SeamState]) -> Iterator[None]:
    """A call that is refused has had no effect."""
    try:
        yield
    except BaseException:
        for seam in seams:
            seam.fail()
        raise


def watch_steps(seam: SeamState, say: Callable[[], bool]) -> None:
    """Call `say` at each optimizer step, until it has said something or `seam` is taken out."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    said = False

    def look(optimizer: object, args: object, kwargs: object) -> None:
        nonlocal said
        if not (said or seam.off):
            said = say()

    seam.earlier.append(register_optimizer_step_pre_hook(look).remove)


def why_outside() -> tuple[str, str]:
    """The reason why an optimizer steps without a replaced launcher, and the remedy. DiffSynth's own launcher is on the
    stack if the script took it before it was replaced: a name in the script is out of reach."""
    module, _, name = LAUNCHER.partition(":")
    frame = sys._getframe()
    while (back := frame.f_back) is not None:
        frame = back
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == (module, name):
            return (
                f"the script imported {name} before wanshim.activate(), and calls DiffSynth's own",
                "Call wanshim.activate() before the script imports from diffsynth, or start it by `wanshim run`",
            )
    return f"an optimizer steps outside of DiffSynth's {name}", f"Train through {name}"


def _take_road_of_all(step: Step, original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    """The replacement of the launcher that all training goes through, for the feature of this step. Until `seam` is
    taken out, a loop of the user's own that steps without it is told that the step is not taken."""

    def say() -> bool:
        # whatever value switched the feature on: a feature may have several steps
        past = not _taken.get() and seam.settings.is_on(step.setting)
        return past and say_without_effect(seam, step.feature, step.setting, step.without)

    watch_steps(seam, say)
    return take_road(step.feature, original, seam)


def say_without_effect(seam: SeamState, feature: str, setting: str, without: str) -> bool:
    """Report, for a loop that goes past the launcher, what its variable does not do there.

    Raises:
    FeatureUnavailable: under strict.
    """
    import logging  # needed by few: not at activation

    read = seam.settings
    variable = read.sources.get(setting, setting)
    why, remedy = why_outside()
    reason = f"{variable} has no effect on this training loop, {without}: {why}"
    if read.insists_on(setting):
        raise FeatureUnavailable(reason, hint=f"{remedy}, or unset {variable}")
    seam.enter()
    seam.fall_back(reason)
    logging.getLogger("wanshim").warning("wanshim: %s: %s", feature, reason)
    return True


def step_feature(
    step: Step, *, summary: str, why: str, upstream: str, remove_when: str, relies_on: tuple[str, ...] = (),
    families: Mapping[str, tuple[str, ...]] = {}, blocked: Callable[[Settings], str | None] | None = None,
    others: Mapping[str, tuple[Callable[[Any, SeamState], Any], str]] = {},
) -> Feature:  # fmt: skip
    """The feature that switches on a step. It wraps both of DiffSynth's training launchers; a release without the
    second has the first alone.

    Args:
        others: further seams, which a release may lack: their target, replacement and why.
    """
    seams: dict[str, tuple[Callable[[Any, SeamState], Any], str]] = {
        LAUNCHER: (partial(_take_road_of_all, step), why),
        "diffsynth.diffusion.dmd2:launch_dmd2_training_task": (
            partial(take_road, step.feature),
            "the same, for a loop of its own",
        ),
        **others,
    }
    return Feature(
        name=step.feature,
        summary=summary,
        switched_on_by=step.setting,
        relies_on=relies_on,
        families=families,
        blocked=blocked,
        seams=tuple(
            loop_seam(target, make, why=reason, upstream=upstream, remove_when=remove_when, required=target == LAUNCHER)
            for target, (make, reason) in seams.items()
        ),
    )
