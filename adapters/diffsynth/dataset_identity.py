"""The identity of a dataset of DiffSynth, found without reading a sample: its rows, what loads them, and its files as
the file system describes them. What loads them must be DiffSynth's own, which draws nothing at random."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wanshim.adapters.diffsynth.encode_cache import version
from wanshim.core.encoding.contents import content
from wanshim.core.encoding.identity import class_code, code_identity
from wanshim.core.shared.fallback import Fallback

KNOWN = "diffsynth.core.data.unified_dataset.UnifiedDataset"
ROWS = {"data", "cached_data"}


def dataset_identity(dataset: Any) -> list[Any]:
    """The identity as JSON; it is another one if a sample may be another one.

    Raises:
        Fallback: nothing tells, short of reading the samples.
    """
    cls = type(dataset)
    if f"{cls.__module__}.{cls.__qualname__}" != KNOWN:
        raise Fallback(f"{cls.__qualname__} is not DiffSynth's UnifiedDataset")
    loading = {name: value for name, value in vars(dataset).items() if name not in ROWS}
    return [class_code(cls), _described(loading), content(dataset.data), list(_files(dataset))]


def _described(value: Any) -> Any:
    """A part of what loads samples, as JSON."""
    if isinstance(value, type):
        return f"type {value.__module__}.{value.__qualname__}"
    if type(value) in (list, tuple):
        return [_described(item) for item in value]
    if type(value) is dict:
        return [[_described(key), _described(item)] for key, item in value.items()]
    if not callable(value):
        return content(value)
    is_function = isinstance(value, types.FunctionType)
    if not (value if is_function else type(value)).__module__.startswith("diffsynth."):
        return _installed(value)
    return code_identity(value) if is_function else [class_code(type(value)), _described(vars(value))]


def _installed(function: Any) -> str:
    """A function of an installed package, such as what reads a sound, by name and version.

    Raises:
        Fallback: it is another one.
    """
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    package = module.partition(".")[0]
    if getattr(sys.modules.get(module), name, None) is function and (installed := version(package)):
        return f"{module}.{name} {installed}"
    named = name or type(function).__qualname__
    raise Fallback(f"the dataset loads samples by {named}, which is neither DiffSynth's nor an installed package's")


def _files(dataset: Any) -> Iterator[list[Any]]:
    """Path, size, times and inode of every file that a row names; they count as names alone. The time of the content is
    what an archive or a copy says, so another file of its size may have it, but not the time of the change too.

    Raises:
        Fallback: a row names what is no file here.
    """
    keys = [key for key in dataset.data_file_keys if any(key in row for row in dataset.data)]
    for key in keys:
        folders = set(_folders(dataset.special_operator_map.get(key, dataset.main_data_operator))) or {""}
        for name in dict.fromkeys(name for row in dataset.data for name in _names(row.get(key))):
            paths = [Path(folder, name).absolute() for folder in sorted(folders)]
            found = [(path, path.stat()) for path in paths if path.is_file()]
            if not found:
                raise Fallback(f"a sample's {key} is no file here: {name}")
            for path, at in found:
                yield [str(path), at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino]


def _folders(operator: Any) -> Iterator[str]:
    """The folders that paths of rows are relative to."""
    if type(operator) in (list, tuple):
        for item in operator:
            yield from _folders(item)
    elif type(operator).__name__ == "ToAbsolutePath":
        yield operator.base_path
    elif not isinstance(operator, type) and type(operator).__module__.startswith("diffsynth."):
        yield from _folders(list(vars(operator).values()))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif type(value) in (list, tuple, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _names(item)
