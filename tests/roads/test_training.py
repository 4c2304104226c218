"""Roads of training on the CPU, ranks over gloo: some in `make slow`, all in `make matrix`."""

from __future__ import annotations

import pytest

from .roads import ONE_GPU, REFUSED, SEVERAL_GPUS, TRAINING, Road, on_cpu
from .traveller import Traveller


@pytest.mark.timeout(600)
@pytest.mark.parametrize("road", on_cpu((*TRAINING, *ONE_GPU, *SEVERAL_GPUS, *REFUSED)))
def test_road_ends_with_the_result_of_the_script_alone(road: Road, traveller: Traveller) -> None:
    traveller.run(road)
