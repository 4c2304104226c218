"""`parallelize_decode` and `parallelize_encode`: put the parallel call into a VAE, and take it out again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from wanshim.core.decoding.model.binding import Binding, find_binding
from wanshim.core.decoding.plan import TileSettings
from wanshim.core.decoding.ranks.output import OnChunk, OutputSpec, check_receivers, read_receivers
from wanshim.core.shared.copies import detached_copy, set_copier
from wanshim.core.shared.recent import Recent
from wanshim.errors import ModelInvalid
from wanshim.undo import Undo

from .call import ParallelVae, VaeOptions, with_frames
from .plan import VaePlan
from .planner import check_mode

logger = logging.getLogger("wanshim.decoding")


class VaeHandle:
    """A VAE whose decode or encode runs on all ranks. `remove()` puts the original back and is idempotent.

    Copies of the VAE by `copy.deepcopy`, pickle or `torch.save` are plain.
    """

    def __init__(self, binding: Binding, parallel: ParallelVae, raise_failures: bool = False) -> None:
        self.binding = binding
        self.parallel = parallel
        self._reasons: Recent[str, None] = Recent(64)
        self._undo, attached = Undo(), Undo()
        self._undo.add(parallel.release)
        self._undo.add(attached.remove)
        attached.set(binding.target, {_mark(binding): self})
        if isinstance(binding.target, torch.nn.Module):
            set_copier(binding.target, lambda vae, memo: detached_copy(vae, memo, [attached], [vae]), attached)
        for name, compute in binding.methods.items():
            original = getattr(binding.target, name)
            call = parallel.in_place_of(original, compute, binding.target, self._leave, lambda: raise_failures)
            attached.set(binding.target, {name: call}, keep_foreign=True)
        output = parallel.options.output
        if output.ranks is not None or output.on_chunk is not None:
            for entry in [binding.entry] if binding.entry else binding.methods:
                whole = _none_for_no_frames(getattr(binding.target, entry))
                attached.set(binding.target, {entry: whole}, keep_foreign=True)

    def __repr__(self) -> str:
        graph, mode = self.binding.graph, self.parallel.options.mode
        return f"{type(self).__name__}: {graph.verb} of {graph.name}, mode {mode}; {self.plan}"

    def _leave(self, reason: str) -> None:
        """Say each reason once."""
        if reason not in self._reasons:
            self._reasons[reason] = None
            verb = self.binding.graph.verb
            logger.warning("parallelize_%s: the %s is left to the framework: %s", verb, verb, reason)

    @property
    def plan(self) -> VaePlan:
        """The plan of the last call; before the first one, the modes that will be tried (`tries`)."""
        return self.parallel.plan or self.parallel.untried()

    def wait_for_kernels(self, shape: Sequence[int] | None = None) -> None:
        """Wait until no call is left to the framework because kernels are being compiled, once on a machine.

        Args:
            shape: of the latent, or of the video; None: 480x832, 720x1280, and sizes of which there was a call.
        """
        self.parallel.operators.wait_for_kernels(shape)

    def remove(self) -> None:
        """Put the original method back, by identity, and weights and connections as they were found."""
        self._undo.remove()


def parallelize_decode(
    vae: Any,
    group: Any = None,
    mode: str = "auto",
    output: str | int | Sequence[int] = "all",
    *,
    strict: bool = True,
    engines: bool = True,
    axis: str = "auto",
    chunk: int | None = None,
    uint8: bool = False,
    on_chunk: OnChunk | None = None,
    deadline: float = 120.0,
    raise_failures: bool = False,
    tiles: TileSettings | None = None,
    binding: Binding | None = None,
) -> VaeHandle:
    """Let all ranks of `group` share every decode of `vae`; its decode method is called as before, on every rank.

    Args:
        vae: a Wan VAE of diffusers, DiffSynth, FastVideo or vLLM-Omni, or one made from it, as Qwen-Image's is.
        group: a torch.distributed group; None: all ranks, or this process alone where there is no torch.distributed.
        mode: temporal (the framework's bits when strict), spatial (within 1e-5 in fp32), tile (approximate, as
            diffusers' tiling), or auto, which takes the fastest exact one that fits in memory.
        output: who gets frames: "all", one rank (0 or "rank0") or several; counted within the group. On the others the
            decode returns None in place of frames (`.sample` is None, or the tuple's first entry), as torch's `gather`
            does: a pipeline that goes on with the frames on every rank needs "all".
        strict: compute exactly as the framework does. False: the fast operators, within the tolerance that
            `operators/base.py` states.
        engines: time cuDNN's engines once on this GPU, where its frontend is installed, and take the fastest; False:
            those that torch takes.
        axis: what spatial mode splits: auto (the longer), height or width.
        chunk: latent frames per step of the fast operators; None: by memory.
        uint8: frames as uint8 instead of the model's dtype.
        on_chunk: called with (frames, index of the first) in order on every receiving rank; decode then returns None
            in place of frames. A slow callback slows the decode.
        deadline: seconds in which a failing decode ends on every rank.
        raise_failures: raise what makes a decode fail. False: the framework computes it on every rank, with a warning,
            unless a callback has frames already.
        tiles: tile sizes for mode tile; None: those of the VAE.
        binding: how to decode with a VAE that no registered builder knows.

    Raises:
        ModelInvalid: the VAE or the mode is unknown, the VAE is parallelized already, or `output` names no rank of the
            group.
        SettingInvalid: `deadline` cannot be waited.
    """
    options = VaeOptions(
        mode=mode,
        axis=axis,
        strict=strict,
        engines=engines,
        chunk=chunk,
        deadline=deadline,
        tiles=tiles if tiles is not None else TileSettings(),
        output=OutputSpec(ranks=read_receivers(output), uint8=uint8, on_chunk=on_chunk),
    )
    return _parallelize(vae, "decode", binding, group, options, raise_failures)


def parallelize_encode(
    vae: Any,
    group: Any = None,
    mode: str = "auto",
    *,
    strict: bool = True,
    engines: bool = True,
    axis: str = "auto",
    chunk: int | None = None,
    deadline: float = 120.0,
    raise_failures: bool = False,
    binding: Binding | None = None,
) -> VaeHandle:
    """Let all ranks of `group` share every encode of `vae`; its encode method is called as before, on every rank.

    Every rank passes the same video and gets the whole latent. Arguments not named here are `parallelize_decode`'s.

    Args:
        mode: temporal (the framework's bits when strict), spatial (within 1e-5 in fp32; for single images and for
            memory), or auto, which takes the fastest exact one that fits in memory.
        raise_failures: raise what makes an encode fail. False: the framework computes it on every rank, with a warning.
        binding: how to encode with a VAE that no registered builder knows.

    Raises:
        ModelInvalid: the VAE or the mode is unknown, or the VAE is parallelized already.
        SettingInvalid: `deadline` cannot be waited.
    """
    options = VaeOptions(mode=mode, axis=axis, strict=strict, engines=engines, chunk=chunk, deadline=deadline)
    return _parallelize(vae, "encode", binding, group, options, raise_failures)


def _parallelize(
    vae: Any, verb: str, binding: Binding | None, group: Any, options: VaeOptions, raise_failures: bool
) -> VaeHandle:
    binding = binding if binding is not None else find_binding(vae, verb)
    if _mark(binding) in binding.target.__dict__:
        raise ModelInvalid(
            f"this {binding.graph.name} is parallelized already",
            expected=f"one parallel {verb} per VAE",
            hint="Call remove() on its handle first",
        )
    check_mode(binding.graph, options.mode, options.axis)
    if dist.is_available() and dist.is_initialized():
        check_receivers(options.output.ranks, dist.get_world_size(group))
    return VaeHandle(binding, ParallelVae(binding.graph, group, options), raise_failures)


def _mark(binding: Binding) -> str:
    return f"_wanshim_{binding.graph.verb}"


def _none_for_no_frames(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return None instead of an empty tensor on ranks that receive no frames."""

    def decode(*args: Any, **kwargs: Any) -> Any:
        return with_frames(method(*args, **kwargs), lambda frames: frames if frames.numel() else None)

    return decode
