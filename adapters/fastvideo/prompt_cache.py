"""`fastvideo.prompt_cache`: one rank a machine loads the text encoder, and only in the first run.

FastVideo 0.2.0 and 0.2.1 fixed the hang of `fastvideo.negative_prompt` by loading the text encoder on every
rank at once: fp32 UMT5-XXL is 22.7 GB a GPU beside the model, read N times from disk, at every start.
"""

from __future__ import annotations

from wanshim.patching import Feature, Finding, SourceTree
from wanshim.patching.verdict import Verdict

from . import conditioning

PER_RANK = "fastvideo.train.utils.negative_prompt:encode_negative_prompt"


def _judge(source: SourceTree) -> Finding | None:
    if source.node(conditioning.WAN) is None:
        return Finding(Verdict.ABSENT, "this FastVideo has no fastvideo.train, where the negative prompt is encoded")
    if source.node(PER_RANK) is None:
        return Finding(Verdict.ABSENT, "fastvideo.negative_prompt encodes once and keeps it here already")
    return None


FEATURE = Feature(
    name="fastvideo.prompt_cache",
    summary="the negative prompt is encoded by one rank a machine and kept between runs",
    switched_on_by="cache_dir",
    judge=_judge,
    relies_on=(*conditioning.RELIES_ON, PER_RANK),
    seams=(
        conditioning.wan_seam("every rank loads 22.7 GB of UMT5-XXL to encode the same prompt", keeps=True),
        conditioning.hunyuan_seam(keeps=True),
        conditioning.KANDINSKY5_SEAM,
        conditioning.WEIGHTS_SEAM,
        conditioning.TRAIN_START_SEAM,
    ),
)
