"""Writes what this user's runs learned of cuDNN's engines on one GPU into the table that the package brings.

    wanshim warm --size 704x1280x81 --vae 2.1; wanshim warm --size 704x1280x81 --vae 2.2
    python benchmarks/engine_table.py

The table is one for each compute capability, in wanshim/core/decoding/operators/, and names the GPU, the driver and the
cuDNN that its engines were timed with. What it has is kept where this machine knows nothing of the same convolution.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import checkout

from wanshim.core.decoding.operators import engine_store
from wanshim.core.shared.files import engine_folder

PLACE = Path(engine_store.__file__).parent
OF_THE_MACHINE = ("gpu", "driver", "cudnn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=engine_folder(), help="folder of what was learned")
    parser.add_argument("--capability", help="such as 9.0; default: of the GPU in this machine")
    parser.add_argument("--torch", help="the version that ran; default: the one here")
    args = parser.parse_args()
    if args.store is None or not args.store.is_dir():
        raise SystemExit(f"{args.store} is no folder: run `wanshim warm` first")
    if args.capability is None or args.torch is None:
        import torch

        args.torch = args.torch or torch.__version__
        args.capability = args.capability or "{}.{}".format(*torch.cuda.get_device_capability())
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.store.glob("*.json"))]
    machines = {tuple(entry["facts"][name] for name in OF_THE_MACHINE) for entry in kept}
    if len(machines) != 1:
        raise SystemExit(f"{args.store} holds engines of {sorted(machines) or 'nothing'}; expected one GPU and cuDNN")
    path = PLACE / f"engines_sm{args.capability.replace('.', '')}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["convolutions"] if path.is_file() else []
    rows = {_key(entry): entry for entry in [*before, *map(_entry, kept)]}
    about = dict(zip(OF_THE_MACHINE, next(iter(machines)))) | {"torch": args.torch, **checkout.state()}
    path.write_text(_text(about, [rows[key] for key in sorted(rows)]), encoding="utf-8")
    print(f"{path}: {len(rows)} convolutions, {len(rows) - len(before)} of them new")


def _entry(kept: dict[str, Any]) -> dict[str, Any]:
    facts = {name: value for name, value in kept["facts"].items() if name not in OF_THE_MACHINE}
    return {"facts": facts, "engine": kept["engine"]}


def _key(entry: dict[str, Any]) -> str:
    return json.dumps(entry["facts"], sort_keys=True)


def _text(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """One convolution a line."""
    head = json.dumps({"what": "benchmarks/engine_table.py", **about}, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row, sort_keys=True)}" for row in rows)
    return f'{head},\n "convolutions": [\n{lines}\n ]\n}}\n'


if __name__ == "__main__":
    main()
