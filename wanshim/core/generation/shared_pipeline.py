"""A pipeline whose forwards go over GPUs, from one call of it to the next.

Guidance: the loop calls a forward with the prompt and then without, and reads neither result in between. The first call
goes to a worker and returns a tensor that is filled when the second, which runs here meanwhile, returns.

Tokens: the processes that compute one forward each have a part of its tokens, and exchange them around self-attention.
With guidance they are halves: this process and the first workers, and the other workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from wanshim.core.decoding import Compute, VaeFallback, find_binding, input_first
from wanshim.core.sequence import SequenceGroup
from wanshim.core.shared.fallback import cause_of, or_framework
from wanshim.core.shared.gpu_memory import available_bytes, free_bytes
from wanshim.core.shared.recent import Recent
from wanshim.core.shared.weight_bytes import num_bytes
from wanshim.core.strategy.block_trace import trace_forward
from wanshim.core.streaming import HostCopy, bytes_when_streamed
from wanshim.core.streaming.page_locked import PageLocked
from wanshim.core.workers import RemoteCall, Replies, Workers
from wanshim.errors import HostMemoryInvalid, ModelInvalid, RanksFailed, WanshimError, WorkersFailed, WorkersInvalid
from wanshim.undo import Undo
from wanshim.values import checked_seconds

from . import together, tokens
from .binding import Forward, NotShared, PipelineBinding
from .decide import decide
from .devices import check_around, check_copied, check_plain, choose_devices, device_of
from .first_forward import compare
from .host_streams import OwnStreams, host_copy, settle, wait_for
from .job import GenerationJob, Limits, Request
from .own_code import called_by_program, is_installed
from .plan import GenerationPlan, describe
from .shared_workers import SharedWorkers

logger = logging.getLogger("wanshim.generation")
T = TypeVar("T")
DEADLINE_SECONDS = 300.0
CONTEXT_BYTES = 2**30  # of CUDA and NCCL, in a process that has not begun
_SPARE_SHARE, _SPARE_BYTES = 1 / 8, 2**29  # of what a forward needs, and beside it, for what is not predicted
NO_GUIDANCE = "the guidance scale switches guidance off: a step has one forward"
_STATE = "__getstate__"
# Bytes that a forward needs beside its models, by its first model and the sizes of its arguments.
_WORKING: WeakKeyDictionary[nn.Module, Recent[tuple[Any, ...], int | None]] = WeakKeyDictionary()


class SharedPipeline:
    """One pipeline, and the workers that it shares with others of the same request.

    Args:
        request: what the user asked for.
        deadline: seconds in which a worker must start, and complete a forward after this process has completed its own.
        prepare: `module:function` that a worker calls first.
        on_plan: called with each new plan.
    """

    def __init__(
        self,
        request: Request,
        *,
        deadline: float = DEADLINE_SECONDS,
        prepare: str = "",
        on_plan: Callable[[GenerationPlan], None] = lambda plan: None,
    ) -> None:
        self.plan: GenerationPlan | None = None
        self.shared_forwards = self.shared_vae_calls = 0
        self.streamed_forwards = 0  # in place of the script's offload
        self.request = request
        self.copied: WeakSet[nn.Module] = WeakSet()  # models of which workers may hold copies for this pipeline
        self._on_plan = on_plan
        self._all = SharedWorkers.find(request.gpus, request.devices, checked_seconds(deadline, "deadline"), prepare)
        self._own: torch.device | None = None
        self._process = os.getpid()
        self._streams: OwnStreams | None = None  # of the call now
        self._asides = 0  # how often the user's own code runs within the call now

    @property
    def is_of_this_process(self) -> bool:
        """Whether it was made here, and not in the process from which this one was forked."""
        return self._process == os.getpid()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that run."""
        return self._workers.pids if self._workers is not None else ()

    @property
    def _workers(self) -> Workers | None:
        return self._all.running(self._own)

    @property
    def workers_hold_nothing(self) -> bool:
        return self._workers is None or self._workers.hold_nothing

    def used_by_worker(self, device: str, models: Iterable[nn.Module], *, alone: bool = False) -> int:
        """Bytes of a device that are not free because its worker has them: copies, and what its last forwards left in
        torch's allocator, if it holds these models. Less than zero without: a worker needs memory for itself.

        Args:
            alone: of copies, those of these models; the others can be freed.
        """
        here, models = self._workers, list(models)
        place = here.devices.index(torch.device(device)) if here and torch.device(device) in here.devices else -1
        if here is None or place < 0 or not here.num_bytes(place):
            return -CONTEXT_BYTES
        peaks = self.plan.peaks if self.plan is not None and here.holds(place, models) else {}
        return max(here.num_bytes(place, models if alone else None), peaks.get(device, 0))

    def run(self, bind: Callable[[], PipelineBinding], call: Callable[[], T]) -> T:
        """`call()`, which calls the pipeline, with its forwards over the GPUs. One call at a time; others wait.

        Args:
            bind: reads the pipeline, before anything is changed in it.

        Raises:
            NotShared: the call has not begun, and should run as without wanshim.
            WorkersFailed: a worker failed; the next call starts new ones.
        """
        with self._all.lock:
            if self._all.in_call is not None:  # a pipeline that is called by another, or by itself
                outer, binding = self._all.in_call
                is_aside = called_by_program(binding.package, SharedPipeline.run.__code__, depth=2)
                with outer.aside() if is_aside else contextlib.nullcontext():
                    return call()
            binding = bind()
            made = _Call(self, binding, self.begin(binding))
            self._streams = made._streams
            self._all.in_call = self, binding
            try:
                with made.attached():
                    result = call()
                made.check_complete()
                return result
            except BaseException:
                if made.is_busy:
                    self.end_workers()
                raise
            finally:
                self._all.in_call = self._streams = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """While it is open, as around the user's own code between steps, the models that this calls compute here."""
        self._asides += 1
        if self._streams is not None:  # that code may change models, and sees them as its offload has them
            self._streams.end()
        try:
            yield
        finally:
            self._asides -= 1

    def devices_for(self, binding: PipelineBinding) -> tuple[torch.device, ...]:
        """The devices of its models and of the workers.

        Raises:
            NotShared: its models cannot be copied, or not to these devices, or there are fewer than asked for.
            ModelInvalid: those that are named do not begin with the pipeline's own.
        """
        with binding.as_made():
            for name, module in binding.modules.items():
                check_plain(name, module)
            devices = choose_devices(binding.device or device_of(binding.modules.values()), self.request)
            check_around(devices[0])
            check_copied(binding.modules, devices[0])
        return devices

    def begin(self, binding: PipelineBinding) -> tuple[torch.device, ...]:
        """Start workers on the devices of the last plan, or on all, which `devices_for` returns: they load torch and
        what the models are made of while this process does what comes before the first forward, which says so if they
        cannot be started."""
        devices = self.devices_for(binding)
        self._own = devices[0]
        if self.plan is None and self.pids:  # of other pipelines: how many are needed is not known before the plan
            return devices
        used = devices if self.plan is None else tuple(map(torch.device, self.plan.devices))
        if len(used) > 1 and used[0] == devices[0] and set(used) <= set(devices):
            modules = {type(model).__module__ for model in binding.copied}
            with contextlib.suppress(WorkersFailed):
                self._workers_on(used).begin(sorted(filter(is_installed, modules)))  # others would run the program
        return devices

    def close(self) -> None:
        """Leave the workers, which end unless another pipeline uses them. The next call joins or starts them again."""
        self._all.leave(self)

    def end_workers(self) -> None:
        """End them for all pipelines: nobody knows how far they came."""
        if self._own is not None:
            self._all.end(self._own)

    def workers_on(self, plan: GenerationPlan) -> Workers:
        return self._workers_on(tuple(map(torch.device, plan.devices)))

    def _workers_on(self, devices: tuple[torch.device, ...]) -> Workers:
        self._own = devices[0]
        self._all.users.add(self)
        return self._all.on(devices)

    def group(self, half: tokens.Half) -> SequenceGroup:
        """This process's end of its half."""
        assert self._workers is not None
        return self._all.group(half, self._workers)

    def make_room(self, plan: GenerationPlan, free: Mapping[str, int | None], models: list[nn.Module]) -> None:
        """Have workers free copies of other pipelines' models if a device of this plan has no memory beside them."""
        for device, needed in plan.peaks.items():
            here = free.get(device)
            if here is not None and self._workers and here + self.used_by_worker(device, models, alone=True) < needed:
                self._workers.keep_only(models)
                return

    def working_bytes(self, forward: Forward, args: Any, kwargs: Any) -> int | None:
        """Bytes that a forward needs beside its models; None where its code cannot be traced on shapes."""
        leaves = tree_leaves((args, kwargs))
        models = (id(leaf) for leaf in (forward.function, *leaves) if isinstance(leaf, nn.Module))
        sizes = (*models, *((t.shape, t.dtype) for t in leaves if isinstance(t, torch.Tensor)))
        known = _WORKING.setdefault(next(iter(forward.modules.values())), Recent(64))
        if sizes not in known:
            try:
                function = getattr(forward.function, "_orig_mod", forward.function)  # of torch.compile
                known[sizes] = trace_forward(function, forward.modules, args, kwargs)
            except Exception:  # a kernel that knows no shapes without elements
                known[sizes] = None
        return known[sizes]

    def planned(self, plan: GenerationPlan) -> None:
        if plan != self.plan:
            self.plan = plan
            self._on_plan(plan)


