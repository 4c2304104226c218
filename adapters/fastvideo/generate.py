"""`fastvideo.generate`: nothing to add, FastVideo generates on several GPUs itself.

`VideoGenerator.from_pretrained(..., num_gpus=4, sp_size=4)` starts a process for each GPU, which have parts of each
forward's tokens. The feature is here so that WANSHIM_GENERATE and the table of releases say so.
"""

from __future__ import annotations

from wanshim.patching import Feature

FEATURE = Feature(
    name="fastvideo.generate",
    summary="generation on several GPUs, which FastVideo has itself (num_gpus, sp_size)",
    switched_on_by="generate",
    relies_on=("fastvideo.fastvideo_args:FastVideoArgs.num_gpus", "fastvideo.fastvideo_args:FastVideoArgs.sp_size"),
    seams=(),
)
