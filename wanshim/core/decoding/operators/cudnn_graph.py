"""One convolution as a graph of cuDNN's frontend, whose engines can be listed, built by name, and run.

torch takes the engine that cuDNN's heuristics rank first. The frontend (`nvidia-cudnn-frontend`) lists them all, and
builds one again from its number and the values of its knobs.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from .convolution import Convolution

logger = logging.getLogger("wanshim.decoding")

_NOTES = ("NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION", "DOWN_CONVERT_INPUTS")  # engines that are not taken
_SLOW = 0  # the engine without tensor cores, which takes a second for a frame
_WORKSPACE = 64 << 20  # bytes that an engine may ask for
DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}


class FrontendMissing(Exception):
    """The frontend cannot be used in this process; the text says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine of cuDNN that computes a convolution: its number, and its knobs by name."""

    number: int
    knobs: Mapping[str, int]


class Frontend:
    """cuDNN's frontend on one device.

    Raises:
        FrontendMissing: it is not installed, too old, does not start, or brings another cuDNN than torch's.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            self._cudnn: Any = import_module("cudnn")
        except (ImportError, OSError) as error:
            raise FrontendMissing(f"nvidia-cudnn-frontend cannot be imported ({error})") from error
        graph = getattr(self._cudnn, "pygraph", None)
        if not hasattr(graph, "get_engine_and_knobs_at_index"):
            found = getattr(self._cudnn, "__version__", "an unknown version")
            raise FrontendMissing(f"nvidia-cudnn-frontend is {found}, and 1.26 is the first that names its engines")
        self.device = device
        try:
            self.backend = int(self._cudnn.backend_version())
            self.driver = _driver()
            with torch.cuda.device(device):
                self._handle = self._cudnn.create_handle()
        except Exception as error:  # its class differs by version of the frontend
            raise FrontendMissing(f"nvidia-cudnn-frontend does not start ({error})") from error
        if self.backend != torch.backends.cudnn.version():
            ours = torch.backends.cudnn.version()
            raise FrontendMissing(f"nvidia-cudnn-frontend brings cuDNN {self.backend}, and torch has {ours}")

    def facts(self) -> dict[str, str | int]:
        """The facts on which the fastest engine depends, apart from the convolution."""
        return {"gpu": torch.cuda.get_device_name(self.device), "driver": self.driver, "cudnn": self.backend}

    def milliseconds(self, work: Callable[[], object]) -> float:
        """The time that the device takes for `work`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def graph(self, conv: Convolution, x: torch.Tensor, out: torch.Tensor) -> ConvGraph:
        """The convolution of tensors laid out like these; they are not kept."""
        return ConvGraph(self._cudnn, self._handle, conv, x, out)


class ConvGraph:
    """A convolution of tensors of given sizes, without a bias."""

    def __init__(self, cudnn: Any, handle: Any, conv: Convolution, x: torch.Tensor, out: torch.Tensor) -> None:
        self._cudnn, self._handle = cudnn, handle
        graph = self._graph = cudnn.pygraph(
            io_data_type=getattr(cudnn.data_type, DTYPES[x.dtype]),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )
        self._x = graph.tensor(name="x", dim=list(x.shape), stride=_strides(x))
        self._weight = graph.tensor(name="weight", dim=list(conv.weight.shape), stride=_strides(conv.weight))
        self._out = graph.conv_fprop(
            image=self._x,
            weight=self._weight,
            padding=list(conv.padding),
            stride=list(conv.stride),
            dilation=[1] * len(conv.padding),
        )
        self._out.set_output(True).set_dim(list(out.shape)).set_stride(_strides(out))
        graph.validate()
        graph.build_operation_graph()

    def engines(self) -> Iterator[tuple[Engine, Run]]:
        """Every engine that cuDNN's heuristics propose and that can be built, the likeliest first."""
        modes = self._cudnn.heur_mode
        self._graph.create_execution_plans([modes.A, modes.B])
        notes = self._cudnn.numerical_note
        self._graph.deselect_numeric_notes([getattr(notes, name) for name in _NOTES])
        for index in range(self._graph.get_execution_plan_count()):
            try:
                number, knobs = self._graph.get_engine_and_knobs_at_index(index)
                run = None if number == _SLOW else self._build(index)
            except Exception as error:  # its class differs by version of the frontend
                logger.debug("engine %d cannot be built: %s", index, error)
                continue
            if run is not None:
                yield Engine(int(number), {knob.name: int(value) for knob, value in knobs.items()}), run

    def build(self, engine: Engine) -> Run | None:
        """The run of one engine; None where it cannot compute these sizes."""
        try:
            knobs = {getattr(self._cudnn.knob_type, name): value for name, value in engine.knobs.items()}
            self._graph.create_execution_plan(engine.number, knobs)
            return self._build(self._graph.get_execution_plan_count() - 1)
        except Exception as error:
            logger.debug("%s cannot be built: %s", engine, error)
            return None

    def _build(self, index: int) -> Run | None:
        self._graph.build_plan_at_index(index)
        workspace = self._graph.get_workspace_size_plan_at_index(index)
        return Run(self, index, workspace) if workspace <= _WORKSPACE else None

    def execute(self, index: int, workspace: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self._cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream(x.device).cuda_stream)
        pairs = ((self._x, x), (self._weight, weight), (self._out, out))
        room = torch.empty(max(workspace, 1), dtype=torch.uint8, device=x.device)
        tensors = {key: each.as_strided(each.shape, _strides(each)) for key, each in pairs}
        self._graph.execute_plan_at_index(tensors, room, index, handle=self._handle)


def _driver() -> int:
    """The version of CUDA that the driver has, 13000 for 13.0."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _strides(x: torch.Tensor) -> list[int]:
    """The strides of `x`; that of a batch of one, which says nothing, as if no other followed it."""
    strides = list(x.stride())
    if x.shape[0] == 1:  # of a part of a video it is the whole video's, and some engines then count as unfit
        strides[0] = max(size * stride for size, stride in zip(x.shape[1:], strides[1:]))
    return strides


@dataclass(frozen=True, slots=True)
class Run:
    """A built engine of a graph."""

    graph: ConvGraph
    index: int
    workspace: int

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Convolve `x` with `weight` into `out`, on the current stream; all laid out as the graph's."""
        self.graph.execute(self.index, self.workspace, x, weight, out)
