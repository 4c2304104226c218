"""The peak of a training step on each device of a split, added up from bytes.

| part | bytes on a device |
|---|---|
| frozen weights | of its blocks; on the first device also of everything outside them |
| trained parameters, gradients | twice the trained parameters' bytes |
| DDP | the trained parameters' bytes once more, in its buckets |
| optimizer | AdamW's two moments in the parameters' dtype (Loshchilov and Hutter 2019, arXiv:1711.05101) |
| checkpoint inputs | one activation a block and micro-batch in flight |
| kept blocks | what a block keeps that is not computed again; without checkpointing, of every block |
| attention | where it is kept: one output and log-sum-exp a recomputed block and micro-batch in flight |
| shared inputs | context, modulation and frequencies, once a micro-batch in flight |
| one block at work | `trace_block`: recomputed, then differentiated |
| pipeline | two activations a micro-batch in flight, on their way between stages |

Stage s of S holds S - s micro-batches in flight (1F1B). Bytes are those of tensors, as
`torch.cuda.max_memory_allocated` counts them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from torch import nn

from wanshim.core.model_split.plan import format_bytes
from wanshim.core.shared.weight_bytes import stored_bytes

MOMENTS = 2
# Activations on their way between stages, for each micro-batch in flight. Measured on 2 x H200
# (benchmarks/results/model_split_lanes_2xH200.json): 4.5 for two in flight, 1.1 for one.
TRAVELLING = 2
# Checkpoint inputs on the device at a time when they are offloaded: the one in use, one ahead, two on their way out.
# Measured on one H200 (benchmarks/results/checkpoint_offload_1xH200.json): 4.4, with what blocks share.
OFFLOADED_WINDOW = 4
# Attention outputs on the device beside that of the block at work, when they wait in host memory and one micro-batch is
# in flight: one ahead, and one that has not left. Measured on one H200: 1.0, the difference of "keep on host" and
# "eager" in benchmarks/results/training_step_1xH200.json.
OFFLOADED_ATTENTION = 2


@dataclass(frozen=True)
class Stored:
    """Bytes of a module's tensors: those that are trained, and the rest."""

    frozen: int
    trained: int = 0

    def __add__(self, other: Stored) -> Stored:
        return Stored(self.frozen + other.frozen, self.trained + other.trained)


def store_of(*modules: nn.Module) -> Stored:
    """The bytes of modules as they are stored, whatever their dtype; a tensor that they share counts once."""
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}.values()
    trained = sum(stored_bytes(t) for t in tensors if t.requires_grad)
    return Stored(sum(map(stored_bytes, tensors)) - trained, trained)


class KeptOn(Enum):
    """The place where self-attention's outputs wait for the recomputation that uses them."""

    DEVICE = "on the device"
    HOST = "in host memory"


@dataclass(frozen=True)
class MicroBatch:
    """Bytes of one micro-batch.

    Args:
        activation: what goes from block to block.
        shared: what every block is called with besides, kept once a device.
        kept: what one block keeps for backward without checkpointing.
        working: the peak of one block at work, on top of its inputs.
        attention: the output of one block's self-attention.
        attention_sums: its log-sum-exp.
    """

    activation: int
    shared: int
    kept: int
    working: int
    attention: int = 0
    attention_sums: int = 0


