"""Encode a prompt once and hand every rank the same embeddings, without a collective.

Upstream's two ways are the ends between which this stands: rank 0 encodes and broadcasts, which hangs as soon
as loading the encoder runs a collective (FastVideo before PR #1178), or every rank loads the whole encoder
(after it).
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from wanshim.core.encoding.cache import EmbeddingCache
from wanshim.core.encoding.collectives import no_collectives
from wanshim.core.encoding.directory import CacheDirectory, CacheUnavailable
from wanshim.core.encoding.leader_lock import (
    FileLock,
    LeaderLock,
    LocksUnavailable,
    Note,
    State,
    StoreLock,
    job_name,
    sign,
)
from wanshim.core.encoding.request import EncodingRequest, KeyMaker, numerics
from wanshim.core.ranks import agreement
from wanshim.core.ranks.store import default_store
from wanshim.core.shared.files import prompt_cache
from wanshim.core.shared.gpu_memory import give_back
from wanshim.core.shared.processes import machine
from wanshim.errors import RankAbsent, RanksFailed, WanshimWarning
from wanshim.values import checked_seconds

_log = logging.getLogger(__name__)

Mode = Literal["cached", "per_rank"]
Origin = Literal["cache", "encoded", "waited", "per_rank"]
Encode = Callable[[], Mapping[str, torch.Tensor]]

TIMEOUT_S = 1800.0
_POLL_S = 0.05
_PER_RANK: Origin = "per_rank"
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The embeddings of one prompt.

    Args:
        tensors: what `encode` returned, by name, on the asked device.
        origin: "cache" (found on disk), "encoded" (by this rank), "waited" (by another rank meanwhile) or
            "per_rank" (by every rank for itself).
        seconds: time this rank spent, waiting included.
        unkept: why every rank encodes for itself and nothing is kept; "": it is.
    """

    tensors: dict[str, torch.Tensor]
    origin: Origin
    seconds: float
    unkept: str = ""

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"{shapes}: {self.origin}, {self.seconds:.2f} s"


def encode_once(
    encode: Encode,
    request: EncodingRequest,
    *,
    device: torch.device | str,
    encoder_device: torch.device | str | None = None,
    mode: Mode = "cached",
    cache_dir: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    store: Any = None,
) -> Encoded:
    """Return the same embeddings on every rank; at most one rank of a machine loads the encoder.

    No rank meets another in a collective, and a rank that finds the embeddings on disk waits for nobody.

    Args:
        encode: loads the encoder, runs it, drops it, and returns its output by name. It runs under `no_grad`,
            leaves torch's random state as it was, and, in mode "cached", may call no collective.
        request: everything the embeddings depend on.
        device: where the returned tensors are.
        encoder_device: where `encode` computes (part of the key, since devices round differently); default
            `device`.
        mode: "cached", or "per_rank": every rank encodes for itself, with no cache.
        cache_dir: directory of the cache; default `~/.cache/wanshim/encoding`.
        timeout_s: seconds to wait for another rank.
        store: `torch.distributed` store of this job's ranks: to know them from those of other jobs, and to take turns
            in where the cache's file system has no locks; default the one of the default process group.

    Raises:
        SettingInvalid: `timeout_s` cannot be waited.
        RanksFailed: the rank of this job and machine that this one waited for raised; its error is in the message.
        RankAbsent: no rank finished in `timeout_s`, or a rank did not make its first call in that time.
        WanshimError: `encode` called a collective.
        WanshimError: somebody else could write the cache directory.
        RankDisagreement: the ranks carry different patch sets.
    """
    started = time.monotonic()
    checked_seconds(timeout_s, "timeout_s")
    agreement.ensure(call="encode_once", timeout_s=timeout_s)
    computes_on = torch.device(encoder_device if encoder_device is not None else device)
    if mode == "per_rank":
        tensors, origin, unkept = _encode(encode, computes_on), _PER_RANK, ""
    else:
        job = _Job(encode, request, computes_on, started, started + timeout_s, store)
        (tensors, origin), unkept = job.run(cache_dir or prompt_cache()), job.unkept
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    return Encoded(tensors=placed, origin=origin, seconds=time.monotonic() - started, unkept=unkept)


