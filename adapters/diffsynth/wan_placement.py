"""What of a Wan pipeline lies where when its DiT is split: the table, as data.

Everything is with the first stage unless it is named here. An exit takes the last block's output and lies
with it. A companion is a module outside the blocks that works with certain blocks and lies where they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wanshim.core.placement import Companion, SplitHandle

BLOCKS = "blocks"
EXITS = ("head", "head_global")  # head_global: WanToDance at another frame rate

# The DiTs that are split, and those that are not, with the reason.
SPLIT_CLASSES = (
    "diffsynth.models.wan_video_dit.WanModel",
    "diffsynth.models.wan_video_dit_s2v.WanS2VModel",
)
REFUSED_CLASSES = {
    "LongCatVideoTransformer3DModel": "LongCat-Video keeps caches of its own on one device, outside Wan's blocks",
    "WanAnimate2Transformer": "WanAnimate2 writes key and value caches inside its blocks, all on one device",
}

# Models of the pipeline that work with the DiT and stay with it.
SATELLITES = ("vace", "animate_adapter", "vap", "motion_controller")


@dataclass(frozen=True)
class Companions:
    """A list of modules, at `path` in the pipeline's `owner`, each of which works with one block.

    Args:
        blocks: from the owner, block number -> index in the list.
        after: they work on the block's output; else in its stead.
    """

    owner: str
    path: str
    blocks: Callable[[Any], Mapping[int, int]]
    after: bool


COMPANIONS = (
    # WanToDance and S2V inject music or speech behind certain blocks
    Companions("dit", "music_injector.injector", lambda dit: dit.music_injector.injected_block_id, after=True),
    Companions("dit", "audio_injector.injector", lambda dit: dit.audio_injector.injected_block_id, after=True),
    Companions(
        "dit", "audio_injector.injector_adain_layers", lambda dit: dit.audio_injector.injected_block_id, after=True
    ),
    # Animate fuses the face's motion behind every fifth block
    Companions(
        "animate_adapter",
        "face_adapter.fuser_blocks",
        lambda adapter: {5 * i: i for i in range(len(adapter.face_adapter.fuser_blocks))},
        after=True,
    ),
    # VAP's mixture of transformers computes a block's work from its children
    Companions("vap", "blocks", lambda vap: vap.mot_layers_mapping, after=False),
)


def companions_of(pipe: Any) -> list[Companion]:
    """The companions that this pipeline has, in the core's terms."""
    from wanshim.core.placement import Companion

    found = []
    for entry in COMPANIONS:
        owner = getattr(pipe, entry.owner, None)
        modules = _at(owner, entry.path)
        if modules is not None:
            blocks = {block: i for block, i in entry.blocks(owner).items() if block < len(pipe.dit.blocks)}
            found += [Companion(modules[i], block, entry.after) for block, i in blocks.items()]
    return found


def satellites_of(pipe: Any) -> list[Any]:
    return [model for name in SATELLITES if (model := getattr(pipe, name, None)) is not None]


def bridge_hints(pipe: Any, handle: SplitHandle) -> None:
    """VACE computes all its hints before the blocks; each is added behind the block it is for."""
    vace = getattr(pipe, "vace", None)
    if vace is not None:
        handle.bring_outputs(vace, list(vace.vace_layers))


def outside_the_blocks(pipe: Any) -> str | None:
    """What of this pipeline computes between the blocks, if anything does."""
    for entry in COMPANIONS:
        if _at(getattr(pipe, entry.owner, None), entry.path) is not None:
            return f"{entry.owner}.{entry.path}"
    return "vace" if getattr(pipe, "vace", None) is not None else None


def _at(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner
