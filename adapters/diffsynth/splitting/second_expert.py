"""The expert of a Wan2.2 pair that is not trained: out of the way while the other is."""

from __future__ import annotations

from functools import partial
from typing import Any

from wanshim.adapters.diffsynth.splitting.refusals import family_of, tell

from wanshim.patching import SeamState
from wanshim.patching.joints import Joints


def set_second_aside(pipe: Any, joints: Joints, seam: SeamState) -> None:
    """The expert of a pair that is not trained waits on the host, where nothing of the training job finds it.

    DiffSynth's losses run `dit` alone, whichever of the two it is.
    """
    from wanshim.core.model_split import split_of

    family = family_of(pipe.dit)
    for name in family.second if family is not None else ():
        part = getattr(pipe, name, None)
        if part is None:
            continue
        if (handle := split_of(part)) is not None:
            handle.remove()
        part.to("cpu")
        setattr(pipe, name, None)
        joints.at_end(partial(setattr, pipe, name, part))
        tell(f"{name} is not trained and waits on the CPU", seam)