class _Call:
    """One call of the pipeline."""

    def __init__(self, shared: SharedPipeline, binding: PipelineBinding, devices: tuple[torch.device, ...]) -> None:
        self._shared, self._binding, self._devices = shared, binding, devices
        self._thread = threading.get_ident()
        self._plan: GenerationPlan | None = None
        self._held: dict[int, int] = {}  # by ids of models, how many workers have copies that are up to date
        # Models whose weights may be on their way to their copies.
        self._coming: list[tuple[nn.Module, HostCopy | PageLocked]] = []
        # What is replaced: its owner, its name, the replacement, and what the owner itself had, by that name.
        self._placed: list[tuple[Any, str, Any, dict[str, Any]]] = []
        self._shared_verbs: set[str] = set()  # of the VAE
        self._prepares_decode = binding.decodes
        self._waiting: tuple[Forward, Any, list[RemoteCall], Any] | None = None
        self.is_busy = False  # a worker computes a forward whose result nobody has
        self._has_ended = False
        self._streams = OwnStreams(
            binding, devices[0], self._without_replacements, self._placed, self._may_keep, self._on_kept
        )
        self._working: int | None = None  # bytes of a forward beside the models

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        with Undo() as undo:
            for forward in self._binding.forwards:
                self._place(forward.owner, forward.attribute, partial(self._replacement, forward), undo)
            for verb in together.VERBS if self._binding.vae is not None else ():
                self._share_vae(self._binding.vae, verb, undo)
            for owner, name in () if self._binding.offload is None else self._binding.offload.ends:
                self._place(owner, name, self._behind_streams, undo)
            for owner, name in self._binding.own:
                self._place(owner, name, self._aside, undo)
            try:
                yield
            finally:
                self._has_ended = True
                self._streams.end()

    def _place(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]], undo: Undo) -> None:
        """Have `make(the original)` called in its place, in this call and its thread: workers are for nobody else, as a
        thread that decodes meanwhile, or one who has kept the replacement behind the call."""
        method = _original(owner, name)
        made = make(method)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            is_own = not self._has_ended and threading.get_ident() == self._thread
            return (made if is_own else method)(*args, **kwargs)

        replacement.__wrapped__ = getattr(owner, name)  # type: ignore[attr-defined] # whoever reads its signature
        if all(owner is not each for each, *_ in self._placed):
            self._set(owner, _STATE, lambda: self._state(owner), undo)  # a function: who copies the rest shares it
        self._set(owner, name, replacement, undo)

    def _set(self, owner: Any, name: str, value: Any, undo: Undo) -> None:
        own = {name: vars(owner)[name]} if name in vars(owner) else {}
        undo.set(owner, {name: value}, keep_foreign=True)  # what a callback sets stays there
        self._placed.append((owner, name, value, own))

    def _state(self, owner: Any) -> Any:
        """The state of an object for `copy`, `copy.deepcopy` and `pickle` during a call, in whatever thread: as the
        script has it. A replacement in a copy would compute with the original."""
        of_class = getattr(type(owner), _STATE, None)  # of every class since Python 3.11
        state = vars(owner) if of_class is None else of_class(owner)
        of_slots: list[Any] = []
        if isinstance(state, tuple):
            state, *of_slots = state
        if isinstance(state, dict):
            state = dict(state)
            for each, name, value, own in reversed(self._placed):
                if each is owner and state.get(name) is value:
                    del state[name]
                    state.update(own)
        return (state, *of_slots) if of_slots else state

    def _aside(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._shared.aside():
                return method(*args, **kwargs)

        return call

    def _behind_streams(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._streams.end()
            return method(*args, **kwargs)

        return call

    def check_complete(self) -> None:
        if self._waiting is not None:
            raise WanshimError(
                f"{self._binding.name} ended between the two forwards of a step",
                expected="a forward without the prompt after each one with it",
                hint="Its frames are not to be used; report this release of the framework",
            )

    def _replacement(self, forward: Forward, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._shared._asides:  # no step of this call
                return own(*args, **kwargs)
            if called_by_program(self._binding.package, SharedPipeline.run.__code__):
                with self._shared.aside():
                    self._check_taken_over()
                    return own(*args, **kwargs)
            if forward.reads is not None:
                kwargs = {name: value for name, value in kwargs.items() if name in forward.reads}
            if self._binding.device is not None:  # the hooks of an offload do this
                args, kwargs = tree_map_only(torch.Tensor, partial(_on, self._devices[0]), (args, kwargs))
            if self._waiting is not None:
                return self._second(forward, own, args, kwargs)
            if torch.is_grad_enabled():
                return own(*args, **kwargs)
            if self._plan is None and self._shared.request.asks_for_one and self._binding.offload is not None:
                self._bring(forward.used(args, kwargs), shared=False)  # while the plan traces a forward
            plan = self._plan = self._plan or self._decide(forward, args, kwargs)
            is_pair = plan.guidance > 1 and self._binding.is_guided()  # which a user's callback may switch off
            with self._or_one_gpu(plan):
                if is_pair or plan.sequence > 1:
                    self._check_now()
                if is_pair:
                    return self._first(forward, args, kwargs)
                if plan.sequence > 1:
                    return self._together(forward, own, args, kwargs)[0]
            return self._here(forward, own, args, kwargs)(*args, **kwargs)

        def call_alone(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if self._waiting is None and not self._shared._asides:
                self._streams.end()  # the program's own code comes next, and sees models as its offload has them
            return result

        return call_alone if self._binding.runs_unseen else call

    @contextlib.contextmanager
    def _or_one_gpu(self, plan: GenerationPlan) -> Iterator[None]:
        """A context whose body may find that it cannot use the devices of the plan: then the rest of the call is on
        one, and the plan says why."""
        try:
            yield
        # a callback's change, or an argument, that no copy will have; or the host has no room for copies
        except (NotShared, WorkersInvalid, HostMemoryInvalid) as reason:
            self.is_busy = False
            rejected = {**plan.rejected, describe(plan.guidance, plan.sequence): str(reason)}
            self._plan = replace(
                plan, guidance=1, sequence=1, devices=plan.devices[:1], streamed=False, peaks={}, rejected=rejected
            )
            self._shared.planned(self._plan)

    def _here(self, forward: Forward, own: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
        """The function that computes a forward in this process: with its models' blocks streamed, or as the script has
        it."""
        assert self._plan is not None
        if not self._plan.replaces_offload:
            self._streams.end()
            return own
        try:
            compute = self._streams.begin(
                forward,
                forward.used(args, kwargs),
                shared=self._plan.streamed,
                coming=[copy for _, copy in self._coming],
            )
        except Exception as error:  # the script's own offload is as it was
            self._streams.end()
            logger.warning("wanshim: %s keeps the script's offload: %s", self._binding.name, cause_of(error))
            rejected = {**self._plan.rejected, "streaming in place of the script's offload": cause_of(error)}
            self._plan = replace(self._plan, replaces_offload=False, keeps_streamed=False, rejected=rejected)
            self._shared.planned(self._plan)
            return own
        self._shared.streamed_forwards += 1
        return compute

    def _may_keep(self, module: nn.Module, size: int, most: int) -> int:
        """The number of slots of so many bytes, at most `most`, that a model may have beside those in which its blocks
        take turns: as far as the script's offload lets it, and the forward has room beside them."""
        assert self._plan is not None
        assert self._binding.offload is not None
        free = free_bytes(self._devices[0])
        # Processes with tokens of the same forward wait for the one that streams longest.
        if free is None or self._working is None or (self._plan.streamed and self._plan.sequence > 1):
            return 0
        room = min(free - self._working * (1 + _SPARE_SHARE) - _SPARE_BYTES, self._binding.offload.room(module))
        return max(0, int(min(most, room // size)))

    def _on_kept(self) -> None:
        assert self._plan is not None
        peaks = {device: peak for device, peak in self._plan.peaks.items() if device != str(self._devices[0])}
        self._plan = replace(self._plan, keeps_streamed=True, peaks=peaks)
        self._shared.planned(self._plan)

    def _share_vae(self, vae: Any, verb: str, undo: Undo) -> None:
        """Let the processes of the plan decode or encode together."""
        try:
            binding = find_binding(vae, verb)
            methods = binding.methods
            if binding.entry and binding.around and binding.entry not in vars(vae):  # or what is there comes first
                methods = {binding.entry: binding.around}
            check_plain("vae", vae, (*methods, *binding.methods))
        except (NotShared, ModelInvalid):
            return

        def over_processes(given: torch.Tensor, *, lean: bool = False, **_: Any) -> torch.Tensor:
            if lean:
                raise VaeFallback("tiles")
            try:
                workers, size = self._workers_for_vae(vae, given.device)
                self.is_busy = True
                result = together.run(workers, size, vae, verb, given, fast=self._shared.request.fast_vae)
            except Exception as error:
                if not isinstance(error, VaeFallback):
                    logger.warning("wanshim: the %s is left to this process: %s", verb, cause_of(error))
                if not isinstance(error, (VaeFallback, RanksFailed)):  # a worker may still compute
                    self._shared.end_workers()
                self.is_busy = False
                raise
            self.is_busy = False
            self._shared.shared_vae_calls += 1
            return result

        def by_position(compute: Compute, original: Callable[..., Any]) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> Any:
                given, named = input_first(original, args, kwargs)
                return compute(over_processes, vae, *given, **named)

            return method

        for name, compute in methods.items():
            method = by_position(compute, getattr(vae, name))
            self._place(vae, name, partial(or_framework, method, on_fallback=lambda cause: None), undo)
            self._shared_verbs.add(verb)

    def _prepare_decode(self) -> None:
        """Behind the first forward: a decode's kernels take seconds to compile, which the other forwards take, too."""
        vae, wanted = self._binding.vae, self._prepares_decode
        self._prepares_decode = False
        if not wanted or vae is None or "decode" not in self._shared_verbs:
            return
        with contextlib.suppress(VaeFallback, NotShared):
            workers, size = self._workers_for_vae(vae, device_of([vae]))
            self.is_busy = True
            together.prepare(workers, size, vae, fast=self._shared.request.fast_vae)
        self.is_busy = False

    def _workers_for_vae(self, vae: nn.Module, device: torch.device) -> tuple[Workers, int]:
        """The workers, which hold the VAE, and how many processes they are with this one.

        Raises:
            VaeFallback: they cannot help.
        """
        plan = self._plan or (self._shared.plan if self._shared.pids else None)
        if plan is None or plan.gpus == 1 or device != self._devices[0]:
            raise VaeFallback("no plan yet, or one GPU")
        workers = self._shared.workers_on(plan)
        if device.type == "cuda" and not workers.over_nccl:
            raise VaeFallback("processes that share a GPU")
        try:
            check_around(device)
        except NotShared as reason:
            raise VaeFallback(str(reason)) from reason
        self._hold_vae(vae, workers, plan.gpus)
        return workers, plan.gpus

    def _hold_vae(self, vae: nn.Module, workers: Workers, size: int) -> None:
        if self._is_held(vae, workers, size - 1):
            return
        try:
            with self._bare():
                self._check_again("vae", vae, [name for owner, name, *_ in self._placed if owner is vae])
                self._shared.copied.add(vae)
                if workers.hold(vae, count=size - 1):
                    together.weights_changed(vae)
        except (NotShared, WorkersInvalid) as reason:
            raise VaeFallback(str(reason)) from reason
        self._held[id(vae)] = size - 1

    def _first(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """With the prompt: the other half computes it."""
        if forward.same not in kwargs:
            raise NotShared(f"its loop gives {forward.same} by position, not by name")
        try:
            result = forward.empty(*args, **kwargs)
        except Exception as error:  # of arguments that the model refuses, too, which says so itself
            raise NotShared(f"the shape of a forward's result is not known: {error}") from error
        for tensor in tree_leaves(result):
            tensor.fill_(float("nan"))  # whoever reads it too early sees that
        others = self._sent(forward, self._half(1), args, kwargs)
        self._waiting = forward, kwargs[forward.same], others, result
        return result

    def _second(self, forward: Forward, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Without it: this half does, meanwhile."""
        assert self._waiting is not None
        first, same, others, result = self._waiting
        if first is not forward or not _is_same(kwargs.get(forward.same), same):
            raise WanshimError(
                f"{self._binding.name} called a model with other inputs between the two forwards of a step",
                expected=f"the same model and the same {forward.same} without the prompt as with it",
                hint="Code of the program that calls the model within a step, as a solver of two orders does, "
                "belongs in a method of the scheduler or a callback; or generate on one GPU",
            )
        mine, theirs = self._together(forward, own, args, kwargs, others)
        for place, tensor in zip(tree_leaves(result), tree_leaves(theirs), strict=True):
            if (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                raise WanshimError(
                    f"a forward of {self._binding.name} returned {tensor.dtype} {list(tensor.shape)}",
                    expected=f"{place.dtype} {list(place.shape)}",
                    hint="Generate on one GPU, and report this release of the framework",
                )
            place.copy_(tensor)
        self._waiting = None
        return mine

    def _together(
        self, forward: Forward, own: Callable[..., Any], args: Any, kwargs: Any, others: Sequence[RemoteCall] = ()
    ) -> tuple[Any, Any]:
        """The result of this half, and that of the first of the other calls."""
        assert self._plan is not None
        if self._plan.sequence == 1:
            try:
                mine = self._here(forward, own, args, kwargs)(*args, **kwargs)
            except Exception:  # as of a size that the model refuses, in the other process too: that one lives
                for call in others:
                    with contextlib.suppress(WorkersFailed):
                        call.result(spare=True)
                self.is_busy = False
                raise
            theirs = [call.result() for call in others]
        else:
            half = self._half(0)
            calls = [*others, *self._sent(forward, half, args, kwargs)]
            mine, theirs = self._in_half(half, forward, self._here(forward, own, args, kwargs), (args, kwargs), calls)
        self.is_busy = False
        self._shared.shared_forwards += 1
        self._prepare_decode()
        return mine, theirs[0]

    def _in_half(
        self,
        half: tokens.Half,
        forward: Forward,
        compute: Callable[..., Any],
        given: tuple[Any, Any],
        calls: Sequence[RemoteCall],
        *,
        late: float | None = None,
    ) -> tuple[Any, list[Any]]:
        """The result of this process's half, and what those return that compute meanwhile; `late` as of `sharded`."""
        (args, kwargs), group = given, self._shared.group(half)
        replies = Replies(calls, partial(group.abort, "a worker failed"))
        try:
            with tokens.over(group, forward.function, forward.blocks, args, kwargs, late=late):
                mine = compute(*args, **kwargs)
        except RanksFailed:
            replies.raise_failure()
            raise
        return mine, replies.results()

    def _half(self, number: int) -> tokens.Half:
        assert self._plan is not None
        workers, sequence = self._shared.workers_on(self._plan), self._plan.sequence
        first = number * sequence
        return tokens.Half(tuple(range(first, first + sequence)), workers.deadline, workers.over_nccl)

    def _sent(self, forward: Forward, half: tokens.Half, args: Any, kwargs: Any) -> list[RemoteCall]:
        """Have the workers of a half compute a forward."""
        assert self._plan is not None
        workers = self._shared.workers_on(self._plan)
        self.is_busy = True  # an interrupt may come while copies are compared
        with self._weights_come(workers):
            self._hold(forward.used(args, kwargs), workers)
            self._here(forward, forward.function, args, kwargs)  # for the comparison
            with self._without_replacements():
                # blocks whose tokens go over GPUs are not compiled
                whole = forward.is_compiled or (self._shared.request.fast_forwards and self._plan.sequence == 1)
                halves = map(self._half, range(self._plan.guidance) if self._plan.sequence > 1 else ())
                together = {each.ranks: partial(self._over_tokens, forward, each) for each in halves}
                if compare(workers, self._plan.gpus - 1, forward, args, kwargs, whole=whole, together=together):
                    self._streams.time_anew()
        return self._calls(forward, half, *forward.as_sent(args, kwargs))

    def _over_tokens(self, forward: Forward, half: tokens.Half, args: Any, kwargs: Any, late: float) -> Any:
        """The result of a half while the other one waits."""
        calls = self._calls(forward, half, args, kwargs, late)
        if 0 in half.ranks:
            return self._in_half(half, forward, forward.function, (args, kwargs), calls, late=late)[0]
        return Replies(calls, lambda: None).results()[0]

    def _calls(
        self, forward: Forward, half: tokens.Half, args: Any, kwargs: Any, late: float | None = None
    ) -> list[RemoteCall]:
        assert self._plan is not None
        workers = self._shared.workers_on(self._plan)
        if len(half.ranks) == 1:
            return [workers.call(half.ranks[0] - 1, forward.function, *args, **kwargs)]
        given = forward.function, forward.blocks, args, kwargs, late
        return [workers.call(rank - 1, tokens.compute, half, workers.file, rank, *given) for rank in half.ranks if rank]

    def _hold(self, models: list[nn.Module], workers: Workers) -> None:
        """Have workers hold the models of a forward as they are now."""
        assert self._plan is not None
        count = self._plan.gpus - 1
        missing = {
            name: module
            for name, module in self._binding.modules.items()
            if any(module is each for each in models) and not self._is_held(module, workers, count)
        }
        if not missing:
            return
        self._streams.end()  # what is copied is the model as its classes made it
        try:
            workers.start()  # before pages are fetched and locked: CUDA's other calls wait for that
        except WorkersFailed as error:
            raise NotShared(f"its workers did not start: {error.found}") from error
        brought = self._bring(models, shared=self._plan.streamed) if self._plan.replaces_offload else {}
        for name, module in missing.items():
            if self._binding.offload is not None and module not in brought:
                self._binding.offload.before(module)
            self._shared.copied.add(module)
            with self._bare():
                self._check_again(name, module)
                host = host_copy(module, shared=True) if self._plan.streamed else None
                copy = host or brought.get(module)
                if copy is not None:
                    self._coming.append((module, copy))
                if host is not None:
                    workers.share(host, count)
                elif copy is not None:
                    wait_for(module, copy)
                workers.hold(
                    module,
                    count=count,
                    renew=True,
                    set_up=self._binding.set_up,
                    moved=self._binding.device is not None,
                    host=host,
                )
            self._held[id(module)] = count

    @contextlib.contextmanager
    def _weights_come(self, workers: Workers) -> Iterator[None]:
        """While it is open, weights may be on their way to copies; at its end they are there. A failure must come here:
        in the loop's forwards, workers compute at the same time."""
        failed = True
        try:
            yield
            for module, copy in self._coming:
                wait_for(module, copy)
            failed = False
        finally:
            coming, self._coming = self._coming, []
            have_come = [settle(module, copy) for module, copy in coming] if failed else []
            if not all(have_come):
                self._streams.end()  # this process takes a copy of its own, if it still computes
                workers.close()  # they have mapped the copy that failed

    def _bring(self, models: list[nn.Module], *, shared: bool) -> dict[nn.Module, HostCopy | PageLocked]:
        """Have the weights of models that the script offloads on the way to pages that are locked: from these they are
        sent, too, at several times the rate. What fails here is said where they are streamed."""
        with contextlib.suppress(Exception):
            brought = self._streams.bring(models, shared=shared)
            copies = {module: copy for module, copy in brought if copy is not None}
            for copy in copies.values():
                copy.lock(self._devices[0])
            return copies
        self._streams.end()
        return {}

    def _is_held(self, module: nn.Module, workers: Workers, count: int) -> bool:
        """Whether the first `count` workers hold the module as it is now. An encode may have used fewer than the plan
        of this call does, and a failure, or a plan without memory for them, may have freed the copies."""
        known = self._held.get(id(module), 0) >= count and not self._binding.may_change
        return known and all(workers.holds(place, [module]) for place in range(count))

    def _check_now(self) -> None:
        """Raise NotShared if what runs between steps has set what a worker would not have."""
        check_around(self._devices[0])
        if self._binding.may_change:
            with self._bare():
                self._binding.check()

    def _check_taken_over(self) -> None:
        """A plan says from now on that nothing is shared, if the program's code has put itself in the place of a
        forward. Before there is a plan, and between the two forwards of a pair, nothing changes."""
        if self._plan is not None and self._waiting is None:
            with self._or_one_gpu(self._plan):
                self._check_now()
                with self._bare():
                    for name, module in self._binding.modules.items():
                        self._check_again(name, module)

    def _check_again(self, name: str, module: nn.Module, methods: Iterable[str] = ()) -> None:
        """Raise NotShared if the user's code between steps has changed what the module computes with."""
        if self._binding.may_change:
            check_plain(name, module, methods)

    def _decide(self, forward: Forward, args: Any, kwargs: Any) -> GenerationPlan:
        with self._bare():
            weights = sum(map(num_bytes, self._binding.copied))
            self._working = self._shared.working_bytes(forward, *forward.as_sent(args, kwargs))
        job = GenerationJob(
            pipeline=self._binding.name,
            devices=tuple(map(str, self._devices)),
            no_pair=self._binding.no_pair or ("" if self._binding.is_guided() else NO_GUIDANCE),
            no_sequence=self._binding.no_sequence,
            heads=self._binding.heads,
            at_most=self._shared.request.at_most,
            why_one="one GPU was asked for" if self._shared.request.asks_for_one else "one GPU is in sight",
            weights=weights,
            is_offloaded=self._binding.device is not None,
            working=self._working,
            fast_forwards=self._shared.request.fast_forwards,
            fast_vae=self._shared.request.fast_vae,
        )
        free = {str(device): available_bytes(device, to_another=True) for device in self._devices[1:]}
        models = list(self._binding.modules.values())
        room = {d: n + self._shared.used_by_worker(d, models) for d, n in free.items() if n is not None}
        limits = Limits(available=room)
        plan = decide(job, limits)
        if self._binding.offload is not None or plan.gpus < len(self._devices):  # whole models do not fit all
            plan = decide(self._streamed(job, forward.used(args, kwargs)), limits)
        self._shared.make_room(plan, free, self._binding.copied)
        self._shared.planned(plan)
        if plan.gpus == 1 and self._shared.workers_hold_nothing:
            self._shared.close()
        return plan

    def _streamed(self, job: GenerationJob, here: list[nn.Module]) -> GenerationJob:
        """The job with the bytes that its models need where they are streamed. Args: here: those of a forward."""
        with self._bare():
            parts = {module: bytes_when_streamed(module) for module in self._binding.modules.values()}
            at_once = sum(parts[module] or num_bytes(module) for module in here)
            rest = 0 if self._binding.vae is None else num_bytes(self._binding.vae)
        is_replaced = self._binding.offload is not None and any(parts.values())
        why_one = job.why_one
        if self._binding.offload is not None and not is_replaced:
            why_one += ", and what is not plain tensors in blocks stays with the script's offload"
        return replace(
            job,
            why_one=why_one,
            own_streamed=rest + at_once if is_replaced else None,
            streamed=None if None in parts.values() else rest + sum(filter(None, parts.values())),
        )

    @contextlib.contextmanager
    def _bare(self) -> Iterator[None]:
        """Modules as the framework made them: a copy has no replacement of ours in it, and no offload of the script."""
        with self._without_replacements(), self._binding.as_made():
            yield

    @contextlib.contextmanager
    def _without_replacements(self) -> Iterator[None]:
        """Modules, and what else is replaced, as the script has them."""
        with Undo() as undo:
            for owner, name, replacement, own in reversed(self._placed):  # one may be over another
                if vars(owner).get(name) is replacement:  # else a callback has set its own
                    undo.add(partial(vars(owner).__setitem__, name, vars(owner).pop(name)))
                    vars(owner).update(own)
            yield


def _original(owner: Any, name: str) -> Callable[..., Any]:
    """The method that Python would call; a callback may put another one on the class."""
    if name in vars(owner):
        return getattr(owner, name)  # type: ignore[no-any-return]
    return lambda *args, **kwargs: getattr(type(owner), name)(owner, *args, **kwargs)


def _is_same(found: Any, expected: torch.Tensor) -> bool:
    """Also where each forward has a conversion of its own of the latents."""
    return found is expected or (isinstance(found, torch.Tensor) and torch.equal(found, expected))


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device)