@dataclass(frozen=True)
class Step:
    """A training step as it would run.

    Args:
        blocks: bytes of each block, in order.
        home: everything outside the blocks, with the text encoder and VAE that lie there during a step.
        devices: one a stage.
        points: the first block of each stage after the first.
        in_flight: micro-batches that overlap; 1 is the plain split.
        keep: where self-attention's outputs are kept; None: they are computed again.
        num_kept_blocks: of each stage, how many of its last blocks are not computed again; empty: all are.
        processes: that average their gradients.
    """

    blocks: tuple[Stored, ...]
    home: Stored
    devices: tuple[str, ...]
    points: tuple[int, ...]
    micro_batch: MicroBatch
    in_flight: int = 1
    checkpointing: bool = True
    offloading: bool = False
    processes: int = 1
    keep: KeptOn | None = None
    num_kept_blocks: tuple[int, ...] = ()

    def with_frozen_halved(self) -> Step:
        """The same with the frozen weights of the blocks at half their bytes: bf16 stored as fp8."""
        return replace(self, blocks=tuple(Stored(block.frozen // 2, block.trained) for block in self.blocks))


@dataclass(frozen=True)
class DevicePeak:
    """The predicted peak of one device, part by part, in bytes."""

    device: str
    weights: int
    gradients_and_optimizer: int
    checkpoints: int
    working: int
    attention: int
    kept_blocks_bytes: int

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("weights", self.weights),
            ("gradients and optimizer", self.gradients_and_optimizer),
            ("checkpoint inputs", self.checkpoints),
            ("kept attention", self.attention),
            ("kept blocks", self.kept_blocks_bytes),
            ("one block at work", self.working),
        )

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)

    def __str__(self) -> str:
        shown = ((name, size) for name, size in self.parts if size or not name.startswith("kept"))
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in shown)
        return f"{self.device}: {format_bytes(self.total)} ({listed})"


def predict(step: Step) -> tuple[DevicePeak, ...]:
    """The peak of each device, in the order in which the stages name them first."""
    stages = len(step.devices)
    weights: dict[str, int] = defaultdict(int)
    training: dict[str, int] = defaultdict(int)
    checkpoints: dict[str, int] = defaultdict(int)
    recomputed: dict[str, int] = defaultdict(int)  # calls of blocks whose backward is still to come
    kept: dict[str, int] = defaultdict(int)
    working: dict[str, int] = defaultdict(int)
    bounds = (0, *step.points, len(step.blocks))
    for stage, (device, (first, last)) in enumerate(zip(step.devices, pairwise(bounds), strict=True)):
        stored = sum(step.blocks[first:last], step.home if stage == 0 else Stored(0))
        in_flight = min(step.in_flight, stages - stage)
        weights[device] += stored.frozen + stored.trained
        training[device] += (1 + MOMENTS + (step.processes > 1)) * stored.trained
        as_they_are = _kept_blocks(step, stage, last - first)
        inputs = _inputs(step, last - first - as_they_are) + as_they_are
        checkpoints[device] += in_flight * (inputs * step.micro_batch.activation + step.micro_batch.shared)
        if step.in_flight > 1:
            checkpoints[device] += in_flight * TRAVELLING * step.micro_batch.activation
        kept[device] += in_flight * as_they_are
        recomputed[device] += in_flight * (last - first - as_they_are)
        working[device] = step.micro_batch.working
    return tuple(
        DevicePeak(
            device=d,
            weights=weights[d],
            gradients_and_optimizer=training[d],
            checkpoints=checkpoints[d],
            working=working[d],  # with what the first block keeps that backward comes to
            attention=_kept_attention(step, recomputed[d] - (not kept[d])),
            kept_blocks_bytes=max(0, kept[d] - 1) * step.micro_batch.kept,
        )
        for d in dict.fromkeys(step.devices)
    )


def _kept_blocks(step: Step, stage: int, blocks: int) -> int:
    if not step.checkpointing:
        return blocks
    return step.num_kept_blocks[stage] if step.num_kept_blocks else 0


def _inputs(step: Step, recomputed: int) -> int:
    """The number of inputs on the device, of so many blocks that are computed again."""
    return min(recomputed, OFFLOADED_WINDOW) if step.offloading else recomputed


def _kept_attention(step: Step, calls: int) -> int:
    """Bytes of kept attention of so many calls of blocks, the one at work left out."""
    if step.keep is None:
        return 0
    outputs = calls
    if step.keep is KeptOn.HOST:
        outputs = min(outputs, OFFLOADED_ATTENTION if step.in_flight == 1 else OFFLOADED_WINDOW)
    return outputs * step.micro_batch.attention + calls * step.micro_batch.attention_sums
