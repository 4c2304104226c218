"""Copies of a model that wanshim has changed are plain models: split, pinned or streamed, whole, deep or pickled."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.model_split.model import Model
from wanshim.core.model_split import Companion, pin_to, split_model, split_of
from wanshim.core.model_split.side_models import move_side_model, moved_to
from wanshim.core.pipeline import Pipeline
from wanshim.core.shared.copies import detached_copy
from wanshim.core.streaming import stream_model, stream_of


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_a_file])
Copy = Callable[[nn.Module], nn.Module]


def hooks_of(model: nn.Module) -> list[str]:
    return [name for m in model.modules() for name, value in vars(m).items() if "_hooks" in name and value]


def assert_plain(model: nn.Module, like: nn.Module) -> None:
    """As `like`, which nobody has changed: the same attributes everywhere, and no hooks."""
    pairs = list(zip(model.modules(), like.modules(), strict=True))
    assert [vars(one).keys() for one, _ in pairs] == [vars(other).keys() for _, other in pairs]
    assert hooks_of(model) == []


@COPIES
def test_copy_of_a_split_model_is_the_unsplit_model(copied: Copy) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    expected, untouched = model(x, {}), copy.deepcopy(model)
    handle = split_model(model, ["cpu", "cpu"])
    twin = copied(model)
    assert split_of(twin) is None
    assert_plain(twin, untouched)
    assert torch.equal(twin(x, {}), expected)
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())
    twin.to("meta")  # goes where it is sent
    assert all(p.is_meta for p in twin.parameters())
    split_model(copied(model), ["cpu", "cpu"]).remove()
    handle.remove()
    assert split_of(twin) is None


@COPIES
def test_split_model_is_as_it_was_after_it_was_copied_within_a_larger_one(copied: Copy) -> None:
    model, guest = Model(), nn.Linear(4, 4)
    untouched = copy.deepcopy(model)
    handle = split_model(model, ["cpu", "cpu"], satellites=[guest], companions=[Companion(guest, 1, after=True)])
    pipeline = Pipeline(handle)

    def state() -> list[dict[str, object]]:
        modules = [*model.modules(), *guest.modules()]
        return [{k: list(v.items()) if isinstance(v, dict) else v for k, v in vars(m).items()} for m in modules]

    before = state()
    whole = copied(nn.ModuleDict({"dit": model, "guest": guest}))
    assert state() == before
    assert split_of(model) is handle
    assert_plain(whole["dit"], untouched)
    assert_plain(whole["guest"], nn.Linear(4, 4))
    pipeline.remove()
    handle.remove()
    assert hooks_of(model) == hooks_of(guest) == []


def test_copy_keeps_ties_to_what_is_copied_with_it() -> None:
    model = Model()
    split_model(model, ["cpu", "cpu"])
    twin, weight = copy.deepcopy([model, model.embed.weight])
    assert twin.embed.weight is weight


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(3))


def test_deep_copy_lies_where_the_weights_came_from() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):  # whose parameters cannot be moved, while buffers can
        model = nn.Sequential(nn.ModuleList([Positions(), Positions()]))
        handle = split_model(model, ["cuda:0", "cuda:1"])
        twin = copy.deepcopy(model)
        assert [str(t.device) for t in model.buffers()] == ["cuda:0", "cuda:1"]
        assert [str(t.device) for t in twin.buffers()] == ["cpu", "cpu"]
        handle.remove()
        assert [str(t.device) for t in model.buffers()] == ["cpu", "cpu"]


def test_copied_parameter_stays_one_on_another_device() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    twin = detached_copy(model, {}, [], [model], [(p, torch.device("meta")) for p in model.parameters()])
    assert [(type(p), p.is_meta, p.requires_grad) for p in twin.parameters()] == [
        (nn.Parameter, True, True),
        (nn.Parameter, True, False),
    ]


@pytest.mark.slow
def test_file_of_a_split_model_loads_where_there_is_no_wanshim(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    split_model(model, ["cpu", "cpu"])
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['wanshim'] = None; import torch; "
        f"print(type(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("Sequential", 0), done.stderr


def test_failed_copy_leaves_the_split_in_place() -> None:
    model = Model()
    model.lock = threading.Lock()
    handle = split_model(model, ["cpu", "cpu"])
    hooks = hooks_of(model)
    with pytest.raises(TypeError, match="lock"):
        copy.deepcopy(model)
    assert split_of(model) is handle
    assert hooks_of(model) == hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_copy_of_one_block_goes_on_bringing_its_inputs_over(copied: Copy) -> None:
    model = Model()
    split_model(model, ["cpu", "cpu"])
    block, x = model.body["layers"][2], torch.ones(2, 4)
    assert torch.equal(copied(block)(x, x, {}), block(x, x, {}))


def test_shallow_copy_is_no_longer_split_once_the_handle_is_gone() -> None:
    model = Model()
    handle = split_model(model, ["cpu", "cpu"])
    twin = copy.copy(model)
    handle.remove()
    assert split_of(twin) is None


@COPIES
def test_copy_of_a_pinned_model_moves_where_it_is_sent(copied: Copy) -> None:
    model = nn.Linear(2, 2)
    pin_to(model, "cpu")
    twin = copied(model)
    assert_plain(twin, nn.Linear(2, 2))
    assert twin.to("meta").weight.is_meta
    assert not model.to("meta").weight.is_meta


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@COPIES
def test_copy_of_a_side_model_computes_with_its_own_weights(copied: Copy) -> None:
    model = Encoder()
    move_side_model(model, "cpu", "cpu", ["encode"])
    twin = copied(model)
    with torch.no_grad():
        twin.scale.fill_(3.0)
    assert twin.encode(torch.ones(1)).item() == 3.0
    assert model.encode(torch.ones(1)).item() == 1.0
    assert (moved_to(model), moved_to(twin)) == ("cpu", None)


@COPIES
def test_copy_of_a_streamed_model_is_whole_and_its_own(copied: Copy) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    model.requires_grad_(False)
    model.body["layers"][0].register_buffer("positions", torch.ones(3))
    expected, untouched = model(x, {}), copy.deepcopy(model)
    handle = stream_model(model, "cpu", count=4)
    with torch.no_grad():
        model(x, {})  # some blocks lie in a slot of the ring
        twin = copied(model)
        assert stream_of(twin) is None
        assert_plain(twin, untouched)
        handle.remove()
        assert torch.equal(twin(x, {}), expected)
    stored = [t.untyped_storage() for t in (*twin.parameters(), *twin.buffers())]
    assert [len(s) for s in stored] == [t.nbytes for t in (*twin.parameters(), *twin.buffers())]
