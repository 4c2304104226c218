"""The placement of a family of models when it is split: the shape of the placement tables, and how they are read.

One table a family: `wan.py`, `flux2.py`, `minimax_h3.py`. Everything is with the first stage unless the table
names it. An exit takes the last block's output and lies with it. A companion is a module outside the blocks that
works with certain blocks and lies where they do. A satellite is another model of the pipeline that works with the
DiT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from wanshim.core.model_split import Companion, SplitHandle, split_model
from wanshim.core.sequence import BlockList
from wanshim.core.strategy import Video

BlockInputs = Callable[[Any, int], "tuple[tuple[Any, ...], Mapping[str, Any]]"]


def video_of_latents(pipe: Any, inputs: Mapping[str, Any]) -> Video | None:
    """The size of a sample from the inputs of a pipeline's units or forward, by its latents or by the frames and pixels
    that they are made of; None if neither is there."""
    stride, patch = pipe.time_division_factor, getattr(pipe.dit, "patch_size", None)
    latents = inputs.get("latents", inputs.get("input_latents"))  # a cached sample has the latter
    if getattr(latents, "ndim", 0) == 5 and patch is not None:
        frames, height, width = (count // each for count, each in zip(latents.shape[2:], patch, strict=True))
        return Video(frames=frames, tokens_per_frame=height * width, stride=stride)
    if "pixels" not in inputs:
        return None
    per_token = pipe.height_division_factor * pipe.width_division_factor
    frames = (inputs["num_frames"] - 1) // stride + 1
    return Video(frames=frames, tokens_per_frame=-(-inputs["pixels"] // per_token), stride=stride)


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


@dataclass(frozen=True)
class Hints:
    """A model of the pipeline that computes something for certain blocks before the first of them runs."""

    owner: str
    blocks: Callable[[Any], list[int]]


@dataclass(frozen=True)
class Denoising:
    """The loop of a pipeline of the family, whose forwards several GPUs can share.

    Args:
        pipeline: the class, by module and name.
        function: the function that its loop calls as `model_fn`, by module and name.
        same, empty, few, count, blocks: as in `wanshim.core.generation.Forward`; functions of a module file. Without
            `few` and `count` the argument `same` has latents of five dimensions.
        refusal: of a pipeline: what it computes that no worker would, or None.
    """

    pipeline: str
    function: str
    same: str
    empty: Callable[..., Any]
    blocks: Callable[..., list[BlockList]]
    few: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] | None = None
    count: Callable[[tuple[Any, ...], dict[str, Any]], int] | None = None
    refusal: Callable[[Any], str | None] = lambda pipe: None


@dataclass(frozen=True)
class Family:
    """The placement table of one family of DiTs.

    Args:
        name: as people call it.
        modules: the prefix of the modules that hold its DiTs.
        blocks: attribute paths of the DiT's lists of blocks, in the order they run.
        exits: attribute paths of modules that take the last block's output, one of which is called.
        split_classes: the DiTs that are split, by module and class.
        refused_classes: DiTs that are not split, by class, each with the reason.
        refused_parts: what of the pipeline, where it is there and true, keeps its DiT from being split, each with the
            reason.
        attention: the function by which the blocks attend, by module and name; its module has a flag for each kernel
            that is installed.
        known_classes: the DiTs whose blocks are known to be one graph, and to be called as `block_inputs` says.
        block_inputs: of a pipeline and a number of tokens: positional and named arguments of a block, tensors without
            elements.
        in_graphs: functions of DiffSynth, by module and name, each with what makes of it what compiled blocks call.
        by_value: arguments of a block whose numbers decide what it computes, and which compiled blocks get as numbers.
        chunked: paths in a block to the modules that compute token by token, and so in chunks too.
        video: the size of a sample, from the inputs of the pipeline's units or of its forward; frames and pixels of a
            video that is not encoded yet are in `num_frames` and `pixels`.
        satellites: models of the pipeline that stay with the DiT, by attribute.
        companions, hints: what works with certain blocks.
        second: the parts of a second expert of a pair, each with the part of the first that it stands for.
        text_encoders: by attribute of the pipeline, module and class.
        sharded_classes: the DiTs whose tokens can be sharded over processes, by module and class.
        block_lists: of a pipeline with such a DiT, and of whether its blocks are compiled: the lists of blocks through
            which sharded tokens go.
        exchanged: what these blocks exchange tokens around where they are compiled: the path in a block to a module, or
            a function by module and name.
        num_heads: the number of attention heads: path in a block.
        num_heads_argument: the same, as the DiT's class takes it.
        sees_all_tokens: what of the pipeline, where it is there, works on all tokens between the blocks.
        denoising: the loop of its pipeline; None: one GPU runs it.
        pipeline_refusal: why its micro-batches cannot overlap, or None.
        side_models: frozen models that share the first device with the first stage, by attribute of the pipeline, each
            with the methods that the pipeline calls.
    """

    name: str
    modules: str
    blocks: tuple[str, ...]
    exits: tuple[str, ...]
    split_classes: tuple[str, ...]
    refused_classes: Mapping[str, str] = field(default_factory=dict)
    refused_parts: Mapping[str, str] = field(default_factory=dict)
    attention: str = "diffsynth.core.attention.attention:attention_forward"
    known_classes: tuple[str, ...] = ()
    block_inputs: BlockInputs | None = None
    in_graphs: Mapping[str, Callable[[Any], Callable[..., Any]]] = field(default_factory=dict)
    by_value: tuple[str, ...] = ()
    chunked: tuple[str, ...] = ()
    video: Callable[[Any, Mapping[str, Any]], Video | None] = video_of_latents
    satellites: tuple[str, ...] = ()
    companions: tuple[Companions, ...] = ()
    hints: tuple[Hints, ...] = ()
    second: Mapping[str, str] = field(default_factory=dict)
    text_encoders: Mapping[str, str] = field(default_factory=dict)
    sharded_classes: tuple[str, ...] = ()
    block_lists: Callable[..., list[BlockList]] | None = None
    exchanged: str = ""
    num_heads: str = "num_heads"
    num_heads_argument: str = "num_heads"
    sees_all_tokens: tuple[str, ...] = ()
    denoising: Denoising | None = None
    pipeline_refusal: str | None = None
    side_models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def companions_of(self, pipe: Any) -> list[Companion]:
        """The companions that this pipeline has, in the core's terms."""
        num_blocks = sum(len(part_of(pipe.dit, path)) for path in self.blocks)
        found = []
        for entry in self.companions:
            owner = getattr(pipe, entry.owner, None)
            modules = part_of(owner, entry.path)
            if modules is not None:
                blocks = {block: i for block, i in entry.blocks(owner).items() if block < num_blocks}
                found += [Companion(modules[i], block, entry.after) for block, i in blocks.items()]
        return found

    def split(
        self,
        pipe: Any,
        devices: tuple[str, ...],
        split_at: tuple[int, ...] | None = None,
        reason: str | None = None,
        base: str | None = None,
    ) -> SplitHandle:
        """Split the pipeline's DiT as the table says."""
        handle = split_model(
            pipe.dit,
            devices,
            split_at,
            blocks=self.blocks,
            exits=self.exits,
            companions=self.companions_of(pipe),
            satellites=[model for name in self.satellites if (model := getattr(pipe, name, None)) is not None],
            reason=reason,
            base=base,
        )
        for entry in self.hints:
            owner = getattr(pipe, entry.owner, None)
            if owner is not None:
                handle.bring_outputs(owner, entry.blocks(owner))
        return handle

    def second_of(self, pipe: object) -> Any:
        """The second expert of a pair as a pipeline of its own, or None. What both share is with the first."""
        parts = {first: getattr(pipe, name, None) for name, first in self.second.items()}
        return None if parts.get("dit") is None else SimpleNamespace(**parts)

    def in_place_of_blocks(self, pipe: object) -> str | None:
        """The part of this pipeline that does a block's work itself, from the block's children, if there is one."""
        found = (entry for entry in self.companions if not entry.after)
        return next((entry.owner for entry in found if part_of(getattr(pipe, entry.owner, None), entry.path)), None)

    def outside_the_blocks(self, pipe: object) -> str | None:
        """The part of this pipeline that computes between the blocks, if there is one."""
        for entry in self.companions:
            if part_of(getattr(pipe, entry.owner, None), entry.path) is not None:
                return f"{entry.owner}.{entry.path}"
        return next((entry.owner for entry in self.hints if getattr(pipe, entry.owner, None) is not None), None)


def class_of(dit: object) -> str:
    return f"{type(dit).__module__}.{type(dit).__name__}"


def part_of(owner: object, path: str) -> Any:
    """The object at an attribute path, or None."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner
