"""The same weights on every rank: at the start what is trained comes from the first rank, and what is frozen is
compared; later what is trained is compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch

from wanshim.core.ranks.watch import disagreement
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
            + _table(group.ranks, [{n: _shown(entries.get(n)) for n in refused} for entries in ranks], refused),
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


def compare_trained(group: SequenceGroup, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, str]) -> None:
    """Refuse what is trained, or numbers of its optimizer, that have drifted apart. Every rank calls it.

    Raises:
        RankDisagreement: one table on all ranks.
    """
    digests = (f"digest {number % 2**64:016x}" for number in digest_weights(tensors.values()))
    text = json.dumps({**numbers, **dict(zip(tensors, digests, strict=True))})
    if len(set(group.gather_text("digest of what is trained", hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    ranks: list[dict[str, str]] = [json.loads(each) for each in group.gather_text("digests of what is trained", text)]
    names = dict.fromkeys(name for entries in ranks for name in entries)
    different = [name for name in names if len({entries.get(name) for entries in ranks}) > 1]
    found = f"The ranks have drifted apart, in {len(different)} of {len(names)} trained tensors and numbers:\n"
    found += _table(group.ranks, [{n: entries.get(n, "none") for n in different} for entries in ranks], different)
    group.watch.fail("trained", found)
    raise disagreement("trained", found)


def _can_be_sent(entries: Sequence[_Entry | None]) -> bool:
    """The tensor is trained on every rank and the same but for its values."""
    return len({entry and entry[:2] for entry in entries}) == 1 and all(entry and entry[1] for entry in entries)


def _table(ranks: Sequence[int], entries: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    lines = []
    for name in names[:_SHOWN]:
        lines.append(f"  {name}")
        lines += [f"    rank {rank}: {held[name]}" for rank, held in zip(ranks, entries, strict=True)]
    return "\n".join([*lines, *(["  ..."] if len(names) > _SHOWN else [])])


def _shown(entry: _Entry | None) -> str:
    if entry is None:
        return "none"
    what, trained, digest = entry
    return f"{what}, {'trained' if trained else 'frozen'}, digest {digest % 2**64:016x}"
