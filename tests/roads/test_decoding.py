"""Roads of decoding and generation on the CPU, ranks over gloo: some in `make slow`, all in `make matrix`."""

from __future__ import annotations

import pytest

from .roads import DECODING, GENERATION, Road, on_cpu
from .traveller import Traveller


@pytest.mark.timeout(600)
@pytest.mark.parametrize("road", on_cpu((*DECODING, *GENERATION)))
def test_road_ends_with_the_result_of_the_script_alone(road: Road, traveller: Traveller) -> None:
    traveller.run(road)
