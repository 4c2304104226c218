"""README's picture: seconds a sample and peak memory of a GPU by plan and number of GPUs, from the raw records."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from writers import measured


@dataclass(frozen=True)
class Look:
    """Colours on GitHub's light or dark page, which shows through."""

    words: str
    faint: str
    alone: str
    bars: str
    best: str


LOOKS = {
    "light": Look("#1f2328", "#59636e", "#8c959f", "#54aeff", "#0969da"),
    "dark": Look("#f0f6fc", "#9198a1", "#656c76", "#1f6feb", "#79c0ff"),
}
WIDTH, LEFT, PANEL, HEIGHT, TOP = 880, 300, 240, 26, 62


@dataclass(frozen=True)
class Bar:
    title: str
    gpus: int
    seconds: float  # a sample
    peak: float  # GiB, of the fullest GPU
    kind: str  # a field of Look


def bars() -> list[Bar]:
    """DiffSynth alone, one sample on several GPUs, then the plans that need less memory."""
    found = {count: measured.result(f"sequence_training_480p_{count}xH200") for count in (1, 2, 4)}
    drawn = [Bar("DiffSynth alone", 1, found[1]["median"], found[1]["peak_GiB"], "alone")]
    drawn += [Bar("one sample on all", n, found[n]["median"], found[n]["peak_GiB"], "best") for n in (2, 4)]
    split = measured.result("model_split_2xh200")["arms"]["split over 2"]
    drawn.append(Bar("model split", 2, split["median"], max(split["peak_GiB"].values()), "bars"))
    for count in (2, 4):
        arm = measured.result(f"model_split_lanes_{count}xH200")["lanes"]["8"]
        title = "model split, 8 samples in a pipeline"
        drawn.append(Bar(title, count, arm["median"] / 8, max(arm["peak_GiB"].values()), "bars"))
    return drawn


def picture(look: Look) -> str:
    drawn = bars()
    most = max(bar.seconds for bar in drawn), max(bar.peak for bar in drawn)
    height = TOP + len(drawn) * HEIGHT + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" fill="{look.words}">',
        _text(0, 18, "LoRA on the 14B Wan DiT, 480x832, 49 frames", 'font-weight="bold"'),
        _text(LEFT, TOP - 16, "seconds a sample"),
        _text(LEFT + PANEL + 50, TOP - 16, "peak GiB of a GPU"),
    ]
    for place, bar in enumerate(drawn):
        y = TOP + place * HEIGHT
        gpus = f"{bar.gpus} GPU" + "s" * (bar.gpus > 1)
        parts.append(_text(LEFT - 12, y + 15, f"{bar.title}, {gpus}", 'text-anchor="end"'))
        for panel, (value, top) in enumerate(zip((bar.seconds, bar.peak), most)):
            x = LEFT + panel * (PANEL + 50)
            length = PANEL * value / top
            parts.append(f'<rect x="{x}" y="{y}" width="{length:.1f}" height="20" fill="{getattr(look, bar.kind)}"/>')
            parts.append(_text(x + length + 6, y + 15, f"{value:.2f}" if panel == 0 else f"{value:.1f}"))
    gpu = measured.result("sequence_training_480p_1xH200")["gpu"]
    parts.append(_text(0, height - 8, f"{gpu}, bf16, LoRA rank 32, gradient checkpointing", f'fill="{look.faint}"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {more}>{escape(words)}</text>'


PICTURES = {f"gain_{name}": lambda look=look: picture(look) for name, look in LOOKS.items()}
