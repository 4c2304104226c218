from __future__ import annotations

import pytest
import torch
from torch import nn

from wanshim.core.encoding import visiting_layers

CPU = torch.device("cpu")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(16)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.shared(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def test_visiting_layers_widened_from_bf16_equal_the_whole_model() -> None:
    torch.manual_seed(0)
    stored = Encoder().bfloat16().eval()
    whole = Encoder().eval()
    whole.load_state_dict(stored.state_dict())
    ids = torch.randint(0, 50, (1, 7))
    with (
        torch.no_grad(),
        visiting_layers(stored, stored.blocks, device=CPU, dtype=torch.float32, lookups=[stored.shared]),
    ):
        visited = stored(ids)
    with torch.no_grad():
        assert torch.equal(visited, whole(ids))


def test_visiting_layers_are_there_one_at_a_time() -> None:
    model = Encoder().bfloat16().eval()
    wide: list[list[int]] = []

    def note(module: nn.Module, args: object) -> None:
        wide.append([i for i, b in enumerate(model.blocks) if b.linear1.weight.dtype == torch.float32])

    for block in model.blocks:
        block.linear2.register_forward_pre_hook(note)
    with (
        torch.no_grad(),
        visiting_layers(model, model.blocks, device=CPU, dtype=torch.float32, lookups=[model.shared]),
    ):
        model(torch.zeros(1, 2, dtype=torch.int64))
    assert wide == [[0], [1], [2]]


@pytest.mark.parametrize("fails", [False, True])
def test_visiting_layers_leave_the_model_as_it_was(fails: bool) -> None:
    model = Encoder().bfloat16().eval()
    before = {name: (p, p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    if fails:
        model.blocks[1].linear2.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        with (
            torch.no_grad(),
            visiting_layers(model, model.blocks, device=CPU, dtype=torch.float32, lookups=[model.shared]),
        ):
            model(torch.zeros(1, 2, dtype=torch.int64))
    except ZeroDivisionError:
        assert fails
    after = {name: (p, p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    assert all(before[name][0] is after[name][0] and before[name][1:] == after[name][1:] for name in before)
    assert not model.shared._forward_hooks
    assert not model.blocks[0]._forward_pre_hooks
