"""What counts as no frontend. The real one needs a GPU (tests/gpu has it), so here are modules of its name."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from wanshim.core.decoding.operators.cudnn_graph import Frontend, FrontendMissing


def broken() -> int:
    raise RuntimeError("libcudnn is not here")


GRAPH = SimpleNamespace(get_engine_and_knobs_at_index=None)
MODULES = {
    "cannot be imported": None,
    "1.18.0, and 1.26 is the first": SimpleNamespace(__version__="1.18.0", pygraph=object),
    "an unknown version": SimpleNamespace(),
    "does not start (libcudnn is not here)": SimpleNamespace(pygraph=GRAPH, backend_version=broken),
}


@pytest.mark.parametrize("reason", MODULES)
def test_frontend_that_cannot_serve_is_reported_as_missing(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", MODULES[reason])
    with pytest.raises(FrontendMissing) as found:
        Frontend(torch.device("cuda", 0))
    assert reason in str(found.value)
