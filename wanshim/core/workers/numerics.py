"""The settings of torch that change the bits of a forward, carried from one process to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

import torch

Getter: TypeAlias = Callable[[], Any]
Setter: TypeAlias = Callable[[Any], Any]


def _precision(get: Getter, put: Setter, *backends: Any) -> tuple[Getter, Setter]:
    """The precision of fp32 products. torch has two switches for it, and the older one cannot be read once the newer
    one was used."""

    def read_either() -> Any:
        try:
            return get()
        except RuntimeError:
            return tuple(backend.fp32_precision for backend in backends)

    def put_either(value: Any) -> None:
        if not isinstance(value, tuple):
            put(value)
            return
        for backend, precision in zip(backends, value, strict=True):
            backend.fp32_precision = precision

    return read_either, put_either


def _where_there(*switches: tuple[str, str, str]) -> Iterator[tuple[str, Getter, Setter]]:
    """Switches of torch by the names of their two functions, where this release has them."""
    for name, get, put in switches:
        if hasattr(torch._C, get) and hasattr(torch._C, put):
            yield name, getattr(torch._C, get), getattr(torch._C, put)


def _keeps_denormals() -> bool:
    """torch has no function that says it."""
    return bool(torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1)


# Name, how it is read, how it is set.
_GLOBALS: tuple[tuple[str, Getter, Setter], ...] = (
    ("threads", torch.get_num_threads, torch.set_num_threads),
    ("denormals", _keeps_denormals, lambda keep: torch.set_flush_denormal(not keep)),
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    (
        "matmul precision",
        *_precision(
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            torch.backends.cuda.matmul,
            torch.backends.mkldnn.matmul,
        ),
    ),
    (
        "cudnn tf32",
        *_precision(
            torch._C._get_cudnn_allow_tf32,
            torch._C._set_cudnn_allow_tf32,
            torch.backends.cudnn.conv,
            torch.backends.cudnn.rnn,
        ),
    ),
    ("cudnn", torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    ("cudnn benchmark", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    ("cudnn deterministic", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    ("flash attention", torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (
        "efficient attention",
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    ("math attention", torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    ("cudnn attention", torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (
        "deterministic",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
    (
        "bf16 sums",
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", value),
    ),
    (
        "fp16 sums",
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", value),
    ),
    *_where_there(
        ("fp16 accumulation", "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
        (
            "half sums of attention",
            "_get_math_sdp_allow_fp16_bf16_reduction",
            "_set_math_sdp_allow_fp16_bf16_reduction",
        ),
        ("flash attention 3", "_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
        ("flash attention 4", "_get_fa4_sdp_enabled", "_set_sdp_use_fa4"),
        ("own attention", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
        ("order of attentions", "_get_sdp_priority_order", "_set_sdp_priority_order"),
        ("mkldnn", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ),
    (
        "blas",
        lambda: int(torch._C._get_blas_preferred_backend()),
        lambda value: torch._C._set_blas_preferred_backend(torch._C._BlasBackend(value)),
    ),
)


def read(device: torch.device) -> dict[str, Any]:
    """The settings that hold in this thread now."""
    found = {name: get() for name, get, _ in _GLOBALS}
    found["inference"] = torch.is_inference_mode_enabled()
    kinds = {"cpu", device.type}
    found["autocast"] = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    return found


def apply(wanted: dict[str, Any]) -> AbstractContextManager[Any]:
    """Set it in this process; the context is that of the forward, without gradients."""
    for name, get, put in _GLOBALS:
        if get() != wanted[name]:
            put(wanted[name])
    stack = ExitStack()
    stack.enter_context(torch.inference_mode() if wanted["inference"] else torch.no_grad())
    for kind, (enabled, dtype) in wanted["autocast"].items():
        if enabled:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
    return stack
