"""The roads on GPUs, as many as there are: what a user types, with no device named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.roads.roads import ROADS, Road
from tests.roads.traveller import Traveller


@pytest.fixture(scope="session")
def traveller(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Traveller]:
    """What one GPU can run is started at once, four commands side by side; the rest has all GPUs for itself."""
    roads = [
        item.callspec.params["road"] for item in request.session.items if "road" in getattr(item, "fixturenames", ())
    ]
    with closing(Traveller(tmp_path_factory.mktemp("roads"), on_cpu=False, at_once=4)) as found:
        found.start(road for road in roads if road.gpus == 1)
        yield found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("road", [pytest.param(road, marks=pytest.mark.gpu(road.gpus), id=road.name) for road in ROADS])
def test_road_ends_with_the_result_of_the_script_alone(road: Road, traveller: Traveller) -> None:
    traveller.run(road)
