"""Draws the picture of docs/sequence.md: who holds what in a block.

python docs/sequence_picture.py
"""

from __future__ import annotations

from vae_decode import COLOURS, ROOT, arrow, box, svg, text

RANKS = 4
SIDE = 26
STEPS = (
    ("norms, q, k, v", "tokens"),
    ("self-attention", "heads"),
    ("cross-attention, feed-forward", "tokens"),
)


def held() -> str:
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


if __name__ == "__main__":
    (ROOT / "docs" / "sequence_ranks.svg").write_text(held(), encoding="utf-8")
