"""One call of `launch_training_task` that saves its state and goes on from it."""

from __future__ import annotations

import gc
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from wanshim.adapters.diffsynth.resuming.identity import (
    FOLDER,
    NOT_ACCEPTED,
    anew,
    changes,
    identity_of,
    parsed_arguments,
    refusal,
    states_of,
    where,
)
from wanshim.adapters.diffsynth.training_road import Row, Run
from wanshim.core.model_split.plan import format_bytes
from wanshim.core.resume.buckets import arrange_buckets, note_ready
from wanshim.core.resume.draws import Draws, as_text
from wanshim.core.resume.order import Order
from wanshim.core.resume.owner import own
from wanshim.core.resume.ranks import Ranks
from wanshim.core.resume.signals import AskedToEnd
from wanshim.core.resume.state import (
    RunState,
    check_writable,
    forget_partial,
    latest_run,
    new_run,
    newest_facts,
    newest_state,
    read_state,
)
from wanshim.core.resume.tree import (
    PlainState,
    attributes,
    check_restored,
    content,
    flatten,
    rebuild,
    restore_attributes,
    restore_optimizer,
)
from wanshim.core.resume.writer import StateWriter
from wanshim.core.training.recording import RESUMES_AT
from wanshim.errors import FeatureUnavailable, ResumeInvalid
from wanshim.settings import WantedResume

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on
ended: Counter[Path] = Counter()  # calls that this process has trained to their end, by the folder of their states


@dataclass
class Position:
    """The position of the run. Counted as in the state of every process."""

    steps: int = 0  # of the optimizer
    epoch: int = 0
    batches: int = 0  # of the epoch, that each process has trained


