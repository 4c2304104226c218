"""The training job and its machine, as data: all that `decide` knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from wanshim.core.strategy.predict import MicroBatch, Stored
from wanshim.values import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """The largest sample.

    Args:
        frames: latent frames, or groups of them where a VAE makes several at a time.
        tokens_per_frame: of one of them.
        stride: frames of video between two of them.
        first: frames of video in the first of them.
        beside: tokens of text and the like in the same sequence; less than 0 where the first of the frames has so many
            fewer than the others.
    """

    frames: int
    tokens_per_frame: int
    stride: int
    first: int = 1
    beside: int = 0

    @property
    def tokens(self) -> int:
        return self.frames * self.tokens_per_frame + self.beside

    @property
    def length(self) -> int:
        """Frames of video in its latent frames."""
        return (self.frames - 1) * self.stride + self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class SideModel:
    """A model beside the one that is trained, such as a text encoder or VAE, on the first device.

    Args:
        movable: it is frozen and can compute on another device, or wait in host memory between calls.
    """

    num_bytes: int
    movable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of the user.

    Args:
        strategy: None: the first that can run.
        streamed_blocks: how many wait in host memory; None: as few as fit.
        ranks: of a sequence group; None: all processes of a host.
        chunks: sizes in tokens to try, in order of preference; None: without chunks.
        offload: checkpoints wait in host memory; None: where the step does not fit otherwise, or attention can be kept
            that way.
        keep: self-attention's outputs are kept for recomputation, on the device or else in host memory; None: where
            the device has room, or in host memory where checkpoints wait there too.
        keep_blocks: as many of the last blocks as the device has room for are not computed again; None: likewise, on
            devices with a limit.
        block_changes: by name, a statement of each thing that the blocks compute otherwise.
        idle: side models that no step calls.
    """

    strategy: Strategy | None = None
    streamed_blocks: int | None = None
    ranks: int | None = None
    chunks: tuple[int | None, ...] = (None,)
    offload: bool | None = None
    keep: bool | None = None
    keep_blocks: bool | None = False
    block_changes: Mapping[str, str] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The job that is to be trained, read once from a framework's arguments and the settings.

    Args:
        devices: of this process; more than one where the model is split over them.
        split_points: the first block of each stage after the first; None: the model is whole.
        blocks: bytes of each block, in the order of execution.
        home: bytes of everything else on the first device, side models included.
        streamable: bytes of each block that can wait in host memory.
        model_bytes: of the trained model alone, blocks included.
        video: None where its size is not known.
        sizes: that its size is assumed, as a statement; empty: it was measured.
        micro_batch: bytes of one micro-batch of so many tokens, in chunks of so many or whole.
        unpredictable: why no peak can be predicted, or empty.
        chunkable: the blocks are known to compute the same in chunks of tokens.
        side_models: by name.
        moved: bytes of side models that were moved to other devices, by device.
        accumulation: micro-batches a step and process.
        processes: that average their gradients.
        local_processes: those of this host.
        checkpointing: activations are recomputed in backward.
        offloads_itself: the framework keeps checkpoints in host memory by an option of its own.
        request: what the user asked for.
        excluded: strategies that this job rules out, each with the reason.
        words: how a user makes each change, by its name in `fit.CHANGES`, with {value} for its value.
    """

    devices: tuple[str, ...]
    split_points: tuple[int, ...] | None
    blocks: tuple[Stored, ...]
    home: Stored
    streamable: tuple[int, ...] = ()
    model_bytes: int = 0
    video: Video | None
    sizes: str = ""
    micro_batch: Callable[[int, int | None], MicroBatch]
    unpredictable: str = ""
    chunkable: bool = True
    side_models: Mapping[str, SideModel] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    accumulation: int = 1
    processes: int = 1
    local_processes: int = 1
    checkpointing: bool = True
    offloads_itself: bool = False
    request: Request = field(default_factory=Request)
    excluded: Mapping[Strategy, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_gpus(self) -> int:
        """GPUs of this host, as launched."""
        return self.local_processes if self.split_points is None else len(self.devices)

    @property
    def ranks(self) -> int:
        """Ranks of a sequence group: the GPUs that one sample is sharded over."""
        return self.request.ranks or self.num_gpus

    def advice(self, change: str, value: object = "") -> str:
        """The user's way to make this change, or nothing where the framework has no words for it."""
        return self.words.get(change, "").format(value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the machine.

    Args:
        available: bytes by device; a device that is not named has no limit.
        host: bytes of host memory for each process of the host; 0 where that is not known.
        expandable_segments: the allocator leaves few gaps between tensors, or `available` is counted without them.
    """

    available: Mapping[str, int] = field(default_factory=dict)
    host: int = 0
    expandable_segments: bool = False
