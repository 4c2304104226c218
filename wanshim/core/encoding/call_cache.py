"""Results of calls by content: what a frozen model makes of a sample is computed once, by whichever process comes to it
first, and read from then on.

A call is known by its inputs, bit for bit, and by the identity of what computes. What draws at random is not kept, nor
what reads something that was drawn: such a tensor is withheld in the call, and one that reads it is computed again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from wanshim.core.encoding.cache import EmbeddingCache
from wanshim.core.encoding.contents import (
    Withheld,
    WithheldRead,
    content,
    draw_states,
    packed,
    tensors_in,
    unpacked,
)
from wanshim.core.encoding.directory import CacheDirectory, CacheUnavailable
from wanshim.core.encoding.files import sha256_json
from wanshim.core.shared.fallback import Fallback
from wanshim.core.shared.files import Lock, NotOwn

_log = logging.getLogger(__name__)

TURN_S = 60.0  # for another process that computes the same; then this one does, too
_POLL_S = 0.02
MOST_LATE = 4  # results that were not there in a later epoch, more than those that were
Compute = Callable[..., Any]


class CallCache:
    """Results of calls in one folder, for as long as it is open.

    Args:
        folder: of the entries; made if it is missing.

    Raises:
        WanshimError: others may write the folder.
        CacheUnavailable: it can neither be opened nor made.
    """

    def __init__(self, folder: Path) -> None:
        self._directory = CacheDirectory(folder)
        self._entries = EmbeddingCache(self._directory)
        self._directory.remove_abandoned()  # of writers that were killed
        self._drawn = WeakIdKeyDictionary()  # tensor -> its name
        self._keys: set[str] = set()  # of the entries that this process has read or written
        self._without_tensors: set[str] = set()  # keys whose results take nothing to compute
        self._calls: Counter[str] = Counter()  # by name
        self._late: Counter[str] = Counter()  # after the first epoch: computed, less read
        self.calls_of_an_epoch: dict[str, int] = {}  # by name, in this process; of others nothing is known
        self.counts: Counter[str] = Counter()
        self.left: dict[str, str] = {}  # calls that are not kept, by name, and why
        self.reasons: dict[str, str] = {}  # of those that made a tensor
        self.unkept = ""  # why an entry could not be written

    def close(self) -> None:
        self._directory.close()

    @property
    def num_damaged(self) -> int:
        return self._entries.rejected

    def is_complete(self, dataset: str, index: int, number: int) -> bool:
        """Whether a process has noted that all results of a dataset are kept, and those that fall to this process are
        there, whole. The calls that are not kept are then known.

        Args:
            dataset: the identity of the samples and of all that computes.
            index, number: of this process among those that ask.
        """
        found = self._entries.load_described(sha256_json([dataset]))
        parts = found[1]["parts"] if found is not None else 0
        noted = [
            self._entries.load_described(sha256_json([dataset, part, parts])) for part in range(index, parts, number)
        ]
        mine = [described for _, described in filter(None, noted)]
        if not parts or len(mine) < len(noted):
            return False
        if not all(self._entries.load(key) for described in mine for key in described["entries"]):
            return False
        for described in mine:
            self.left.update(described["reasons"])
            self.reasons.update(described["reasons"])
        return True

    def note_complete(self, dataset: str, index: int, number: int) -> None:
        """Note that all results of this process's share of a dataset are kept, unless one is not."""
        if self.unkept:
            return
        kept = {"entries": sorted(self._keys), "reasons": self.reasons}
        with suppress(CacheUnavailable):
            self._entries.save(sha256_json([dataset, index, number]), {}, kept)
            self._entries.save(sha256_json([dataset]), {}, {"parts": number})

    def watched(self, name: str, compute: Compute, device: torch.device, given: Any) -> Any:
        """The result of a call that is not kept; tensors that it makes count as drawn if it draws, or has a drawn one.

        Args:
            name: of the call.
            compute: the call, without arguments.
            given: its inputs.
        """
        before, inputs = draw_states(device), tensors_in(given)
        result = compute()
        known = set(map(id, inputs))
        made = [tensor for tensor in tensors_in(result) if id(tensor) not in known]
        if made and name in self.left:
            self.reasons[name] = self.left[name]
        if before != draw_states(device) or any(tensor in self._drawn for tensor in inputs):
            self._drawn.update(dict.fromkeys(made, name))
        return result

    def result(
        self,
        name: str,
        identity: Callable[[], str],
        compute: Compute,
        inputs: Mapping[str, Any],
        device: torch.device,
        beside: Callable[[], AbstractContextManager[list[str]]] = lambda: nullcontext([]),
    ) -> Any:
        """The result of `compute(**inputs)`, read if it is there, else computed and kept.

        Args:
            name: of the call, for people.
            identity: of all that it depends on beside its inputs; raises Fallback if that has none.
            device: on which results come that are not on the CPU.
            beside: a context of a call that is computed to be kept; its list has what the call did beside its result.
        """
        try:
            if name in self.left:
                raise Fallback(self.left[name])
            described = self._content(inputs)
            key = sha256_json([identity(), described])
        except Fallback as reason:
            return self._leave(name, str(reason), compute, inputs, device)
        if key in self._without_tensors:
            return compute(**inputs)
        self._calls[name] += 1
        found = self._read(name, key, inputs, device)
        if found is not None:
            return found
        with self._turn(key):
            found = self._read(name, key, inputs, device)  # another process may have computed it meanwhile
            return found if found is not None else self._compute(name, key, compute, inputs, described, device, beside)

    def _content(self, inputs: Mapping[str, Any]) -> str:
        return content(dict(sorted(inputs.items())), self._drawn_of(inputs))

    def _drawn_of(self, inputs: Mapping[str, Any]) -> dict[int, str]:
        """The drawn tensors among the inputs themselves: names by id."""
        tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value in self._drawn]
        return {id(tensor): self._drawn[tensor] for tensor in tensors}

    def _is_late(self, name: str) -> bool:
        """Whether every sample has been seen before."""
        return self._calls[name] > self.calls_of_an_epoch.get(name, self._calls[name])

    def _leave(self, name: str, reason: str, compute: Compute, inputs: Mapping[str, Any], device: torch.device) -> Any:
        self.left.setdefault(name, reason)
        return self.watched(name, lambda: compute(**inputs), device, inputs)

    def _read(self, name: str, key: str, inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any] | None:
        found = self._entries.load_described(key)
        if found is None:
            return None
        self._keys.add(key)
        self.counts["read"] += 1
        self._late[name] -= self._is_late(name)
        tensors, described = found
        return unpacked(described, tensors, inputs, device)

    def _compute(
        self,
        name: str,
        key: str,
        compute: Compute,
        inputs: Mapping[str, Any],
        described: str,
        device: torch.device,
        beside: Callable[[], AbstractContextManager[list[str]]],
    ) -> Any:
        """Compute, and keep the result if another call with these inputs, whose content is `described`, has the same
        one."""
        drawn = self._drawn_of(inputs)
        stand_ins = {n: Withheld.of(value) for n, value in inputs.items() if id(value) in drawn}
        given, before = {**inputs, **stand_ins}, draw_states(device)
        result = None
        with suppress(WithheldRead), beside() as done:
            result = compute(**given)
        read = next((n for n, stand_in in stand_ins.items() if stand_in.is_read), None)
        if read is not None:
            return self._leave(name, f"it reads {read}, which {drawn[id(inputs[read])]} draws", compute, inputs, device)
        try:
            if done:
                raise Fallback(done[0])
            if before != draw_states(device):
                raise Fallback("it draws at random")
            if self._content(inputs) != described:
                raise Fallback("it changes its inputs")
            outputs, tensors = packed(result, given)
        except Fallback as reason:
            self.left[name] = self.reasons[name] = str(reason)
            self._drawn.update(dict.fromkeys(tensors_in(result), name))
            return self._with_inputs(result, stand_ins, inputs)
        if not tensors:
            self._without_tensors.add(key)
        else:
            self.counts["computed"] += 1
            self._save(key, tensors, {"call": name, **outputs})
            self._late[name] += self._is_late(name)
            if self._late[name] >= MOST_LATE and not self.unkept:
                self.left[name] = self.reasons[name] = (
                    "its inputs differ from epoch to epoch: something draws them at random"
                )
        return self._with_inputs(result, stand_ins, inputs)

    @staticmethod
    def _with_inputs(result: Any, stand_ins: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        """The result with the tensors that were withheld."""
        withheld = {id(stand_in): inputs[name] for name, stand_in in stand_ins.items()}
        return tree_map(lambda leaf: withheld.get(id(leaf), leaf), result) if withheld else result

    def _save(self, key: str, tensors: Mapping[str, torch.Tensor], described: dict[str, Any]) -> None:
        try:
            self._entries.discard_parts(key)
            self._entries.save(key, tensors, described)
            self._keys.add(key)
        except CacheUnavailable as reason:
            self.counts["unkept"] += 1
            if not self.unkept:
                self.unkept = str(reason)
                _log.warning("wanshim: %s: this and what follows is computed in each epoch", reason)

    @contextmanager
    def _turn(self, key: str) -> Iterator[None]:
        """Let one process at a time compute an entry; without locks, or after a long wait, several."""
        name, end = f".{key}.turn", time.monotonic() + TURN_S
        lock: Lock | str | None = None
        while True:
            try:
                lock = self._directory.claim(name)
            except (OSError, NotOwn):  # a full disk, or what somebody else left there
                lock = None
            if not isinstance(lock, str):
                break
            if time.monotonic() > end:
                _log.warning("wanshim: %s has computed for %.0f s; this process computes the same", lock, TURN_S)
                break
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            if isinstance(lock, Lock):
                with suppress(OSError):
                    (self._directory.opened / name).unlink()
                lock.close()
