"""A script of a user whose models do not fit: DiffSynth's VRAM management keeps them in host memory, or in files, as
its first argument says. It makes videos of two sizes, and writes frames.pt."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.contract.diffsynth import wan_pipelines

if not hasattr(torch.cpu, "empty_cache"):  # DiffSynth calls it for any device
    torch.cpu.empty_cache = lambda: None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# offload, onload
PLACES = {
    "host": ("cpu", "cpu"),
    "disk": ("disk", "cpu"),
    "files": ("disk", "disk"),
    "onload": ("cpu", DEVICE),
}


def manage(pipe: Any, way: str, folder: Path, quantize: Any = None, **changed: Any) -> Any:
    """The pipeline as `from_pretrained` makes it with a `vram_config`.

    Args:
        quantize: DiffSynth's `QuantizeConfig` of a DiT whose layers it has quantized.
    """
    from diffsynth.core.loader.model import DiskMap
    from diffsynth.core.vram.layers import enable_vram_management
    from diffsynth.models.model_loader import ModelPool

    offload, onload = PLACES[way]
    dtype = pipe.torch_dtype
    config = {
        "offload_dtype": "disk" if offload == "disk" else dtype,
        "offload_device": offload,
        "onload_dtype": "disk" if onload == "disk" else dtype,
        "onload_device": onload,
        "preparing_dtype": dtype,
        "preparing_device": DEVICE,
        "computation_dtype": dtype,
        "computation_device": DEVICE,
    } | changed
    for name in ("dit", "dit2", "vace", "vap"):
        if (model := getattr(pipe, name, None)) is None:
            continue
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        file = folder / f"{name}.safetensors"
        if quantize is None:
            save_file({key: value.contiguous().clone() for key, value in model.state_dict().items()}, file)
        files = DiskMap(str(file), "cpu") if offload == "disk" else None
        layers = ModelPool().fetch_module_map(kind, config)
        given = {} if quantize is None else {"quantize": quantize}
        enable_vram_management(model, layers, vram_config=config, vram_limit=None, disk_map=files, **given)
    pipe.vram_management_enabled = pipe.check_vram_management_state()
    pipe.load_models_to_device([])
    return pipe


if __name__ == "__main__":
    way, kind = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as folder:
        pipe = manage(wan_pipelines.MADE[kind](), way, Path(folder))
        made = [wan_pipelines.generate(pipe, kind), wan_pipelines.generate(pipe, kind, num_frames=9)]
        made += [wan_pipelines.generate(pipe, kind, cfg_scale=1.0)]
        torch.save([each.cpu() for each in made], "frames.pt")
