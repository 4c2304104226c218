"""The loss of a LoRA with and without the switches that change bits, and how far each is from eager's."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

from writers import measured, pictures

WIDTH, HEIGHT, LEFT, GAP, LEGEND = 880, 190, 60, 54, 230
OVER = 20  # steps of a running mean
COLOURS = {
    "eager": "#222222",
    "eager, seed 1": "#9a9a9a",
    "eager, seed 2": "#c9c9c9",
    "compiled": "#4c78a8",
    "float8": "#f58518",
    "int8": "#54a24b",
    "compiled, float8": "#b279a2",
}


def smoothed(values: list[float]) -> list[float]:
    sums = [0.0, *accumulate(values)]
    return [(b - a) / OVER for a, b in zip(sums, sums[OVER:], strict=False)]


def losses() -> str:
    found = measured.result("loss_overlay")["losses"]
    runs = {name: smoothed(values) for name, values in found.items()}
    apart = {
        name: [math.log10(max(value, 1e-6)) for value in smoothed([abs(a - b) for a, b in zip(values, found["eager"])])]
        for name, values in found.items()
        if name != "eager"
    }
    parts = [pictures.text(LEFT, 18, f"loss of each step, mean of {OVER}")]
    parts += panel(runs, 30, lambda value: f"{value:.2f}")
    second = 30 + HEIGHT + GAP
    parts.append(pictures.text(LEFT, second - 12, f"distance to eager's loss at the same step, mean of {OVER}"))
    parts += panel(apart, second, lambda value: f"{10**value:.0e}")
    for place, (name, colour) in enumerate(COLOURS.items()):
        y = 44 + place * 20
        ends = f'x1="{WIDTH - LEGEND + 30}" y1="{y}" x2="{WIDTH - LEGEND + 60}" y2="{y}"'
        parts.append(f'<line {ends} stroke="{colour}" stroke-width="2"/>')
        parts.append(pictures.text(WIDTH - LEGEND + 70, y + 4, name))
    parts.append(pictures.text(LEFT, second + HEIGHT + 22, "step 1 to 300"))
    return pictures.svg(WIDTH, second + HEIGHT + 34, *parts)


def panel(runs: dict[str, list[float]], top: int, words: Callable[[float], str]) -> list[str]:
    lowest, highest = (pick(value for run in runs.values() for value in run) for pick in (min, max))
    width = WIDTH - LEFT - LEGEND
    parts = [f'<rect x="{LEFT}" y="{top}" width="{width}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    for part in range(4):
        value = lowest + (highest - lowest) * part / 3
        parts.append(pictures.text(LEFT - 6, top + HEIGHT * (1 - part / 3) + 4, words(value), "end"))
    for name, run in runs.items():
        points = " ".join(
            f"{LEFT + width * i / (len(run) - 1):.1f},{top + HEIGHT * (highest - value) / (highest - lowest):.1f}"
            for i, value in enumerate(run)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.4"/>')
    return parts


PICTURES = {"loss_overlay": losses}
