"""Tile mode: overlapping tiles decoded apart and blended, as diffusers' `tiled_decode` does. Approximate by nature.

A tile lacks the global attention and most of the receptive field, so the result differs from the untiled decode; it
equals diffusers' tiled decode. Tiles go to ranks by work, largest first to the least loaded. Each rank blends its own
tiles: a tile needs only the blended strips of the tile above and the tile to the left, so those travel, not tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.operators.base import Operators
from wanshim.core.decoding.ranks.exchange import Comm

from .driver import History, run_in_order
from .network import decode_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSettings:
    """Tile size and stride in pixels of the finished picture; 256 and 192 are diffusers' defaults."""

    min_height: int = 256
    min_width: int = 256
    stride_height: int = 192
    stride_width: int = 192

    @classmethod
    def of(cls, vae: Any) -> TileSettings:
        """The sizes a VAE of diffusers' making carries, in pixels."""
        return cls(
            min_height=int(vae.tile_sample_min_height),
            min_width=int(vae.tile_sample_min_width),
            stride_height=int(vae.tile_sample_stride_height),
            stride_width=int(vae.tile_sample_stride_width),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One tile: where it stands in the grid, what it reads of the latent, what it writes of the (patched) picture."""

    index: int
    row: int
    column: int
    latent: tuple[int, int, int, int]
    size: tuple[int, int]
    crop: tuple[int, int, int, int]

    @property
    def work(self) -> int:
        top, bottom, left, right = self.latent
        return (bottom - top) * (right - left)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGrid:
    """All tiles in raster order, and how many decoder pixels neighbours blend over."""

    tiles: tuple[Tile, ...]
    columns: int
    blend_height: int
    blend_width: int


def needs_tiles(graph: DecoderGraph, settings: TileSettings, height: int, width: int) -> bool:
    """diffusers tiles a latent only if it is larger than one tile."""
    pixels = graph.scale_s * graph.patch_size
    return height > settings.min_height // pixels or width > settings.min_width // pixels


def make_grid(graph: DecoderGraph, settings: TileSettings, height: int, width: int) -> TileGrid:
    """Cut a latent of `height` x `width` as diffusers does."""
    scale, pixels = graph.scale_s, graph.scale_s * graph.patch_size
    stride = (settings.stride_height // pixels, settings.stride_width // pixels)
    size = (settings.min_height // pixels, settings.min_width // pixels)
    out = (settings.stride_height // graph.patch_size, settings.stride_width // graph.patch_size)
    rows, columns = range(0, height, stride[0]), range(0, width, stride[1])
    tiles = tuple(
        _make_tile(i * len(columns) + j, (i, j), (top, left), size, (height, width), out, scale)
        for i, top in enumerate(rows)
        for j, left in enumerate(columns)
    )
    blend = (settings.min_height // graph.patch_size - out[0], settings.min_width // graph.patch_size - out[1])
    return TileGrid(tiles=tiles, columns=len(columns), blend_height=blend[0], blend_width=blend[1])


def _make_tile(
    index: int,
    place: tuple[int, int],
    start: tuple[int, int],
    size: tuple[int, int],
    limit: tuple[int, int],
    stride: tuple[int, int],
    scale: int,
) -> Tile:
    stop = tuple(min(a + s, end) for a, s, end in zip(start, size, limit))
    made = tuple((b - a) * scale for a, b in zip(start, stop))
    crop = [_crop(place[d], stride[d], made[d], limit[d] * scale) for d in (0, 1)]
    return Tile(
        index=index,
        row=place[0],
        column=place[1],
        latent=(start[0], stop[0], start[1], stop[1]),
        size=(made[0], made[1]),
        crop=(*crop[0], *crop[1]),
    )


def assign(tiles: tuple[Tile, ...], ranks: int) -> tuple[int, ...]:
    """The rank of each tile: largest first, to the rank with the least work."""
    owners, load = [0] * len(tiles), [0] * ranks
    for tile in sorted(tiles, key=lambda tile: (-tile.work, tile.index)):
        rank = min(range(ranks), key=lambda rank: (load[rank], rank))
        owners[tile.index] = rank
        load[rank] += tile.work
    return tuple(owners)


def decode_tiles(
    graph: DecoderGraph, ops: Operators, latent: torch.Tensor, tiles: list[Tile], chunk: int, comm: Comm
) -> dict[int, torch.Tensor]:
    """Decode the given tiles of `latent` (before post_quant), each causal in time; patches before clamping."""
    return {tile.index: torch.cat(list(_decode_tile(graph, ops, latent, tile, chunk, comm)), 2) for tile in tiles}


def _decode_tile(
    graph: DecoderGraph, ops: Operators, latent: torch.Tensor, tile: Tile, chunk: int, comm: Comm
) -> Iterator[torch.Tensor]:
    top, bottom, left, right = tile.latent
    part = latent[:, :, :, top:bottom, left:right]
    chunks = (
        decode_chunk(graph, ops, ops.post_quant(graph.post_quant, part[:, :, at : at + chunk]), first=at == 0)
        for at in range(0, latent.shape[2], chunk)
    )
    for decoded in run_in_order(chunks, History().answer):
        comm.checkpoint()
        yield decoded


def blend_tiles(grid: TileGrid, owners: tuple[int, ...], decoded: dict[int, torch.Tensor], comm: Comm) -> None:
    """Blend this rank's tiles in place, in raster order; strips come from the ranks that own the neighbours."""
    for tile in grid.tiles:
        if tile.row > 0:
            above = grid.tiles[tile.index - grid.columns]
            strip = _fetch(above, tile, 3, grid.blend_height, owners, decoded, comm)
            if strip is not None:
                _blend(strip, decoded[tile.index], 3, grid.blend_height)
        if tile.column > 0:
            left = grid.tiles[tile.index - 1]
            strip = _fetch(left, tile, 4, grid.blend_width, owners, decoded, comm)
            if strip is not None:
                _blend(strip, decoded[tile.index], 4, grid.blend_width)


def _fetch(
    source: Tile,
    target: Tile,
    dim: int,
    extent: int,
    owners: tuple[int, ...],
    decoded: dict[int, torch.Tensor],
    comm: Comm,
) -> torch.Tensor | None:
    """The last rows or columns of `source` on the rank of `target`. All ranks walk the same order, so none blocks."""
    giver, taker = owners[source.index], owners[target.index]
    size = list(source.size)
    size[dim - 3] = min(extent, size[dim - 3])
    step = f"blend tile {target.index}"
    strip = None
    if giver == comm.rank:
        whole = decoded[source.index]
        strip = whole.narrow(dim, whole.shape[dim] - size[dim - 3], size[dim - 3])
    if giver == comm.rank and taker != comm.rank and strip is not None:
        comm.exchange(step, [(strip.contiguous(), taker)], [])
    if taker == comm.rank and giver != comm.rank:
        like = decoded[target.index]
        strip = torch.empty((*like.shape[:3], *size), dtype=like.dtype, device=like.device)
        comm.exchange(step, [], [(strip, giver)])
    return strip if taker == comm.rank else None


def _blend(strip: torch.Tensor, tile: torch.Tensor, dim: int, extent: int) -> None:
    """tile[y] = strip[y] * (1 - y / n) + tile[y] * y / n over the first n rows or columns; diffusers' rounding."""
    n = min(strip.shape[dim], tile.shape[dim], extent)
    if n == 0:
        return
    wide = torch.float64 if tile.dtype == torch.float64 else torch.float32
    weights = torch.tensor([y / n for y in range(n)], dtype=torch.float64)
    shape = [n if d == dim else 1 for d in range(tile.dim())]
    fresh = weights.to(wide).to(tile.device).view(shape)
    stale = (1 - weights).to(wide).to(tile.device).view(shape)
    head = tile.narrow(dim, 0, n)
    old = strip.narrow(dim, strip.shape[dim] - n, n)
    head.copy_((old.to(wide) * stale).to(tile.dtype) + (head.to(wide) * fresh).to(tile.dtype))


def _crop(index: int, stride: int, size: int, limit: int) -> tuple[int, int]:
    start = index * stride
    return start, max(start, min(start + min(stride, size), limit))
