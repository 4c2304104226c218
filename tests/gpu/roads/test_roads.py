"""The roads on GPUs, as many as there are: what a user types, with no device named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from tests.roads.roads import ROADS, Road
from tests.roads.traveller import Traveller


@pytest.fixture(scope="session")
def traveller(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Traveller]:
    """All that these GPUs can run is started at once, many commands side by side: the models are small."""
    roads = [
        item.callspec.params["road"] for item in request.session.items if "road" in getattr(item, "fixturenames", ())
    ]
    at_once = max(5, 2 * torch.cuda.device_count())
    with closing(Traveller(tmp_path_factory.mktemp("roads"), on_cpu=False, at_once=at_once)) as found:
        found.start(road for road in roads if road.gpus <= torch.cuda.device_count())
        yield found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("road", [pytest.param(road, marks=pytest.mark.gpu(road.gpus), id=road.name) for road in ROADS])
def test_road_ends_with_the_result_of_the_script_alone(road: Road, traveller: Traveller) -> None:
    traveller.run(road)
