"""`fastvideo.negative_prompt`: training starts with `sp_size > 1` instead of hanging on the negative prompt.

Between commits bc27a032c (2026-03-09) and 9a8bbe18f (2026-04-27) rank 0 alone builds an inference pipeline to
encode the negative prompt, and the others wait for its broadcast. Building it warms up the sequence-parallel
group with an all-to-all, and offloading its text encoder builds a device mesh: collectives that the waiting
ranks never join. Those commits call themselves 0.1.7 like a release that has no such code, so the code
decides.
"""

from __future__ import annotations

import ast

from wanshim.patching import Feature, Finding, SourceTree
from wanshim.patching.verdict import Verdict

from . import conditioning


def _judge(source: SourceTree) -> Finding:
    """By structure: does one rank encode while the others go to a broadcast?"""
    method = source.node(conditioning.WAN)
    if method is None:
        return Finding(Verdict.ABSENT, "this FastVideo has no fastvideo.train, where the negative prompt is encoded")
    if not _broadcasts_from_one_rank(method):
        return Finding(
            Verdict.NATIVE,
            "every rank encodes for itself, so nothing hangs (pull request 1178); "
            "fastvideo.prompt_cache encodes once and keeps it",
        )
    if source.node(conditioning.TRAIN_START) is None:
        return Finding(Verdict.REFUSE, f"rank 0 alone encodes, but {conditioning.TRAIN_START} is not there")
    return Finding(Verdict.PATCH, "rank 0 alone encodes the negative prompt, and the others wait in a broadcast")


def _broadcasts_from_one_rank(method: ast.AST) -> bool:
    names = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    return "broadcast" in names and bool(names & {"rank_in_group", "rank", "is_first_rank"})


FEATURE = Feature(
    name="fastvideo.negative_prompt",
    summary="the negative prompt is encoded without a collective, so sp_size > 1 starts",
    auto=True,
    judge=_judge,
    relies_on=conditioning.RELIES_ON,
    seams=(
        conditioning.wan_seam(
            "rank 0 alone builds a pipeline whose start runs collectives: the job hangs", keeps=False
        ),
        conditioning.hunyuan_seam(keeps=False),
        conditioning.WEIGHTS_SEAM,
        conditioning.TRAIN_START_SEAM,
    ),
)
