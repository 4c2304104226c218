"""The roads on the CPU, ranks over gloo: a few in `make test`, all in `make slow`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from .roads import ROADS, Road
from .traveller import Traveller


@pytest.fixture(scope="session")
def traveller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traveller]:
    with closing(Traveller(tmp_path_factory.mktemp("roads"), on_cpu=True)) as roads:
        yield roads


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "road",
    [pytest.param(road, marks=() if road.quick else pytest.mark.slow, id=road.name) for road in ROADS if road.on_cpu],
)
def test_road_ends_with_the_result_of_the_script_alone(road: Road, traveller: Traveller) -> None:
    traveller.run(road)
