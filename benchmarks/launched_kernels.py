"""Which kernels the Wan VAEs launch on the GPU at hand, where cuDNN decides how each convolution may run.

    python benchmarks/launched_kernels.py --json benchmarks/results/launched_kernels_1xH100.json

It needs diffusers, Triton and cuDNN's frontend. kernel_table.py marks in its table what the record names: a call of a
usual size on such a GPU waits for that alone. Columns: the call's kind, its video, whether its size is usual and it was
not left to the framework; its kernels, those of them that a call whose convolutions all run by engines would not
launch, and those that the table does not list for calls of this kind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import checkout
import kernel_table
import torch

from wanshim.cli.warm import LAYOUTS, make_vae
from wanshim.core.decoding import parallelize_decode, parallelize_encode
from wanshim.core.decoding.operators import kernel_compiler

SIZES = (  # multiples of 32: the 2.2 VAE has no others without an odd latent
    *((384, 640), (416, 736), (480, 640), (480, 832), (832, 480), (480, 800), (512, 800), (512, 768), (640, 640)),
    *((576, 1024), (704, 960), (704, 1280), (1280, 704), (736, 1280), (1024, 1024), (1088, 1920)),
    *((320, 576), (256, 256)),
)
SHAPES = (  # videos, latent frames, height, width
    *((1, 5, height, width) for height, width in SIZES),
    *((1, frames, 480, 832) for frames in (1, 2, 3, 9)),
    *((2, 3, height, width) for height, width in ((480, 832), (704, 1280))),
)
OTHERS = {  # of the kinds of calls that are not among SHAPES
    "2.1": (
        *((1, 5, height, width) for height, width in ((480, 848), (512, 848), (720, 1280), (1280, 720), (624, 416))),
        *((2, 3, height, width) for height, width in ((832, 480), (480, 848), (1280, 720), (624, 416))),
    ),
    "2.2": tuple((2, 3, height, width) for height, width in ((480, 640), (512, 832), (512, 800), (480, 800))),
}


class Recorder(kernel_table.Recorder):
    """Notes what a kernel is launched with, and launches it."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **given: Any) -> None:
            self._launch(*args, **given)
            self._kernel[grid](*args, **given)

        return launch


def key_of(kernel: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps({"kernel": kernel, "arguments": arguments, "options": options})


@torch.no_grad()
def calls(layout: str, verb: str, *, strict: bool) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """A call of each shape: what is said of it, and the keys of what it launched."""
    table = {key_of(each.kernel, each.arguments, each.options): each for each in kernel_compiler.kernel_table()}
    vae = make_vae(layout, torch.device("cuda"), kernel_table.DTYPE)
    handle = (parallelize_decode if verb == "decode" else parallelize_encode)(vae, strict=strict)
    handle.wait_for_kernels()
    graph, pixels = handle.binding.graph, LAYOUTS[layout].factor
    for batch, frames, height, width in (*SHAPES, *OTHERS[layout]):
        shape = (batch, LAYOUTS[layout].channels, frames, height // pixels, width // pixels)
        if verb == "encode":
            shape = (batch, 3, 4 * frames - 3, height, width)
        given = torch.randn(shape, device="cuda", dtype=kernel_table.DTYPE).clamp_(-1, 1)
        launched: set[str] = set()
        handle.parallel.plan = None  # a call that is left to the framework makes none
        with kernel_table.recorded(Recorder, lambda *launch, into=launched: into.add(key_of(*launch))):
            vae.decode(given) if verb == "decode" else vae.encode(given)
        own = kernel_compiler.kernel_set(graph, shape, strict=strict)
        listed = {key for key, launch in table.items() if launch.is_of(own, kernel_compiler.BY_ANY)}
        row = {
            "call": own,
            "video": [batch, 4 * frames - 3, height, width],
            "usual": kernel_compiler.is_usual(graph, shape),
            "ours": handle.parallel.plan is not None,
            "launched": len(launched),
            "other": len([key for key in launched & listed if not table[key].is_of(own, ("engines",))]),
            "unlisted": len(launched - listed),
        }
        yield row, launched
    handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    about = {
        "gpu": torch.cuda.get_device_name(),
        "capability": f"sm{major}{minor}",
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        **checkout.state(),
    }
    rows: list[dict[str, Any]] = []
    usual: dict[str, set[str]] = {}  # by launch, the calls
    for layout in args.layouts.split(","):
        for verb in ("decode", "encode"):
            for strict in (True, False):
                for row, launched in calls(layout, verb, strict=strict):
                    rows.append(row)
                    print(*row.values(), flush=True)
                    if row["usual"]:
                        for key in launched:
                            usual.setdefault(key, set()).add(row["call"])
                launches = [{"of": sorted(usual[key]), **json.loads(key)} for key in sorted(usual)]
                args.json.write_text(
                    kernel_table.text_of({**about, "rows": rows, "launches": launches}), encoding="utf-8"
                )


if __name__ == "__main__":
    main()
