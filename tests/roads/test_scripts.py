"""Roads with what users' scripts and machines have, on the CPU: some in `make slow`, all in `make matrix`."""

from __future__ import annotations

import pytest

from .roads import AS_THEY_ARE, Road, on_cpu
from .traveller import Traveller


@pytest.mark.timeout(600)
@pytest.mark.parametrize("road", on_cpu(AS_THEY_ARE))
def test_road_ends_with_the_result_of_the_script_alone(road: Road, traveller: Traveller) -> None:
    traveller.run(road)
