"""Before a model is loaded: its weights counted from the file's header, and refused where no stage could hold them.

A lower bound, of weights alone: what a training step needs besides is predicted when training begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from wanshim.core.model_split.plan import plan_split
from wanshim.core.model_split.side_models import choose_devices, describe_move
from wanshim.core.shared.safetensors_header import Header
from wanshim.core.strategy.limits import comparison, within
from wanshim.errors import PlacementInvalid

LOW_PRECISION = 1  # byte an element, scales left out


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model's file, and how its weights are to be stored over the stages.

    Args:
        name: of the file.
        header: its tensors.
        itemsize: bytes an element.
        matrix_itemsize: likewise, of the blocks' matrices.
        split_at: the first block of each stage after the first; None: balanced by bytes.
        split_at_source: the setting that named them.
        words: how a user makes each change, by its name: `low_precision`, `stream`.
    """

    name: str
    header: Header
    itemsize: int
    matrix_itemsize: int
    devices: tuple[str, ...]
    split_at: tuple[int, ...] | None = None
    split_at_source: str = ""
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes_by_device(self) -> dict[str, int]:
        blocks = [block.bytes_at(self.itemsize, self.matrix_itemsize) for block in self.header.blocks]
        outside = self.header.outside.bytes_at(self.itemsize)
        return plan_split(blocks, outside, self.devices, split_at=self.split_at).bytes_by_device


def check_weights(model: StoredModel, available: Mapping[str, int]) -> None:
    """Whether the stages' weights fit their devices.

    Raises:
        PlacementInvalid: they do not; with bytes needed and available of each device, and what would fit.
    """
    needed = model.bytes_by_device
    if within(needed, available):
        return
    ways = [change for change, other in _changes(model) if within(other.bytes_by_device, available)]
    raise PlacementInvalid(
        "the weights do not fit, and were not loaded: " + comparison(needed, available),
        expected=f"each stage's weights within its device, by the header of {model.name}",
        hint=f"What would fit: {'; '.join(ways)}" if ways else f"Use more GPUs{model.words.get('stream', '')}",
    )


def _changes(model: StoredModel) -> Iterator[tuple[str, StoredModel]]:
    """Changes that the user could make, each with the model as it would then be stored."""
    balanced, low = replace(model, split_at=None), replace(model, matrix_itemsize=LOW_PRECISION)
    if model.split_at is not None:
        yield f"without {model.split_at_source}: balanced by bytes", balanced
    if model.matrix_itemsize > LOW_PRECISION:
        words = model.words.get("low_precision", "an fp8 base")
        yield words, low
        if model.split_at is not None:
            yield f"{words}, without {model.split_at_source}", replace(low, split_at=None)


def moves_for_weights(
    block_bytes: list[int], home_bytes: int, devices: tuple[str, ...], split_at: tuple[int, ...] | None,
    side_models: Mapping[str, int], available: Mapping[str, int],
) -> tuple[Mapping[str, str], tuple[str, ...]]:  # fmt: skip
    """The side models that leave the first device before the stages come, since the weights alone would not fit beside
    them: where each goes, and what is said of it."""
    if not available:
        return {}, ()
    plan = plan_split(block_bytes, home_bytes, devices, split_at=split_at)
    weights = plan.bytes_by_device
    moves = choose_devices(side_models, weights, available, plan.home, weights[plan.home])
    notes = tuple(describe_move(name, moves, side_models, weights, available, plan.home) for name in moves)
    return moves, notes
