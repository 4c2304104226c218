"""The same weights on every rank: what is trained comes from the first rank, what is frozen is compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wanshim.core.shared.digest import digest_weights
from wanshim.core.shared.weight_bytes import stored
from wanshim.errors import RankDisagreement

from .group import SequenceGroup

_SHOWN = 5
_Entry = tuple[str, bool, int]  # what a tensor is, whether it is trained, and its digest


def match_weights(group: SequenceGroup, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give trained tensors that differ the first rank's values, and refuse frozen ones that differ.

    Every rank calls it. Where nothing differs, one line of text crosses.

    Args:
        tensors: by name; quantised ones are compared as they are stored.

    Raises:
        RankDisagreement: the ranks hold tensors of other names, shapes, dtypes or frozen values: one table on all.
    """
    parts = {
        f"{name} part {i}" if i else name: (part, tensor.requires_grad)
        for name, tensor in tensors.items()
        for i, part in enumerate(stored(tensor))
        if part.numel() and not part.is_meta
    }
    digests = digest_weights(part for part, _ in parts.values())
    mine = {
        name: (f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}", trained, digest)
        for (name, (part, trained)), digest in zip(parts.items(), digests, strict=True)
    }
    text = json.dumps(mine)
    if len(set(group.gather_text("digest of the weights", hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    ranks: list[dict[str, _Entry]] = [
        {name: (what, trained, digest) for name, (what, trained, digest) in json.loads(each).items()}
        for each in group.gather_text("digests of the weights", text)
    ]
    names = dict.fromkeys(name for entries in ranks for name in entries)
    different = [name for name in names if len({entries.get(name) for entries in ranks}) > 1]
    refused = [name for name in different if not _can_be_sent([entries.get(name) for entries in ranks])]
    if refused:
        group.gather_text("weights", "")  # the process that hosts the store stays until all have read
        raise RankDisagreement(
            f"The ranks hold different weights, {len(refused)} of {len(names)} tensors:\n"
            + _table(group.ranks, ranks, refused),
            expected="the same frozen weights, and trained ones of the same names and shapes, on every rank",
            hint="Load the same checkpoint and inject the same adapters on every rank",
        )
    with torch.no_grad():
        for device in dict.fromkeys(parts[name][0].device for name in different):
            for part in (parts[name][0] for name in different if parts[name][0].device == device):
                received = group.from_first(part.contiguous())
                if group.rank:
                    part.copy_(received)
            group.disconnect()  # the model may move before it is called


def _can_be_sent(entries: Sequence[_Entry | None]) -> bool:
    """The tensor is trained on every rank and the same but for its values."""
    return len({entry and entry[:2] for entry in entries}) == 1 and all(entry and entry[1] for entry in entries)


def _table(ranks: Sequence[int], entries: Sequence[Mapping[str, _Entry]], names: Sequence[str]) -> str:
    lines = []
    for name in names[:_SHOWN]:
        lines.append(f"  {name}")
        lines += [f"    rank {rank}: {_shown(held.get(name))}" for rank, held in zip(ranks, entries, strict=True)]
    return "\n".join([*lines, *(["  ..."] if len(names) > _SHOWN else [])])


def _shown(entry: Any) -> str:
    if entry is None:
        return "none"
    what, trained, digest = entry
    return f"{what}, {'trained' if trained else 'frozen'}, digest {digest % 2**64:016x}"
