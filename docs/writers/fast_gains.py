"""What `wanshim run --fast` says it gains: sentences from benchmarks/results, for wanshim/launch/fast.json."""

from __future__ import annotations

import json
from typing import Any

from writers import measured

PATH = measured.ROOT / "wanshim/launch/fast.json"
STEPS = {"compile": "compile+keep", "float8": "float8+keep", "compile+float8": "float8+compile+keep"}


def text() -> str:
    """The file: a sentence by what is turned on."""
    steps = measured.result("training_step_eight_bit_1xH200")
    decoded, encoded = (measured.result(f"vae_{name}H200") for name in ("decode_2.1_1x", "encode_2.1_2x"))
    found = {name: _step(steps, arm) for name, arm in STEPS.items()}
    found["decode"] = f"{_video('decode', decoded)} in frames of -1 to 1"
    found["encode"] = f"{_video('encode', encoded)} in mean and logarithm of the variance"
    return json.dumps(found, indent=1) + "\n"


def _step(record: dict[str, Any], name: str) -> str:
    arms, size = record["arms"], record["arguments"]
    eager, arm = (arms[each] for each in ("eager", name))
    return (
        f"a LoRA step of the 14B DiT at {size['height']}x{size['width']}x{size['frames']} with kept attention takes "
        f"{min(arm['seconds']):.2f} s in place of {min(eager['seconds']):.2f} s on one {record['gpu']}; a weight's "
        f"gradient moves by {arm['distance']['middle']:.1%} of its norm in the median, "
        f"{arm['distance']['farthest']:.1%} at most"
    )


def _video(verb: str, record: dict[str, Any]) -> str:
    arms = {row["arm"]: row for row in record["rows"] if row["ranks"] == 1 and row["layout"] == "2.1"}
    own, fast = arms["diffusers untiled"], arms["wanshim fast"]
    return (
        f"the {verb} of 81 frames of 704x1280 by Wan's 2.1 VAE takes {fast['seconds']:.2f} s in place of "
        f"{own['seconds']:.2f} s on one {record['gpu']}, engines known; values move by {fast['max_diff']:.2g} at most"
    )
