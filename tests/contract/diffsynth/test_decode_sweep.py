"""`diffsynth.vae_decode` in every mode, shape and number of ranks; a file of its own, which runs beside the others."""

from __future__ import annotations

from tests.contract.decoding import check_shared, on_several_ranks, sweep
from tests.contract.diffsynth.decode_subject import SUBJECT
from tests.contract.diffsynth.prepared import Fork


@on_several_ranks
def test_decode_in_every_mode_on_several_ranks_holds_its_promise(size: int) -> None:
    check_shared(SUBJECT, sweep(size), size, seconds=880, start=Fork)
