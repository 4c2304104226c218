"""The pictures of the explanations, as SVG. docs/generate.py writes them."""

from __future__ import annotations

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")


def svg(width: int, height: int, *parts: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
    arrow = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker></defs>'
    )
    page = f'<rect width="{width}" height="{height}" fill="white"/>'
    return f'{head} font-size="12" fill="#222">\n{page}{arrow}\n' + "\n".join(parts) + "\n</svg>\n"


def box(x: float, y: float, w: float, h: float, colour: str, opacity: float = 0.75) -> str:
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{colour}" fill-opacity="{opacity}" stroke="#333"/>'


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#333" stroke-width="1.5" marker-end="url(#a)"/>'


def temporal() -> str:
    """Frames left to right, layers top down; two frames go to the rank after, once per layer."""
    runs, size, parts = (3, 2, 2), 44, []
    for layer in range(3):
        y, column = 40 + layer * 70, 0
        parts.append(text(10, y + 26, f"layer {layer + 1}"))
        for rank, run in enumerate(runs):
            for _ in range(run):
                x = 80 + column * (size + 6) + rank * 40
                parts.append(box(x, y, size, size, COLOURS[rank]))
                column += 1
            if rank:
                left = 80 + (column - run) * (size + 6) + rank * 40
                parts.append(arrow(left - 44, y + 22, left - 4, y + 22))
    for rank, x in enumerate((130, 300, 440)):
        parts.append(text(x, 24, f"rank {rank}", "middle"))
    parts.append(
        text(80, 262, "time: each square is a latent frame; an arrow is the last two input frames of a convolution")
    )
    return svg(560, 280, *parts)


def spatial() -> str:
    """One frame in four bands with the columns that neighbours exchange."""
    parts, width = [], 100
    for rank in range(4):
        x = 30 + rank * (width + 24)
        parts.append(box(x, 40, width, 130, COLOURS[rank]))
        parts.append(text(x + width / 2, 24, f"rank {rank}", "middle"))
        if rank:
            parts.append(box(x - 10, 40, 10, 130, COLOURS[rank - 1], 0.35))
            parts.append(arrow(x - 30, 80, x - 6, 80))
            parts.append(arrow(x + 6, 120, x - 18, 120))
        if rank < 3:
            parts.append(box(x + width, 40, 10, 130, COLOURS[rank + 1], 0.35))
    parts.append(
        text(
            30,
            198,
            "one column of the new frames crosses each border before a convolution; chunk follows chunk in time",
        )
    )
    return svg(560, 214, *parts)


def tile() -> str:
    """Overlapping tiles by owner; blended strips go down and right."""
    owners, parts = ((0, 1, 2), (3, 0, 1)), []
    for i, row in enumerate(owners):
        for j, rank in enumerate(row):
            x, y = 40 + j * 120, 40 + i * 90
            parts.append(box(x, y, 150, 115, COLOURS[rank], 0.5))
            parts.append(text(x + 60, y + 50, f"rank {rank}", "middle"))
    parts += [arrow(140, 80, 185, 80), arrow(90, 125, 90, 165)]
    parts.append(
        text(40, 268, "tiles overlap; each rank blends its own, with the strips of the tiles above and to the left")
    )
    return svg(560, 284, *parts)


RANKS = 4
SIDE = 26  # of a rank's share in the picture of sequence parallel
STEPS = (
    ("norms, q, k, v", "tokens"),
    ("self-attention", "heads"),
    ("cross-attention, feed-forward", "tokens"),
)


def sequence_ranks() -> str:
    """Tokens down, heads across: rows of a rank outside self-attention, columns inside it."""
    parts, size = [], RANKS * SIDE
    for place, (title, divided) in enumerate(STEPS):
        left, top = 70 + place * 200, 50
        parts.append(text(left + size / 2, 30, title, "middle"))
        for rank in range(RANKS):
            colour = COLOURS[rank]
            if divided == "tokens":
                parts.append(box(left, top + rank * SIDE, size, SIDE, colour))
            else:
                parts.append(box(left + rank * SIDE, top, SIDE, size, colour))
        if place < len(STEPS) - 1:
            parts.append(arrow(left + size + 12, top + size / 2, left + 184, top + size / 2))
            words = "q, k, v" if place == 0 else "output"
            parts.append(text(left + size + 48, top + size / 2 - 10, words, "middle"))
    parts.append(text(14, 50 + size / 2, "tokens"))
    parts.append(text(70 + size / 2, 50 + size + 20, "heads", "middle"))
    for rank in range(RANKS):
        x = 70 + rank * 90
        parts += [box(x, 196, 14, 14, COLOURS[rank]), text(x + 20, 208, f"rank {rank}")]
    parts.append(text(430, 208, "arrow: all-to-all"))
    return svg(620, 226, *parts)


FORWARD, BACKWARD = 5, 14  # of one micro-batch on one stage, as traced: backward computes the blocks again
MICRO_BATCHES = 4


def schedule(stages: int = 2, count: int = MICRO_BATCHES) -> list[list[tuple[float, float, int, bool]]]:
    """By stage: start, length, micro-batch, and whether it is a backward, in the order 1F1B runs them."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, count)
        order = [(i, False) for i in range(ahead)]
        for i in range(count):
            order.append((i, True))
            order += [(i + ahead, False)] if i + ahead < count else []
        orders.append(order)
    ends: dict[tuple[int, int, bool], float] = {}
    done: list[list[tuple[float, float, int, bool]]] = [[] for _ in range(stages)]
    while any(len(did) < len(order) for did, order in zip(done, orders)):
        for stage, (did, order) in enumerate(zip(done, orders)):
            if len(did) == len(order):
                continue
            i, backward = order[len(did)]
            before = stage + 1 if backward else stage - 1
            needs = (before, i, backward) if 0 <= before < stages else (stage, i, False) if backward else None
            if needs is not None and needs not in ends:
                continue
            start = max(ends[needs] if needs else 0, did[-1][0] + did[-1][1] if did else 0)
            length = BACKWARD if backward else FORWARD
            did.append((start, length, i, backward))
            ends[stage, i, backward] = start + length
    return done


def pipeline() -> str:
    """Two stages, four micro-batches: forwards light, backwards full, time left to right."""
    parts, scale = [], 5.2
    for stage, work in enumerate(schedule()):
        y = 30 + stage * 56
        parts.append(text(10, y + 24, f"GPU {stage}"))
        for start, length, i, backward in work:
            parts.append(box(60 + start * scale, y, length * scale, 38, COLOURS[i], 0.9 if backward else 0.35))
            parts.append(text(60 + (start + length / 2) * scale, y + 24, str(i), "middle"))
    parts.append(text(60, 160, "a number is a micro-batch: light its forward, full its backward; white: the GPU waits"))
    return svg(620, 176, *parts)


PICTURES = {
    "vae_decode_temporal": temporal,
    "vae_decode_spatial": spatial,
    "vae_decode_tile": tile,
    "sequence_ranks": sequence_ranks,
    "pipeline": pipeline,
}
