"""What WANSHIM_FAST turned on, what that was measured to gain, and how far results moved: the first lines of a run.

`fast.json` is written by docs/generate.py, from the records under benchmarks/results.
"""

from __future__ import annotations

import json
from pathlib import Path

from wanshim import settings
from wanshim.select import variables
from wanshim.select.features import Selection

READ_BY = variables.VARIABLES["fast"].read_by
MEASURED = Path(__file__).with_name("fast.json")


def lines(selection: Selection, read: settings.Settings) -> list[str]:
    """The lines for the user; none without the word."""
    if not read.fast or not any(feature.partition(".")[2] in READ_BY for feature in selection.reasons):
        return []
    turned_on = [
        f"{variables.names(field)[0]}={_typed(getattr(read, field))}"
        for field in settings.FAST_FIELDS
        if read.sources[field] == settings.FAST
    ]
    first = f"{settings.FAST} turned on what changes bits, where it is available: {' '.join(turned_on) or 'nothing'}"
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    return [first, *(f"measured: {measured[name]}" for name in _changed(selection, read) if name in measured)]


def _typed(value: object) -> object:
    return 1 if value is True else value


def _changed(selection: Selection, read: settings.Settings) -> list[str]:
    """What is on that changes bits, by its name in the file."""
    abilities = {feature.partition(".")[2] for feature in selection.reasons}
    training = {
        "compile": read.compile and "compiled_blocks" in abilities,
        "float8": read.compute == "float8" and "eight_bit_compute" in abilities,
    }
    vae = {
        "decode": read.vae_mode != "off" and "vae_decode" in abilities,
        "encode": read.vae_encode != "off" and "vae_encode" in abilities,
    }
    step = "+".join(name for name, is_on in training.items() if is_on)
    return [step, *(verb for verb, is_on in vae.items() if is_on and read.vae_fast)]
