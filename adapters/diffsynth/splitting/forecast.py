"""Before a DiT is loaded: its weights counted from the file's header, and refused where no stage could hold them.

A lower bound, of weights alone: what a training step needs besides is predicted when training begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.splitting.family import Family

from wanshim import settings
from wanshim.errors import PlacementInvalid

if TYPE_CHECKING:
    from wanshim.core.shared.safetensors_header import Header

LOW_PRECISION = 1  # byte an element, scales left out


def check_weights(
    family: Family, path: Any, vram_config: Mapping[str, Any], quantize: Any, devices: tuple[str, ...],
    read: settings.Settings, tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Raise if the stages' weights cannot fit their devices; nothing has been loaded then.

    Raises:
        PlacementInvalid: with bytes needed and available of each device, and what would fit.
    """
    from wanshim.core.model_split.split import check_devices
    from wanshim.core.shared.safetensors_header import read_header
    from wanshim.core.strategy import available_on
    from wanshim.core.strategy.limits import comparison, within

    check_devices(devices)
    available = available_on(devices)
    if not available:
        return
    paths = [Path(part) for part in (path if isinstance(path, list | tuple) else [path])]
    header = read_header(paths, family.blocks)
    if header is None:
        tell(f"weights not counted before loading: {paths[0].name} has no safetensors header that names blocks")
        return
    itemsize, matrices = _stored(vram_config, quantize, read)
    needed = _needed(header, itemsize, matrices, devices, read.split_at)
    if within(needed, available):
        return
    ways = [way for way, other in _others(header, itemsize, matrices, devices, read) if within(other, available)]
    raise PlacementInvalid(
        "the weights do not fit, and were not loaded: " + comparison(needed, available),
        expected="each stage's weights within its device, by the header of " + paths[0].name,
        hint=f"What would fit: {'; '.join(ways)}" if ways else "Use more GPUs, or WANSHIM_PLAN=stream",
    )


def _stored(vram_config: Mapping[str, Any], quantize: Any, read: settings.Settings) -> tuple[int, int]:
    """Bytes an element as the model will lie: of all, and of the blocks' matrices."""
    dtype = vram_config.get("offload_dtype") or vram_config["computation_dtype"]
    itemsize = getattr(dtype, "itemsize", 2)  # "disk" is no dtype
    return itemsize, LOW_PRECISION if quantize is not None or read.base is not None else itemsize


def _needed(
    header: Header, itemsize: int, matrices: int, devices: tuple[str, ...], split_at: tuple[int, ...] | None
) -> dict[str, int]:
    """Bytes of weights on each device."""
    from wanshim.core.model_split.plan import plan_split

    blocks = [block.bytes_at(itemsize, matrices) for block in header.blocks]
    return plan_split(blocks, header.outside.bytes_at(itemsize), devices, split_at=split_at).bytes_by_device


def _others(
    header: Header, itemsize: int, matrices: int, devices: tuple[str, ...], read: settings.Settings
) -> Iterator[tuple[str, dict[str, int]]]:
    """What the user could change, each with the bytes it would need."""
    if read.split_at is not None:
        balanced = _needed(header, itemsize, matrices, devices, None)
        yield f"without {read.sources['split_at']}: balanced by bytes", balanced
    if matrices > LOW_PRECISION:
        low = _needed(header, itemsize, LOW_PRECISION, devices, read.split_at)
        yield "an fp8 base: WANSHIM_BASE=float8", low
        if read.split_at is not None:
            both = _needed(header, itemsize, LOW_PRECISION, devices, None)
            yield f"an fp8 base, WANSHIM_BASE=float8, without {read.sources['split_at']}", both
