"""All ranks of a job carry the same patch set, or all of them say so and stop.

A shim on one rank only is a hang: the patched rank skips a collective that the others wait in. So the first
core room that runs inside a process group exchanges what each rank carries, through the group's store and
without a collective, and each rank compares the same fingerprints. A rank that does not come at all is
reported as absent: nothing is known of its patch set.

Importing this module imports no torch, so that activation can set the provider before any framework is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from wanshim.core.shared.forks import refuse_inherited_group
from wanshim.core.shared.text import table
from wanshim.errors import RankDisagreement

if TYPE_CHECKING:
    from wanshim.core.ranks.group import Group

# What one rank carries, as plain JSON: "wanshim" (version), "features" (name -> hash of its seams),
# "packages" (name -> version), "host". Only "host" may differ between ranks.
Fingerprint = Mapping[str, Any]

TIMEOUT_S = 30.0
_MAY_DIFFER = {"host"}

_provider: Callable[[], Fingerprint] | None = None
_agreed: WeakSet[Any] = WeakSet()


def set_fingerprint_provider(provider: Callable[[], Fingerprint] | None) -> None:
    """Name the function that says what this rank carries; None takes it back."""
    global _provider
    _provider = provider
    _agreed.clear()


def ensure(group: Any = None, *, call: str = "wanshim", timeout_s: float = TIMEOUT_S) -> None:
    """Check once per process group that its ranks carry the same patch set.

    Does nothing outside a process group, in a group of one, or where no provider is set (core used without
    patches). A check that failed is made again at the next call.

    Args:
        group: the process group; default the default one. Every rank of it must come here.
        call: the call in which every rank of `group` comes here, for messages.
        timeout_s: seconds to wait for the slowest rank.

    Raises:
        SettingInvalid: `timeout_s` cannot be waited.
        RankDisagreement: the same table on every rank: what each carries.
        RankAbsent: a rank did not come within `timeout_s`.
        WanshimError: the default process group is that of the process that this one was forked from.
    """
    import torch.distributed as dist

    from wanshim.core.ranks.group import Group
    from wanshim.values import checked_seconds

    refuse_inherited_group()
    checked_seconds(timeout_s, "timeout_s")
    if _provider is None or not dist.is_available() or not dist.is_initialized():
        return
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < 2 or group in _agreed or dist.get_rank() not in ranks:
        return
    compare(Group.of_job(group), f"wanshim/agreement/{group.group_name}", _provider(), timeout_s, call)
    _agreed.add(group)


def compare(group: Group, topic: str, fingerprint: Fingerprint, timeout_s: float, call: str) -> None:
    """Compare this rank's fingerprint with those of all ranks: see `ensure`."""
    carried = group.gather(topic, dict(fingerprint), timeout_s, call)
    comparable = [{k: v for k, v in each.items() if k not in _MAY_DIFFER} for each in carried]
    if any(each != comparable[0] for each in comparable):
        found = dict(zip(group.ranks, carried, strict=True))
        raise RankDisagreement(
            f"The ranks of this job carry different patch sets:\n{_table(found)}\n",
            expected="the same wanshim, features and package versions on every rank",
            topic="same_environment",
        )


def _table(found: Mapping[int, Fingerprint]) -> str:
    """One line a rank, with what is not the same everywhere."""
    flat = {rank: _flatten(fingerprint) for rank, fingerprint in found.items()}
    names = sorted({name for entries in flat.values() for name in entries})
    differing = [name for name in names if len({entries.get(name) for entries in flat.values()}) > 1]
    columns = ["rank", "host", *(name for name in differing if name != "host")]
    return table(
        [columns, *([str(rank), *(flat[rank].get(name, "-") for name in columns[1:])] for rank in sorted(flat))]
    )


def _flatten(fingerprint: Fingerprint) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in fingerprint.items():
        if isinstance(value, Mapping):
            flat.update({str(inner): str(content) for inner, content in value.items()})
        else:
            flat[name] = str(value)
    return flat
