from __future__ import annotations

from contextlib import nullcontext

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


class Device:
    """A GPU that this machine lacks: what is copied to it lies in host memory, and is known by its address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = torch.device("cuda", 1)
        self._there: dict[int, torch.Tensor] = {}  # holds them, so that no other tensor gets the same address
        to, cpu = torch.Tensor.to, torch.Tensor.cpu

        def copy(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
            copied = to(tensor, dtype or tensor.dtype, copy=True)
            if device == self.device:
                self._there[copied.data_ptr()] = copied
            return copied

        monkeypatch.setattr(torch.Tensor, "to", copy)
        monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: cpu(tensor).clone())

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._there


def test_visiting_layers_compute_on_the_device_and_lookups_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = Encoder().bfloat16().eval(), Device(monkeypatch)
    inputs: dict[str, bool] = {}
    weights: dict[str, set[str]] = {}

    def note(name: str, module: nn.Module, x: torch.Tensor) -> None:
        inputs[name] = gpu.has(x)
        weights[name] = {name for name, p in model.named_parameters() if gpu.has(p)}

    visiting = visiting_layers(
        model, iter(model.blocks), device=gpu.device, dtype=torch.float32, lookups=iter([model.shared])
    )
    with torch.no_grad(), visiting:
        for name in ("shared", "blocks.0", "blocks.1", "blocks.2", "norm"):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda module, args, name=name: note(name, module, args[0]))
        model.shared.register_forward_hook(lambda module, args, output: inputs.update(looked_up=gpu.has(output)))
        assert gpu.has(model.scale)
        model(torch.zeros(1, 2, dtype=torch.int64).to(gpu.device))
    assert not inputs["shared"]  # its weight is on the host
    assert inputs["looked_up"]
    norm = {"norm.weight", "norm.bias"}
    assert weights["shared"] == weights["norm"] == norm
    for i, block in enumerate(model.blocks):
        assert weights[f"blocks.{i}"] == norm | {f"blocks.{i}.{name}" for name, _ in block.named_parameters()}


def test_visiting_layers_leave_whole_numbers_as_they_are() -> None:
    model = Encoder().bfloat16().eval()
    model.register_buffer("positions", torch.tensor([2**24 + 1]))
    with visiting_layers(model, model.blocks, device=CPU, dtype=torch.float32):
        assert (model.positions.dtype, model.positions.item()) == (torch.int64, 2**24 + 1)


def wide(model: Encoder) -> list[str]:
    return [name for name, p in model.named_parameters() if p.dtype == torch.float32]


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_visiting_layers_leave_the_model_as_it_was(error: type[BaseException] | None) -> None:
    model = Encoder().bfloat16().eval()
    before = {name: (p, p.data_ptr(), p.dtype) for name, p in model.named_parameters()}

    def fail(*args: object) -> None:
        if error is not None:
            raise error

    failing = model.blocks[1].linear2.register_forward_pre_hook(fail)
    with (
        pytest.raises(error) if error is not None else nullcontext(),
        torch.no_grad(),
        visiting_layers(model, model.blocks, device=CPU, dtype=torch.float32, lookups=[model.shared]),
    ):
        model(torch.zeros(1, 2, dtype=torch.int64))
    failing.remove()
    after = {name: (p, p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    assert all(before[name][0] is after[name][0] and before[name][1:] == after[name][1:] for name in before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_visiting_layer_that_fails_leaves_the_device_at_once() -> None:
    model = Encoder().bfloat16().eval()
    with torch.no_grad(), visiting_layers(model, model.blocks, device=CPU, dtype=torch.float32):
        with pytest.raises(RuntimeError):
            model.blocks[0](torch.zeros(1, 2, 3))  # of another width
        assert not [name for name in wide(model) if name.startswith("blocks")]


def test_visiting_layer_that_does_not_fit_leaves_nothing_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, to, moved = Encoder().bfloat16().eval(), torch.Tensor.to, []

    def run_out(tensor: torch.Tensor, *args: object) -> torch.Tensor:
        moved.append(tensor)
        if len(moved) > 2:
            raise torch.cuda.OutOfMemoryError
        return to(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "to", run_out)
    with (
        pytest.raises(torch.cuda.OutOfMemoryError),
        visiting_layers(model, model.blocks, device=CPU, dtype=torch.float32),
    ):
        pass
    assert len(moved) == 3
    assert wide(model) == []
