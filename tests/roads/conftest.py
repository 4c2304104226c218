"""One traveller a worker: what roads of a file are compared with is run once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from .traveller import Traveller


@pytest.fixture(scope="session")
def traveller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traveller]:
    with closing(Traveller(tmp_path_factory.mktemp("roads"), on_cpu=True)) as roads:
        yield roads
