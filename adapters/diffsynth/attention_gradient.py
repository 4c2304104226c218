"""`diffsynth.attention_gradient`: training gets its gradients through attention, whatever kernel is installed.

DiffSynth computes attention by the first kernel that it finds installed, in training as in generation. SageAttention
has no backward, and neither have some builds of other kernels: their output is cut from the graph, so queries, keys
and values train nothing, and nothing says so. Here a kernel that hands no gradient to all three of them computes where
none is wanted; where one is, DiffSynth's own call of torch's attention computes. Generation keeps its kernel.

A kernel is known by what it does: a tiny attention, forward and backward, once a dtype and device.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam, SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    Attention = Callable[..., torch.Tensor]

WAN = "diffsynth.models.wan_video_dit:flash_attention"
CORE = "diffsynth.core.attention.attention:attention_forward"
OF_TORCH = "compatibility_mode"  # the parameter by which both functions call torch's attention
PATIENCE_S = 60.0
# The names that DiffSynth's own settings have for the kernels whose flags are called otherwise.
KERNELS = {f"flash_attn_{number}": f"flash_attention_{number}" for number in (2, 3, 4)} | {
    "sage_attn": "sage_attention"
}


def torch_computes(attention: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's attention computes in place of an installed kernel, where a gradient is wanted.

    Args:
        attention: the function, by module and name.
    """
    from pkgutil import resolve_name  # needed by few: not at activation

    gives_gradient = getattr(resolve_name(attention), "gives_gradient", None)
    return gives_gradient is not None and not gives_gradient(dtype, device)


def kernel_of(attention: str) -> str:
    """The kernel that an attention function of DiffSynth takes: the first one that its module found installed, or the
    one that its environment names; "torch": torch's own."""
    names = vars(import_module(attention.partition(":")[0]))
    installed = (name for name, value in names.items() if name.endswith("_AVAILABLE") and value is True)
    first = next((name.removesuffix("_AVAILABLE").lower() for name in installed), "torch")
    return str(names.get("ATTENTION_IMPLEMENTATION", KERNELS.get(first, first)))


@contextmanager
def attending_by_torch(attention: str) -> Iterator[None]:
    """The function calls torch's attention, whatever kernel is installed."""
    module = import_module(attention.partition(":")[0])
    with Undo() as undo:
        if hasattr(module, "ATTENTION_IMPLEMENTATION"):
            undo.set(module, {"ATTENTION_IMPLEMENTATION": "torch"})
        else:
            undo.set(module, {name: False for name in vars(module) if name.endswith("_AVAILABLE")})
        yield


def _with_gradient(sizes: tuple[int, ...], heads: tuple[int, ...]) -> Callable[[Attention, SeamState], Attention]:
    """The seam of an attention function.

    Args:
        sizes: of queries, keys and values of a tiny attention, in the function's usual layout.
        heads: the function's arguments behind these three.
    """

    def replace(original: Attention, seam: SeamState) -> Attention:
        place = [*inspect.signature(original).parameters].index(OF_TORCH) - 3

        @cache
        def note() -> None:
            seam.notes.append(
                f"no gradient passes through {kernel_of(seam.seam.target)}: torch's attention computes where a "
                "gradient is wanted; generation keeps the kernel"
            )

        @cache
        def gives_gradient(dtype: torch.dtype, device: torch.device) -> bool:
            gives = _probed(lambda *qkv: original(*qkv, *heads), sizes, dtype, device)
            if not gives:
                note()
            return gives

        def gives_gradient_in_graph(dtype: torch.dtype, device: torch.device) -> bool:
            return gives_gradient(dtype, device)

        # evaluated while torch.compile traces, and a constant of the graph
        gives_gradient_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            import torch

            compiling = torch.compiler.is_compiling()
            if torch.is_grad_enabled():
                wanted = q.requires_grad or k.requires_grad or v.requires_grad
            else:
                wanted = not compiling and _will_be_recomputed()
            if seam.off or not wanted or kwargs.get(OF_TORCH) or any(args[place : place + 1]):
                return original(q, k, v, *args, **kwargs)
            gives = gives_gradient_in_graph if compiling else gives_gradient
            if not q.is_meta:  # on shapes alone no kernel runs, and nothing is trained
                if gives(q.dtype, q.device):
                    result = original(q, k, v, *args, **kwargs)
                    if result.requires_grad or not torch.is_grad_enabled():
                        return result
                    if not compiling:
                        note()
                seam.enter_graph()
            if len(args) > place:
                return original(q, k, v, *args[:place], True, *args[place + 1 :], **kwargs)
            return original(q, k, v, *args, **{**kwargs, OF_TORCH: True})

        attention.gives_gradient = gives_gradient  # type: ignore[attr-defined]
        return attention

    return replace


def _will_be_recomputed() -> bool:
    """Whether this runs, without gradients, in the forward of an autograd function whose inputs want one: so does the
    block of a reentrant checkpoint, torch's or DeepSpeed's, that backward computes again with gradients."""
    from torch.autograd.function import FunctionCtx

    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_varnames[:1] == ("ctx",):
            context = frame.f_locals["ctx"]
            if isinstance(context, FunctionCtx) and any(getattr(context, "needs_input_grad", ())):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _probed(attention: Attention, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `attention` hands a gradient to queries, keys and values; True if it does not run at all, or cannot be
    tried here.

    It runs in a thread of its own, where no checkpoint counts what is saved for backward, and no mode or autocast of
    the caller is on.
    """
    import torch

    if torch._C._current_graph_task_id() != -1:  # in a backward, whose device thread could not serve another one
        return True
    found = [True]

    def probe() -> None:
        import math

        count = math.prod(sizes)
        with suppress(Exception), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            waves = [torch.arange(count, device=device).add(shift).sin().to(dtype).view(sizes) for shift in (0, 1, 2)]
            inputs = [wave.requires_grad_() for wave in waves]
            output = attention(*inputs)  # of what it raises, or a lack of memory, the caller's own call says why
            try:
                gradients = torch.autograd.grad(output.sum(), inputs, allow_unused=True)
            except Exception:  # the output is cut from the graph, or nobody wrote a backward
                found[0] = False
            else:
                found[0] = all(gradient is not None for gradient in gradients)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return found[0]


FEATURE = Feature(
    name="diffsynth.attention_gradient",
    summary="training gets its gradients through attention, whatever kernel is installed",
    auto=True,
    seams=tuple(
        Seam(
            target,
            _with_gradient(sizes, heads),
            in_graph=True,
            required=target == WAN,
            why="trains through a kernel that has no backward: queries, keys and values get no gradient, silently",
            upstream="https://github.com/thu-ml/SageAttention/issues/90, https://github.com/kohya-ss/musubi-tuner/issues/2",
            remove_when="DiffSynth takes such a kernel for generation alone",
        )
        for target, sizes, heads in ((WAN, (1, 16, 128), (2,)), (CORE, (1, 2, 16, 64), ()))
    ),
)
