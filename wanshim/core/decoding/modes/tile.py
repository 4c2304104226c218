"""Tile mode: overlapping tiles decoded apart and blended, as diffusers' `tiled_decode` does. Approximate by nature.

A tile lacks the global attention and most of the receptive field, so the result differs from the untiled decode; it
equals diffusers' tiled decode. Tiles go to ranks by work, largest first to the least loaded. Each rank blends its own
tiles: a tile needs only the blended strips of the tile above and the tile to the left, so those travel, not tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.plan import Mode, TileSettings, VaeJob, VaePlan, build_plan, frame_work, spans
from wanshim.core.decoding.ranks.exchange import Comm
from wanshim.core.decoding.ranks.output import Region

from .network import Chunk, History, VaeRun, decode_chunk, run_in_order


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
    cell: tuple[int, int],
    start: tuple[int, int],
    size: tuple[int, int],
    limit: tuple[int, int],
    stride: tuple[int, int],
    scale: int,
) -> Tile:
    stop = tuple(min(a + s, end) for a, s, end in zip(start, size, limit))
    made = tuple((b - a) * scale for a, b in zip(start, stop))
    crop = [_crop(cell[d], stride[d], made[d], limit[d] * scale) for d in (0, 1)]
    return Tile(
        index=index,
        row=cell[0],
        column=cell[1],
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


def _plans(graph: DecoderGraph, job: VaeJob) -> list[VaePlan]:
    _, _, _, height, width = job.latent
    if not needs_tiles(graph, job.tiles, height, width):
        return []
    grid = make_grid(graph, job.tiles, height, width)
    return [_plan(graph, job, grid, chunk) for chunk in job.chunks()]


def _plan(graph: DecoderGraph, job: VaeJob, grid: TileGrid, chunk: int) -> VaePlan:
    b, _, t, h, w = job.latent
    owners = assign(grid.tiles, job.workers)
    top, bottom, left, right = max(grid.tiles, key=lambda tile: tile.work).latent
    size = {"height": bottom - top, "width": right - left}
    at_once = job.working_bytes(graph, frames=chunk, chunk=chunk, first=chunk == t, keeps_history=t > chunk, **size)
    owned = [[tile for tile in grid.tiles if owners[tile.index] == rank] for rank in range(job.ranks)]
    values = [sum(tile.size[0] * tile.size[1] for tile in tiles) for tiles in owned]
    value_bytes = b * graph.conv_out.out_channels * graph.frames(t) * job.itemsize
    return build_plan(
        graph,
        job,
        mode="tile",
        exactness="approximate",
        owners=owners,
        split_text=f"{len(owners)} tiles, {' + '.join(str(len(tiles)) for tiles in owned)}",
        chunk=chunk,
        peak=tuple(at_once + count * value_bytes if count else 0 for count in values),
        cost=frame_work(0, t) * max(sum(tile.work for tile in tiles) for tiles in owned) / (h * w) * 1.1,
        reason=f"the least memory: {len(owners)} overlapping tiles, blended; not equal to the untiled decode",
    )


def _run(run: VaeRun) -> None:
    assert isinstance(run.graph, DecoderGraph)
    grid = make_grid(run.graph, run.job.tiles, *run.job.latent[3:])
    owners, patch = run.plan.owners, run.graph.patch_size
    decoded = {
        tile.index: torch.cat(list(_decode_tile(run, tile)), 2)
        for tile in grid.tiles
        if owners[tile.index] == run.comm.rank
    }
    blend_tiles(grid, owners, decoded, run.comm)
    shown = [tile for tile in grid.tiles if tile.crop[0] < tile.crop[1] and tile.crop[2] < tile.crop[3]]
    regions = [
        Region(
            rank=owners[tile.index],
            rows=(tile.crop[0] * patch, tile.crop[1] * patch),
            columns=(tile.crop[2] * patch, tile.crop[3] * patch),
        )
        for tile in shown
    ]
    mine = [tile for tile in shown if tile.index in decoded]
    for a, b in spans(0, run.job.latent[2], max(run.plan.chunk, 4)):
        start, stop = run.graph.output_range(a, b)
        parts = [run.sink.finish(_visible(decoded[tile.index], tile)[:, :, start:stop]) for tile in mine]
        run.sink.deliver((start, stop), regions, parts)
        run.comm.checkpoint()


def _visible(decoded: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The part of a decoded tile that its neighbours do not cover."""
    top, bottom, left, right = tile.crop
    return decoded[:, :, :, : bottom - top, : right - left]


def _decode_tile(run: VaeRun, tile: Tile) -> Iterator[torch.Tensor]:
    """Decode one tile of the latent (before post_quant), causal in time; patches before clamping."""
    graph, ops = run.graph, run.ops
    assert isinstance(graph, DecoderGraph)
    top, bottom, left, right = tile.latent
    part = run.given[:, :, :, top:bottom, left:right]

    def chunk(start: int, stop: int) -> Chunk:
        return decode_chunk(graph, ops, ops.quant(graph.post_quant, part[:, :, start:stop]), first=start == 0)

    for decoded in run_in_order(spans(0, part.shape[2], run.plan.chunk), chunk, History().answer):
        run.comm.checkpoint()
        yield decoded


def blend_tiles(grid: TileGrid, owners: tuple[int, ...], decoded: dict[int, torch.Tensor], comm: Comm) -> None:
    """Blend this rank's tiles in place, in raster order; strips come from the ranks that own the neighbours."""
    for tile in grid.tiles:
        if tile.row > 0:
            above = grid.tiles[tile.index - grid.columns]
            strip = _send_strip(above, tile, 3, grid.blend_height, owners, decoded, comm)
            if strip is not None:
                _blend(strip, decoded[tile.index], 3, grid.blend_height)
        if tile.column > 0:
            left = grid.tiles[tile.index - 1]
            strip = _send_strip(left, tile, 4, grid.blend_width, owners, decoded, comm)
            if strip is not None:
                _blend(strip, decoded[tile.index], 4, grid.blend_width)


def _send_strip(
    source: Tile,
    target: Tile,
    dim: int,
    extent: int,
    owners: tuple[int, ...],
    decoded: dict[int, torch.Tensor],
    comm: Comm,
) -> torch.Tensor | None:
    """Send the last rows or columns of `source` to the rank of `target`, where they are returned.

    All ranks walk the same order, so none blocks.
    """
    sender, receiver = owners[source.index], owners[target.index]
    size = list(source.size)
    size[dim - 3] = min(extent, size[dim - 3])
    step = f"blend tile {target.index}"
    strip = None
    if sender == comm.rank:
        whole = decoded[source.index]
        strip = whole.narrow(dim, whole.shape[dim] - size[dim - 3], size[dim - 3])
    if sender == comm.rank and receiver != comm.rank and strip is not None:
        comm.exchange(step, [(strip.contiguous(), receiver)], [])
    if receiver == comm.rank and sender != comm.rank:
        like = decoded[target.index]
        strip = torch.empty((*like.shape[:3], *size), dtype=like.dtype, device=like.device)
        comm.exchange(step, [], [(strip, sender)])
    return strip if receiver == comm.rank else None


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


TILE = Mode(name="tile", plan=_plans, run=_run, encodes=False)