class _Job:
    """One call of `encode_once` in mode "cached"."""

    def __init__(
        self,
        encode: Encode,
        request: EncodingRequest,
        device: torch.device,
        arrived: float,
        deadline: float,
        store: Any,
    ) -> None:
        self._encode, self._device = encode, device
        self._store = store or default_store()
        self._arrived, self._deadline = arrived, deadline
        self._keys = KeyMaker(request, numerics(device), request.folders())
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._job = self.unkept = ""
        self._found: Note | None = None  # what the last holder left before this rank came
        self._seen: Note | None = None  # the latest note
        self._seen_at = arrived  # when this rank first saw it

    def run(self, cache_dir: Path) -> tuple[dict[str, torch.Tensor], Origin]:
        try:
            with CacheDirectory(cache_dir) as directory:
                cache = EmbeddingCache(directory)
                found = self._look_up(directory, cache)
                return (found, "cache") if found else self._take_turns(directory, cache)
        except CacheUnavailable as reason:
            self.unkept = _warn_unkept(reason, callers=3)
            return _encode(self._encode, self._device), _PER_RANK

    def _take_turns(self, directory: CacheDirectory, cache: EmbeddingCache) -> tuple[dict[str, torch.Tensor], Origin]:
        with ExitStack() as stack:
            turns = self._open_turns(directory, stack)
            stack.callback(turns.release)
            self._job = job_name(self._store)
            self._found = turns.last()
            while not turns.claim():
                found = self._look_up(directory, cache)
                if found:
                    return found, "waited"
                self._heed(turns)
                self._check_deadline(turns)
                time.sleep(_POLL_S)
            found = self._look_up(directory, cache)
            if found:
                return found, "waited"
            self._heed(turns)
            return self._lead(turns, directory, cache)

    def _open_turns(self, directory: CacheDirectory, stack: ExitStack) -> LeaderLock:
        try:
            return stack.enter_context(closing(FileLock(directory, self._keys.turn)))
        except LocksUnavailable:
            if self._store is None:
                raise
            return stack.enter_context(closing(StoreLock(self._store, self._keys.turn)))

    def _look_up(self, directory: CacheDirectory, cache: EmbeddingCache) -> dict[str, torch.Tensor] | None:
        key = self._keys.known_key(directory)
        return None if key is None else cache.load(key)

    def _heed(self, turns: LeaderLock) -> None:
        """Act on what a rank of this job and machine left since this one came: its error, or that nothing can be
        kept. What others left counts for nobody here: they may have had less memory, or been interrupted."""
        note = turns.last()
        if note is None or note == self._found or (note.machine, note.job) != (machine(), self._job):
            return
        if note.state == "failed":
            raise RanksFailed(
                f"{note.who} could not encode the prompt: {note.reason}",
                hint="The first rank's log has the traceback; nothing was kept, so the next run tries again",
            )
        if note.state == "uncached":
            raise CacheUnavailable(note.reason)

    def _check_deadline(self, turns: LeaderLock) -> None:
        now, note = time.monotonic(), turns.last()
        if note != self._seen:
            self._seen, self._seen_at = note, now
        if now < self._deadline:
            return
        holder = "a process that left no word has held the turn"
        if note is not None and note.state == "encoding":
            holder = f"{note.who} has held the turn for at least {now - self._seen_at:.0f} s"
        raise RankAbsent(
            f"Rank {self._rank} waited {now - self._arrived:.0f} s for the prompt's embeddings: {holder}",
            expected="the encoder to finish before the deadline",
            topic="encode_timeout",
        )

    def _lead(
        self, turns: LeaderLock, directory: CacheDirectory, cache: EmbeddingCache
    ) -> tuple[dict[str, torch.Tensor], Origin]:
        left = turns.last()
        if left is not None and left.state == "encoding":
            _log.warning("%s stopped while it encoded the prompt; rank %d takes over", left.who, self._rank)
        turns.write(self._sign("encoding"))
        try:
            key = self._keys.key(directory)
            found = cache.load(key)  # the files are known by their content: they were only moved or touched
            if found is None:
                cache.discard_parts(key)
                with no_collectives("Encoding the prompt"):
                    tensors = _encode(self._encode, self._device)
        except BaseException as error:
            turns.write(self._sign("failed", f"{type(error).__name__}: {error}"))
            raise
        if found is not None:
            turns.write(self._sign("done"))
            return found, "cache"
        self._keep(turns, cache, key, tensors)
        return tensors, "encoded"

    def _sign(self, state: State, reason: str = "") -> Note:
        return sign(state, self._rank, reason, job=self._job)

    def _keep(self, turns: LeaderLock, cache: EmbeddingCache, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            cache.save(key, tensors, self._keys.description())
        except CacheUnavailable as reason:
            turns.write(self._sign("uncached", str(reason)))
            self.unkept = _warn_unkept(reason, callers=6)
        else:
            turns.write(self._sign("done"))


def _encode(encode: Encode, device: torch.device) -> dict[str, torch.Tensor]:
    """Run `encode` so that it leaves nothing behind: no gradient, no random state, no memory."""
    on_gpu = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=on_gpu), torch.no_grad():
            return {name: tensor.detach() for name, tensor in encode().items()}
    finally:
        give_back(device)


def _warn_unkept(reason: CacheUnavailable, *, callers: int) -> str:
    """Warn once of each reason, at the line that called `encode_once`: `callers` calls above this one. The warning."""
    message = f"{reason}; every rank encodes the prompt for itself, and nothing is kept"
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, WanshimWarning, stacklevel=callers + 1)
    return message
