"""Draws the three pictures of docs/vae_decode.md. Its tables are those of docs/generate.py.

python docs/vae_decode.py
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
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


def main() -> None:
    for name, draw in (("temporal", temporal), ("spatial", spatial), ("tile", tile)):
        (ROOT / "docs" / f"vae_decode_{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
