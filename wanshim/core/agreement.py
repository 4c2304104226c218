"""All ranks of a job carry the same patch set, or all of them say so and stop.

A shim on one rank only is a hang: the patched rank skips a collective that the others wait in. So the first
core room that runs inside a process group exchanges what each rank carries, through the group's store (no
collective), and all ranks follow the one verdict that is written there.

Importing this module imports no torch, so that activation can set the provider before any framework is
loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from wanshim.core.shared.forks import refuse_inherited_group
from wanshim.errors import RankDisagreement

# What one rank carries, as plain JSON: "wanshim" (version), "features" (name -> hash of its seams),
# "packages" (name -> version), "host". Only "host" may differ between ranks.
Fingerprint = Mapping[str, Any]

TIMEOUT_S = 30.0
_POLL_S = 0.02
_MAY_DIFFER = {"host"}

_provider: Callable[[], Fingerprint] | None = None
_agreed: WeakSet[Any] = WeakSet()


def set_fingerprint_provider(provider: Callable[[], Fingerprint] | None) -> None:
    """Name the function that says what this rank carries; None takes it back."""
    global _provider
    _provider = provider
    _agreed.clear()


def ensure(group: Any = None, *, timeout_s: float = TIMEOUT_S) -> None:
    """Check once per process group that its ranks carry the same patch set.

    Does nothing outside a process group, in a group of one, or where no provider is set (core used without
    patches).

    Args:
        group: the process group; default the default one. Every rank of it must come here.
        timeout_s: seconds to wait for the slowest rank.

    Raises:
        DeadlineInvalid: `timeout_s` cannot be waited.
        RankDisagreement: the same table on every rank: what each carries, and who did not answer.
        UsedAfterFork: the default process group is that of the process that this one was forked from.
    """
    import torch.distributed as dist

    refuse_inherited_group()
    from wanshim.deadline import checked_seconds

    checked_seconds(timeout_s, "timeout_s")
    if _provider is None or not dist.is_available() or not dist.is_initialized():
        return
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < 2 or group in _agreed or dist.get_rank() not in ranks:
        return
    default: Any = dist.distributed_c10d
    name = f"wanshim/agreement/{group.group_name}"
    exchange(default._get_default_store(), name, dist.get_rank(), ranks, _provider(), timeout_s)
    _agreed.add(group)


def exchange(
    store: Any, name: str, rank: int, ranks: Sequence[int], fingerprint: Fingerprint, timeout_s: float
) -> None:
    """Publish this rank's fingerprint under `name` in `store` and compare those of all `ranks`.

    Raises:
        DeadlineInvalid: `timeout_s` cannot be waited.
        RankDisagreement: they differ, or a rank did not publish its own in `timeout_s`.
    """
    import json

    from wanshim.deadline import checked_seconds

    checked_seconds(timeout_s, "timeout_s")
    store.set(f"{name}/{rank}", json.dumps(dict(fingerprint), sort_keys=True))
    keys = {other: f"{name}/{other}" for other in ranks}
    present = _wait_for(store, keys, f"{name}/verdict", timeout_s)
    # The first to come to an end decides for all: a rank that appears in the last moment must not pass alone.
    if int(store.add(f"{name}/claim", 1)) == 1:
        store.set(f"{name}/verdict", json.dumps(present))
    heard = _verdict(store, f"{name}/verdict")
    found = {other: json.loads(store.get(keys[other])) for other in heard}
    missing = [other for other in ranks if other not in found]
    if missing or not _alike(list(found.values())):
        raise _disagreement(found, missing, timeout_s)


def _wait_for(store: Any, keys: Mapping[int, str], verdict: str, timeout_s: float) -> list[int]:
    """The ranks that have published: all of them, or those who had when the deadline passed or a verdict
    fell."""
    deadline = time.monotonic() + timeout_s
    present: set[int] = set()
    while len(present) < len(keys):
        present |= {rank for rank in keys.keys() - present if store.check([keys[rank]])}
        if time.monotonic() > deadline or store.check([verdict]):
            break
        time.sleep(_POLL_S)
    return sorted(present)


def _verdict(store: Any, key: str) -> list[int]:
    import json

    deadline = time.monotonic() + TIMEOUT_S
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RankDisagreement(
                "The rank that was to compare the patch sets stopped in the middle of it",
                hint="Look for the first error in the other ranks' logs",
            )
        time.sleep(_POLL_S)
    heard: list[int] = json.loads(store.get(key))
    return heard


def _alike(fingerprints: Sequence[Fingerprint]) -> bool:
    comparable = [{k: v for k, v in f.items() if k not in _MAY_DIFFER} for f in fingerprints]
    return all(fingerprint == comparable[0] for fingerprint in comparable)


def _disagreement(found: Mapping[int, Fingerprint], missing: Sequence[int], timeout_s: float) -> RankDisagreement:
    what = "The ranks of this job carry different patch sets"
    if missing:
        names = ", ".join(map(str, missing))
        what = f"No patch set was heard of from rank {names} in {timeout_s:.0f} s"
    return RankDisagreement(
        f"{what}:\n{_table(found, missing)}\n",
        expected="the same wanshim, features and package versions on every rank",
        hint="Start every rank with the same environment and the same WANSHIM_* variables; "
        "`wanshim doctor` shows what a machine has",
    )


def _table(found: Mapping[int, Fingerprint], missing: Sequence[int]) -> str:
    """One line a rank, with what is not the same everywhere."""
    flat = {rank: _flatten(fingerprint) for rank, fingerprint in found.items()}
    names = sorted({name for entries in flat.values() for name in entries})
    differing = [name for name in names if len({entries.get(name) for entries in flat.values()}) > 1]
    columns = ["rank", "host", *(name for name in differing if name != "host")]
    lines = [columns]
    for rank in sorted([*found, *missing]):
        entries = flat.get(rank)
        cells = [entries.get(name, "-") if entries else "no answer" for name in columns[1:]]
        lines.append([str(rank), *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _flatten(fingerprint: Fingerprint) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in fingerprint.items():
        if isinstance(value, Mapping):
            flat.update({str(inner): str(content) for inner, content in value.items()})
        else:
            flat[name] = str(value)
    return flat
