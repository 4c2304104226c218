"""The stage that encodes a data set (`--task sft:data_process`): no plan is needed there. accelerate gives each process
its part of the samples, and that is what `wanshim run --gpus` is for in this stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.encode_cache import ENGINES
from wanshim.adapters.diffsynth.splitting.load import devices_of, trains_on_one_device
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.patching import SeamState


def over_processes(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def launch(*args: object, **kwargs: object) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        accelerator, model = given["accelerator"], given["model"]
        samples, encoded = len(given["dataset"]), 0

        def count(module: object, args: object, output: object) -> None:
            nonlocal encoded
            encoded += 1

        with Undo() as undo:
            undo.add(model.register_forward_hook(count).remove)
            # a forward of an engine communicates, so that each process needs as many samples as the others
            if seam.settings.plan is not None and accelerator.distributed_type.value not in ENGINES:
                _give_each_sample_once(accelerator, undo)
            result = original(*args, **kwargs)
        _report(seam, accelerator, samples, encoded)
        return result

    return launch


def _give_each_sample_once(accelerator: Any, undo: Undo) -> None:
    """Else the first samples are encoded a second time, to give each process as many. DDP, which a parameter that would
    train brings in, sends buffers in each forward: they are alike, since nothing is trained here."""
    from accelerate.utils import DistributedDataParallelKwargs

    ddp = replace(accelerator.ddp_handler or DistributedDataParallelKwargs(), broadcast_buffers=False)
    undo.set(accelerator, {"ddp_handler": ddp})
    undo.set(accelerator.dataloader_config, {"even_batches": False})


def _report(seam: SeamState, accelerator: Any, samples: int, encoded: int) -> None:
    read, processes = seam.settings, accelerator.num_processes
    part = len(range(accelerator.process_index, samples, processes))
    if processes > 1:
        again = f", {encoded - part} a second time to give each process as many" if encoded > part else ""
        seam.notes.append(f"{processes} processes encoded {samples} samples, this one {encoded}{again}")
    else:
        seam.notes.append(f"1 process encoded {encoded} samples")
    if encoded < part:
        seam.fall_back(f"this process was to encode {part} samples and encoded {encoded}")
    elif processes == 1 and not trains_on_one_device(read) and len(devices_of(read)) > 1:
        seam.fall_back(
            f"samples are encoded on one device, not on {', '.join(devices_of(read))}: wanshim run --gpus starts a "
            "process for each"
        )
