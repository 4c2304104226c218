"""Records of cuDNN's engines that earlier runs kept, read without torch: `wanshim doctor` and `wanshim warm`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wanshim.core.shared import gpus
from wanshim.core.shared.files import NotOwn, engine_folder, read_file
from wanshim.select.decision import installed_version

CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")  # what torch's wheels bring
FRONTEND = "nvidia-cudnn-frontend"  # without it no engine is timed
SHOWN = 8  # sizes


@dataclass(frozen=True)
class KnownEngines:
    """Records for one GPU, driver and cuDNN.

    Args:
        strict, fast: how many convolutions are known for the operators.
        sizes: height and width of what these convolutions read, smallest first.
        usable: the GPU is in sight, and the cuDNN is the one installed here; None: that cannot be known.
    """

    gpu: str
    driver: int
    cudnn: str
    strict: int
    fast: int
    sizes: tuple[str, ...]
    dtypes: tuple[str, ...]
    usable: bool | None

    def __str__(self) -> str:
        sizes = ", ".join(self.sizes[:SHOWN]) + f" and {len(self.sizes) - SHOWN} more" * (len(self.sizes) > SHOWN)
        unusable = "; of no use here, where the GPU or cuDNN is another one" * (self.usable is False)
        return (
            f"cuDNN's engines are known on {self.gpu}, cuDNN {self.cudnn}, driver {self.driver}: "
            f"{self.strict} convolutions for strict operators, {self.fast} for fast ones, of {sizes} "
            f"in {' and '.join(self.dtypes)}{unusable}."
        )


def known_engines() -> tuple[KnownEngines, ...]:
    """One for each GPU, driver and cuDNN that something is kept for."""
    groups: dict[tuple[str, int, int], list[_Convolution]] = defaultdict(list)
    for key, convolution in _kept(engine_folder()):
        groups[key].append(convolution)
    return tuple(_summary(*key, groups[key]) for key in sorted(groups))


def unlearned(known: Sequence[KnownEngines]) -> tuple[str, ...]:
    """The GPUs in sight, by name, for which there is nothing among `known` and something could be learned."""
    if not has_frontend():
        return ()
    return tuple(sorted((gpus.names() or set()) - {each.gpu for each in known if each.usable is not False}))


def has_frontend() -> bool:
    return installed_version(FRONTEND) is not None


def without_frontend() -> tuple[str, ...]:
    """The GPUs in sight, by name, if what finds their engines is not installed."""
    return () if has_frontend() else tuple(sorted(gpus.names() or ()))


def _summary(gpu: str, driver: int, cudnn: int, convolutions: Sequence[_Convolution]) -> KnownEngines:
    strict = sum(each.strict for each in convolutions)
    names, installed, version = gpus.names(), installed_cudnn(), cudnn_text(cudnn)
    return KnownEngines(
        gpu=gpu,
        driver=driver,
        cudnn=version,
        strict=strict,
        fast=len(convolutions) - strict,
        sizes=tuple(f"{height}x{width}" for height, width in sorted({each.size for each in convolutions})),
        dtypes=tuple(sorted({each.dtype for each in convolutions})),
        usable=None if names is None or installed is None else gpu in names and version == installed,
    )


@dataclass(frozen=True)
class _Convolution:
    strict: bool
    size: tuple[int, int]
    dtype: str


def _kept(folder: Path | None) -> Iterator[tuple[tuple[str, int, int], _Convolution]]:
    """Each convolution kept, with its GPU, driver and cuDNN; a file that is damaged or another user's says nothing."""
    if folder is None or not folder.is_dir():
        return
    for name in sorted(path.name for path in folder.glob("*.json")):
        with suppress(OSError, NotOwn, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            facts = json.loads(read_file(folder, name))["facts"]
            _, height, width = map(int, facts["input"])
            dtype = str(facts["dtype"]).removeprefix("torch.")
            key = (str(facts["gpu"]), int(facts["driver"]), int(facts["cudnn"]))
            yield key, _Convolution("equal" in facts, (height, width), dtype)


def cudnn_text(version: int) -> str:
    """`9.10.2` of 91002; cuDNN 8 counted in thousands."""
    major, rest = divmod(version, 10_000 if version >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def installed_cudnn() -> str | None:
    """The version that torch's wheel brought; None where it came another way."""
    found = next(filter(None, map(installed_version, CUDNN)), None)
    return None if found is None else ".".join(found.split(".")[:3])