class ResumableRun:
    """From its start to the end of a call: accelerate's prepared objects are noted, their state restored, and the loop
    gets a loader that begins where the state was saved and saves the next ones."""

    def __init__(self, run: Run, wanted: WantedResume, row: Row) -> None:
        self.run, self.call, self.every = run, run.call, run.read.save_every
        self.wanted, self.report, self._lead = wanted, row.report, row.lead
        self.ranks = Ranks()
        self.at = Position()
        self.batches_before = 0  # micro-batches of earlier attempts
        self._epochs_begun = 0
        self._epoch_began: dict[str, Any] = {}  # this process's random states and sampler at the epoch's begin
        self._resumed: dict[str, Any] | None = None  # this process's part of the state, until the loop is there again
        self._saved = (0, time.monotonic())  # step and time of the last state
        self._checked = False  # that all of the optimizer's state can be saved
        self._trained: dict[str, torch.nn.Parameter] = {}  # weights that have been trained since the run began
        self._named: set[str] = set()  # attributes that are no part of the state
        folder, self._state = self._chosen()
        self.writer = StateWriter(folder)
        if self.ranks.rank == 0 and own(folder, run.undo):
            forget_partial(folder)
        self.asked = AskedToEnd(run.undo)  # first: a launcher ends this rank for another's error while it still writes
        run.undo.add(self._say_how_to_go_on)
        run.undo.add(self.writer.finish)
        run.undo.replace(self.call.accelerator, "prepare", self._prepare)
        run.undo.replace(self.call.logger, "on_epoch_end", self._on_epoch_end)

    # -- from a state ------------------------------------------------------------------------------------------------

    def _chosen(self) -> tuple[Path, RunState | None]:
        """Rank 0 chooses the run and its state, and every rank reads it.

        Raises:
            ResumeInvalid: no state can be written there, or a rank cannot read it; on every rank.
        """
        output = self.call.logger.output_path
        found: tuple[Path, RunState] | None = None
        path = chosen = refused = None
        if self.ranks.rank == 0:
            folder = states_of(self.wanted, output)
            self.run.undo.add(partial(self._note_end, folder))
            if ended[folder]:  # what a script trains next goes on from no state of what it has trained
                folder /= f"call-{ended[folder] + 1}"
            try:
                run = None if self.wanted.anew else latest_run(folder)
                found = newest_state(run) if run is not None else None
                chosen = str(run or new_run(folder))
                check_writable(Path(chosen))
            except ResumeInvalid as error:
                refused = [str(error), "WANSHIM_RESUME=./states keeps states in another folder"]
            else:
                if run is not None and found is None:  # a run from step 0 would remove what may be repaired
                    refused = [f"No state in {run} can be read", f"Restore one of them; {anew(self.wanted)}"]
            path = str(found[0]) if found is not None else None
        chosen, path, refused = self.ranks.gather([chosen, path, refused])[0]
        if refused:
            raise ResumeInvalid(refused[0], hint=refused[1])
        state, problem = found[1] if found is not None else None, None
        if path is not None and state is None:
            try:
                state = read_state(Path(path))
            except ResumeInvalid as error:
                problem = f"rank {self.ranks.rank}: {error}"
        self._check(self.ranks.gather(problem), hint="All machines of a run need the same folder")
        return Path(chosen), state

    def _state_beside(self) -> str:
        """The output folder beside this one that has a state of this run, in words: a folder named after the time is
        never the one of the run before."""
        if self.wanted.folder or self.wanted.anew:
            return ""
        own = Path(self.call.logger.output_path).resolve()
        found: list[Path] = []
        for path in own.parent.glob(f"*/{FOLDER}"):
            with suppress(ResumeInvalid):  # no folder, or not this user's to read
                found += [path] if path.parent != own and self._goes_on_from(newest_facts(path)) else []
        if not found:
            return ""
        newest = max(found, key=lambda path: path.stat().st_mtime).parent
        return f"; there is one in {newest}, which the script goes on from if it names that output folder"

    def _goes_on_from(self, found: tuple[Path, dict[str, Any] | None] | None) -> bool:
        """Whether a newest state is one that this run would go on from, and train."""
        path, facts = found or (Path(), None)
        if facts is None:
            return False
        changed = changes(facts["identity"], self.identity)
        return not refusal(changed, self.wanted, path) and (not facts.get("ended") or "num_epochs" in changed)

    def _note_end(self, folder: Path) -> None:
        ended[folder] += self._has_ended()

    @property
    def _epochs(self) -> int:
        epochs: int = self.call.option("num_epochs", 1)
        return epochs

    def _is_last(self) -> bool:
        """Whether no batch is left behind this position."""
        return self.at.epoch + self.at.batches // len(self.loader) >= self._epochs

    def _has_ended(self) -> bool:
        """Whether the call has come to its end: behind the last batch DiffSynth saves, which may fail."""
        return self.at.epoch >= self._epochs and not self.run.undo.failed

    def _say_how_to_go_on(self) -> None:
        """Say, for a run that ends before its last step, how to go on: the last that its user reads."""
        if self.ranks.rank or not self._epochs_begun or self._has_ended():
            return
        command = f"the same command{f' with WANSHIM_RESUME={where(self.wanted)}' * self.wanted.anew}"
        step = self.writer.written
        state = f"goes on from the state of step {step} in {self.writer.run}"
        self._lead(f"{command} {state}" if step else "no state was saved: the same command begins at step 0")

    def _check(self, problems: list[str | None], **more: str) -> None:
        found = [problem for problem in problems if problem]
        if found:
            raise ResumeInvalid(found[0], **more)

    def _prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(*args: object, **kwargs: object) -> Any:
            result = original(*args, **kwargs)
            items = result if isinstance(result, tuple) else (result,)
            if not any(hasattr(item, "base_dataloader") for item in items):
                return result
            return tuple(self._take(items))

        return prepare

    def _take(self, items: tuple[Any, ...]) -> Iterator[Any]:
        from accelerate.optimizer import AcceleratedOptimizer
        from accelerate.scheduler import AcceleratedScheduler
        from diffsynth.diffusion import ModelLogger

        self.loader = next(item for item in items if hasattr(item, "base_dataloader"))
        self.optimizer = next(item for item in items if isinstance(item, AcceleratedOptimizer)).optimizer
        self.scheduler = next(item for item in items if isinstance(item, AcceleratedScheduler)).scheduler
        if self.loader.base_dataloader.persistent_workers:
            raise FeatureUnavailable(
                "WANSHIM_RESUME is unavailable here: workers of a data loader that live longer than an epoch, "
                "persistent_workers, draw on from states that no run has that is started again",
                hint="Leave persistent_workers out, or unset WANSHIM_RESUME",
            )
        self.order = Order(self.loader.base_dataloader)
        self._shuffled = Draws(self.loader.batch_sampler, without=self.order.draws.held)
        ours = [self, self.run, self.call.accelerator, self.call.dataset, self.loader, self.optimizer]
        self._known = [*ours, *self.order.draws.held, *self._shuffled.held]
        self._kept = [PlainState(self.call.model), PlainState(self.call.logger, without=vars(ModelLogger("")))]
        self._draws = Draws([self.call.model, self.call.logger], without=self._known)
        generators = {"dataset": self.order.draws.held, "module": self._draws.held}
        self.identity = identity_of(self.run, self.optimizer) | {
            f"random_generators_of_{name}": [type(generator).__name__ for generator in held]
            for name, held in generators.items()
            if held or name == "dataset"  # states of an earlier release have no other entry
        }
        self._made_with = {name: content(value) for name, value in attributes(self.optimizer).items()}
        weights = [weight for weight in self._weights().values() if weight.requires_grad]
        frozen = None
        if self._state is not None:
            self._restore(self._state)
            for item in items:
                if isinstance(item, DistributedDataParallel) and self.at.steps:
                    arrange_buckets(item, weights, self._state.facts["gradients_ready"])
            frozen = self._state.facts.get("frozen")
            self._state = None
        else:
            self._lead(f"begins at step 0: there is no state in {self.writer.run}{self._state_beside()}")
        self._ready = note_ready(weights, self.run.undo)
        if frozen is not None:
            for name, weight in self._trained.items():
                weight.requires_grad_(name not in frozen)
        return (_Loader(self) if item is self.loader else item for item in items)

    def _restore(self, state: RunState) -> None:
        facts, accelerator = state.facts, self.call.accelerator
        changed = changes(facts["identity"], self.identity)
        self._check(self.ranks.gather(refusal(changed, self.wanted, self.writer.run)), hint=self._hint(changed))
        now = {group: {k: v for k, v in values.items() if k != "params"} for group, values in self._groups()}
        self._restore_weights(state)
        restore_optimizer(self.optimizer, facts["optimizer"], state.tensors)
        restore_attributes(self.optimizer, facts.get("attributes", {"dict": []}), state.tensors)
        for name, holder in (("scheduler", self.scheduler), ("scaler", accelerator.scaler)):
            if holder is not None and facts[name] is not None:
                holder.load_state_dict(rebuild(facts[name], state.tensors))
                check_restored(holder.state_dict(), facts[name], state.tensors, name)
        self._apply(changed, now)
        accelerator.step = facts["accelerator_step"]
        self.call.logger.num_steps = self.batches_before = facts["logger_steps"]
        self.at = Position(**facts["position"])
        self.writer.written = self.at.steps
        self._saved = (self.at.steps, time.monotonic())
        self._resumed = self._part_of(facts)
        if module := self._resumed.get("module"):
            self._draws.set(module["random"])
            for kept, saved in zip(self._kept, module["plain"], strict=True):
                kept.restore(saved)
        if "dataset" in changed:  # no position in other samples, but an epoch that has ended has ended
            whole = facts.get("epoch_ended", facts.get("ended"))
            self.at.batches, self._resumed["noted"] = self.order.length if whole else 0, {}
        if "dataset_num_workers" in changed or "num_workers" in changed:
            self._resumed["noted"] = {}
        accepted = f", with another {', '.join(changed)}" if changed else ""
        if facts["plan"] != self.run.plan.strategy.value:
            accepted += f", saved with the plan {facts['plan']} and equal to it up to rounding from here on"
        if self._is_last():
            self._lead(f"has ended at step {self.at.steps}, and trains nothing{accepted}: {self.writer.run}")
            return
        self._lead(
            f"goes on from step {self.at.steps}, in epoch {self.at.epoch + 1} after {self.at.batches} of "
            f"{len(self.loader)} batches{accepted}: {self.writer.run}"
        )

    def _restore_weights(self, state: RunState) -> None:
        """Give weights the values that they have in the state.

        Raises:
            ResumeInvalid: the state has other weights than this run trains.
        """
        saved = {name for name in state.tensors if name.startswith("model.")}
        named = {f"model.{name}": weight for name, weight in self.call.model.named_parameters()}
        for name in sorted(self._weights().keys() - saved | saved - named.keys()):
            where_not = f"The state in {self.writer.run}" if name in named else "The model of this run"
            raise ResumeInvalid(
                f"{where_not} lacks {name.removeprefix('model.')}",
                expected="each weight that the run has trained since it began",
                hint=anew(self.wanted),
            )
        self._trained.update((name, named[name]) for name in saved)
        with torch.no_grad():
            for name in saved:
                named[name].copy_(state.tensors[name])

    def _hint(self, changed: dict[str, tuple[Any, Any]]) -> str:
        names = [name for name in changed if name not in NOT_ACCEPTED]
        if "samples_per_step" in changed:
            processes, accumulation = changed["samples_per_step"][0].split(": ")[1].split()[:3:2]
            return (
                f"It goes on with {processes} process{'es' * (processes != '1')} that have samples of their own "
                f"(accelerate launch --num_processes {processes}) and --gradient_accumulation_steps {accumulation}; "
                + anew(self.wanted)
            )
        if len(names) < len(changed):
            return anew(self.wanted)
        accepting = ",".join([where(self.wanted), *("+" + name for name in names)])
        return f"WANSHIM_RESUME={accepting} goes on nevertheless; {anew(self.wanted)}"

    def _groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return enumerate(self.optimizer.param_groups)

    def _apply(self, changed: dict[str, tuple[Any, Any]], now: dict[int, dict[str, Any]]) -> None:
        """Take over what the user changed in the optimizer; the schedule goes on from where it is."""
        for number, group in self._groups():
            if "weight_decay" in changed:
                group["weight_decay"] = now[number]["weight_decay"]
            if "learning_rate" in changed:
                before, group["initial_lr"] = group["initial_lr"], now[number]["initial_lr"]
                if before:
                    group["lr"] *= group["initial_lr"] / before
        if "learning_rate" in changed:
            self.scheduler.base_lrs = [group["initial_lr"] for _, group in self._groups()]
            if not all(group["lr"] for _, group in self._groups()):  # 0 does not say how far the schedule is
                for (_, group), rate in zip(self._groups(), self.scheduler._get_closed_form_lr(), strict=True):
                    group["lr"] = group["lr"] or rate

    def _part_of(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The part of the state for this process; under another plan for the first of its group."""
        parts, ranks = facts["ranks"], self.ranks
        if len(parts) == ranks.size:
            return dict(parts[ranks.rank])
        groups = self.call.accelerator.num_processes
        return dict(parts[ranks.rank // (ranks.size // groups) * (len(parts) // groups)])

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _on_epoch_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_epoch_end(accelerator: Any, model: Any, epoch_id: int, *args: object, **kwargs: object) -> Any:
            if epoch_id >= self._first_epoch:  # the file of an earlier one is there
                return original(accelerator, model, epoch_id, *args, **kwargs)
            return None

        self._first_epoch = 0
        return on_epoch_end

    def batches(self) -> Iterator[Any]:
        """One epoch of the loop: what is left of it."""
        epoch, self._epochs_begun = self._epochs_begun, self._epochs_begun + 1
        if epoch < self.at.epoch:
            self._first_epoch = epoch + 1
            return
        resumed, self._resumed = self._resumed, None
        first, length, device, draws = self.at.batches, self.order.length, self.call.device, self.order.draws

        if resumed is not None:
            self._set_sampler(resumed["sampler"])
            draws.set(resumed["began"] if 0 < first < length else resumed["random"], device)
        self.loader.iteration = epoch
        self._epoch_began = {"began": draws.text(device), "sampler": self._sampler()}
        if first < length:
            self.order.begin(first, resumed["noted"] if resumed else {}, resumed["random"] if resumed else "")
            for place, given in enumerate(self.loader, self.order.base):
                batch = self.order.batch_of(place, given)
                if place < first:
                    continue
                if resumed is not None and place == first > 0 and (self.order.workers or first == length - 1):
                    draws.set(resumed["random"], device)  # workers, or nobody, loaded the batch after it
                yield batch
                self.at.batches = place + 1
                self._end_batch()
        else:
            self.loader.iteration = epoch + 1
        self.at.epoch, self.at.batches = epoch + 1, 0

    def _end_batch(self) -> None:
        """The loop is through with a batch: an optimizer step ends here, or not."""
        if not self.call.accelerator.sync_gradients:
            return
        self.at.steps += 1
        if not self._checked:  # before hours are trained that could not be saved
            self._reserve()
            self._checked = True
        decided = self.ranks.vote(self._vote())
        if decided or self.at.batches == self.order.length:
            self._save()
        if decided > 1:
            self.writer.finish()
            saved = self.ranks.gather(self.writer.written)[0]  # no rank ends before the state is on the disk
            outcome = "the state is saved" if saved == self.at.steps else "its state is not saved"
            self.report(f"ends at step {self.at.steps}, asked by {signal.Signals(decided).name}: {outcome}")
            end = KeyboardInterrupt() if decided == signal.SIGINT else SystemExit(REQUEUE)
            if saved == self.at.steps:
                setattr(end, RESUMES_AT, saved)
            raise end

    def _reserve(self) -> None:
        tensors = dict[str, Any](self._weights())
        self._described(tensors)
        gc.collect()  # else Python's next full collection, 0.3 s, comes in a step that saves
        if self.ranks.rank == 0:
            size = format_bytes(self.writer.reserve(tensors))
            self.report(f"a state takes {size} of host memory, and two are kept on the disk")
            carried = {"state", "param_groups", *attributes(self.optimizer)}
            for owner, known in ((self.call.logger, ()), (self.call.model, ()), (self.optimizer, carried)):
                for name, value in vars(owner).items():
                    if not name.startswith("_") and name not in known and self._begins_anew(value):
                        self._name(name, owner, self._lead)

    def _begins_anew(self, value: Any) -> bool:
        """Whether an attribute holds tensors, or a generator that it did not hold when the run began."""
        return _has_tensors(value) or bool(Draws(value, without=[*self._known, *self._draws.held]).held)

    def _name(self, name: str, owner: object, say: Callable[[str], None]) -> None:
        text = f"no part of the state, and begins anew: {name} of {type(owner).__name__}"
        if text not in self._named:
            self._named.add(text)
            say(text)

    def _vote(self) -> int:
        """0, 1 for a state, or the number of the signal that asks to end. Rank 0 knows when a state is due."""
        step, at = self._saved
        steps = self.at.steps - step + self.ranks.delay
        due = steps >= self.every.steps if self.every.steps else time.monotonic() - at >= (self.every.seconds or 0.0)
        return int(self.asked.by) or int(due and self.ranks.rank == 0 and not self.writer.busy)

    # -- a state -----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        mine = {**self._epoch_began, "random": self.order.draws.text(self.call.device), "noted": self.order.note()}
        if self.at.batches == self.order.length:
            mine["sampler"] = self._sampler()  # the next epoch's shuffle
        plain = [kept.changed() for kept in self._kept]
        mine["module"] = {"random": as_text(self._draws.held_states()), "plain": plain}
        parts = self.ranks.gather(mine)
        self._saved = (self.at.steps, time.monotonic())
        if self.ranks.rank != 0:
            return
        for kept in self._kept:
            for name in kept.left:
                self._name(name, kept.owner, self.report)
        tensors = dict[str, Any](self._weights())
        self.writer.write(self.at.steps, {**self._described(tensors), "ranks": parts}, tensors)

    def _described(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The state but for what each rank has of its own, its tensors put into `tensors`.

        Raises:
            ResumeInvalid: the optimizer has something that is not saved.
        """
        accelerator, changed = self.call.accelerator, attributes(self.optimizer)
        changed = {name: value for name, value in changed.items() if content(value) != self._made_with.get(name)}
        return {
            "identity": self.identity,
            "arguments": dict(parsed_arguments),
            "plan": self.run.plan.strategy.value,
            "position": dict(vars(self.at)),
            "epoch_ended": self.at.batches == self.order.length,
            "ended": self._is_last(),
            "optimizer": flatten(self.optimizer.state_dict(), "optimizer", tensors),
            "attributes": flatten(changed, "attributes", tensors),
            "scheduler": flatten(self.scheduler.state_dict(), "scheduler", tensors),
            "scaler": flatten(accelerator.scaler and accelerator.scaler.state_dict(), "scaler", tensors),
            "accelerator_step": accelerator.step,
            "logger_steps": self.call.logger.num_steps,
            "gradients_ready": self._ready,
            "frozen": [name for name, weight in self._weights().items() if not weight.requires_grad],
        }

    def _weights(self) -> dict[str, torch.nn.Parameter]:
        """The weights that have been trained since the run began, also if they are frozen by now."""
        for name, weight in self.call.model.named_parameters():
            if weight.requires_grad or weight in self.optimizer.state:
                self._trained[f"model.{name}"] = weight
        return dict(self._trained)

    def _shuffle(self) -> Any:
        """The innermost sampler; accelerate's `get_sampler` finds none behind the shards of several processes."""
        sampler = self.loader.batch_sampler
        while inner := getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None):
            sampler = inner
        return sampler

    def _sampler(self) -> dict[str, Any]:
        """The state of the shuffle: of generators of its own, and the seed of accelerate's seedable sampler."""
        return {
            "random": as_text(self._shuffled.held_states()),
            "seed": getattr(self._shuffle(), "initial_seed", None),
        }

    def _set_sampler(self, saved: dict[str, Any]) -> None:
        self._shuffled.set(saved["random"])
        if saved["seed"] is not None:
            self._shuffle().initial_seed = saved["seed"]


def _has_tensors(value: Any) -> bool:
    """As an average of the weights has that a script keeps."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(one, (torch.Tensor, torch.nn.Module)) for one in held)


class _Loader:
    """The iterable of the loop, in place of accelerate's loader."""

    def __init__(self, run: ResumableRun) -> None:
        self._run = run

    @property
    def batches_before(self) -> int:
        """Micro-batches that earlier attempts trained."""
        return self._run.batches_before

    def __iter__(self) -> Iterator[Any]:
        return self._run.batches()

    def __len__(self) -> int:
        return len(self._run.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.loader, name)
