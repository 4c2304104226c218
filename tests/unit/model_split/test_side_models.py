"""Guests of a split model: who leaves the first device, where to, and what their callers notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wanshim.core.model_split import side_models
from wanshim.core.model_split.side_models import HOST, choose_devices, move_side_model, moved_to

GUESTS = {"vae": 2, "text": 10}
ROOMY = {"a": 14, "b": 14}


@pytest.mark.parametrize(
    ("available", "calling", "expected"),
    [
        ({}, 14, {}),  # no limit known
        ({"a": 26, "b": 15}, 14, {}),
        ({"a": 25, "b": 24}, 14, {"text": "b"}),
        ({"a": 25, "b": 23}, 14, {"text": HOST}),
        ({"a": 25}, 14, {"text": "b"}),  # without a limit there is room
        ({"a": 15, "b": 24}, 5, {"text": "b", "vae": HOST}),
        ({"a": 15, "b": 15}, 14, {}),  # not even for a call: the refusal says so with numbers
        ({"a": 15, "b": 14}, 5, {"text": HOST, "vae": HOST}),
    ],
)
def test_side_models_leave_largest_first_until_the_rest_fits(
    available: dict[str, int], calling: int, expected: dict[str, str]
) -> None:
    assert choose_devices(GUESTS, ROOMY, available, "a", calling) == expected


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)
        self.places: list[torch.Tensor] = []

    def encode(self, x: list[torch.Tensor], device: Any = None) -> dict[str, Any]:
        self.places.append(self.linear.weight.data)
        return {"given": device, "out": (self.linear(x[0]), "text")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode([x])["out"][0]


def test_side_model_of_the_host_comes_for_each_call_and_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host stands for the card: what comes is a copy of its own."""
    made, x = Encoder(), torch.randn(2, 4)
    expected = made(x)
    move_side_model(made, HOST, "cpu", ("forward", "encode", "decode"))
    at_rest = made.linear.weight.data.data_ptr()
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self.clone())
    assert torch.equal(made(x), expected)
    assert torch.equal(made.encode([x], device="cpu")["out"][0], expected)
    assert len(made.places) == 2 + 1  # the one of before too
    assert all(place.data_ptr() != at_rest for place in made.places[1:])
    assert made.linear.weight.data.data_ptr() == at_rest
    assert moved_to(made) == HOST


def test_side_model_goes_back_when_its_call_fails() -> None:
    made = Encoder()
    move_side_model(made, HOST, "cpu", ("encode",))
    at_rest = made.linear.weight.data
    with pytest.raises(TypeError):
        made.encode(None)
    assert made.linear.weight.data.data_ptr() == at_rest.data_ptr()


def test_side_model_elsewhere_gets_tensors_and_devices_brought_and_stays() -> None:
    """On the meta device, the only other one that every machine has; from there nothing comes back."""
    model = Encoder()
    seen: list[Any] = []
    model.encode = lambda x, device=None: seen.extend([x[0].device, device])
    move_side_model(model, "meta", "cpu", ("encode",))
    model.encode([torch.randn(2, 4)], device="cpu")
    model.encode([torch.randn(2, 4)], torch.device("cpu"))
    assert {str(place) for place in seen} == {"meta"}
    assert "_apply" in vars(model)  # pinned
    assert side_models.moved_to(model) == "meta"
