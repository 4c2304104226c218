"""split_model on any module with a list of blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

from tests.unit.model_split.model import Block, Model
from wanshim.core.model_split import Companion, split_model, split_of
from wanshim.core.model_split.bridge import Bridge
from wanshim.core.model_split.split import find_blocks
from wanshim.errors import PlacementInvalid


def test_largest_list_of_blocks_is_found() -> None:
    assert find_blocks(Model())[0] == "body.layers"
    assert find_blocks(Model(), "small")[0] == "small"


@pytest.mark.parametrize("path", ["embed", "nowhere"])
def test_path_that_is_no_list_is_an_error(path: str) -> None:
    with pytest.raises(PlacementInvalid, match=f"Model.{path} is"):
        find_blocks(Model(), path)


def test_model_without_blocks_is_an_error() -> None:
    with pytest.raises(PlacementInvalid, match="no ModuleList of two or more blocks"):
        split_model(nn.Linear(2, 2), ["cpu", "cpu"])


def test_split_model_computes_the_same_and_leaves_containers_alone() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    expected, cache = model(x, {}), {}
    handle = split_model(model, ["cpu", "cpu", "cpu"])
    assert torch.equal(model(x, cache), expected)
    assert list(cache) == ["last"]
    assert split_of(model) is handle


def test_splitting_twice_is_an_error_and_removal_allows_it_again() -> None:
    model = Model()
    before = dict(vars(model))
    handle = split_model(model, ["cpu", "cpu"], split_at=3)
    with pytest.raises(PlacementInvalid, match="split already"):
        split_model(model, ["cpu", "cpu"])
    handle.remove()
    handle.remove()
    assert dict(vars(model)) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert split_model(model, ["cpu", "cpu"]).plan.split_at == (1,)


def test_accelerate_sees_a_device_map_with_several_entries() -> None:
    model = Model()
    split_model(model, ["cpu", "cpu"])
    assert len(model.hf_device_map) == 5
    accelerator = pytest.importorskip("accelerate", reason="accelerate is not installed").Accelerator(cpu=True)
    assert accelerator.verify_device_map(nn.ModuleDict({"dit": model}))


class WithHead(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 40)  # 800 bytes; a block has 80


def test_plan_counts_the_exits_where_they_go_and_not_at_home() -> None:
    plain, with_exit = (split_model(WithHead(), ["cpu:0", "cpu:1"], 2, exits=exits).plan for exits in ((), ("head",)))
    assert [stage.num_bytes for stage in plain.stages] == [160, 160]
    assert [stage.num_bytes for stage in with_exit.stages] == [160, 160 + 800]
    assert plain.home_bytes - with_exit.home_bytes == 800


def test_heavy_exit_moves_the_split_point_towards_the_last_block() -> None:
    assert split_model(WithHead(), ["cpu", "cpu"]).plan.split_at == (1,)
    assert split_model(WithHead(), ["cpu", "cpu"], exits=("head",)).plan.split_at == (3,)


@pytest.mark.parametrize(("block", "stage"), [(1, 0), (2, 1)])
def test_plan_counts_a_companion_with_its_block_and_not_at_home(block: int, stage: int) -> None:
    model, adapter = Model(), nn.Linear(4, 40)  # 800 bytes
    satellite = nn.ModuleDict({"adapter": adapter})
    arguments: dict[str, Any] = {"split_at": 2, "satellites": [satellite]}
    alone = split_model(Model(), ["cpu:0", "cpu:1"], **arguments).plan
    plan = split_model(model, ["cpu:0", "cpu:1"], companions=[Companion(adapter, block, after=False)], **arguments).plan
    assert [one.num_bytes - other.num_bytes for one, other in zip(plan.stages, alone.stages)] == [
        800 * (stage == 0), 800 * (stage == 1),
    ]  # fmt: skip
    assert alone.home_bytes - plan.home_bytes == 800


def test_dtype_changes_pass_and_moves_do_not() -> None:
    model = Model()
    split_model(model, ["cpu", "cpu"])
    parent = nn.ModuleDict({"model": model})
    parent.to(device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.float64)}


def test_tensor_tied_between_stages_is_an_error_that_names_both() -> None:
    model = Model()
    layers = model.body["layers"]
    layers[3].linear.weight = layers[0].linear.weight
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model.marker = nn.Parameter(torch.empty(1))  # marks the model as fake, so that cuda:1 may not exist
    with pytest.raises(
        PlacementInvalid, match=r"layers\.0\.linear\.weight and body\.layers\.3\.linear\.weight are one"
    ):
        split_model(model, ["cuda:0", "cuda:1"])


def test_tensor_given_to_every_block_gets_the_gradient_of_the_unsplit_model_from_any_number_of_stages() -> None:
    """A sum of each stage, added at the end, rounds differently from one that goes on from stage to stage."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([Block() for _ in range(8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = self.embed(x)
            for block in self.blocks:
                x = block(x, shift, {})
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Shifted(), torch.randn(64, 4)

    def gradient() -> torch.Tensor:
        (found,) = torch.autograd.grad(model(x), [model.embed.weight])
        return found

    expected = gradient()
    for stages in range(2, 9):
        handle = split_model(model, [f"cpu:{i}" for i in range(stages)], blocks="blocks")
        assert torch.equal(gradient(), expected), stages
        handle.remove()


class TestBridge:
    """On fake devices: what crosses, and how often."""

    @pytest.fixture(autouse=True)
    def _fake(self) -> object:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode

    def test_shared_tensor_crosses_once_while_it_lives(self) -> None:
        bridge, shared = Bridge(torch.device("cuda:1")), torch.empty(3, device="cuda:0")
        first = bridge.cross_once(shared)
        assert str(first.device) == "cuda:1"
        assert bridge.cross_once(shared) is first
        del shared, first
        assert len(bridge._crossed) == 0

    def test_changed_tensor_crosses_again(self) -> None:
        bridge, shared = Bridge(torch.device("cuda:1")), torch.empty(3, device="cuda:0")
        first = bridge.cross_once(shared)
        shared.add_(1)
        assert bridge.cross_once(shared) is not first

    @pytest.mark.skipif(
        Version(torch.__version__).release < (2, 10) and not torch.cuda.is_available(),
        reason="torch 2.9 ends the process where a graph crosses fake CUDA devices and there is no driver",
    )
    def test_copy_made_without_gradients_is_not_given_to_a_graph(self) -> None:
        bridge, shared = Bridge(torch.device("cuda:1")), torch.empty(3, device="cuda:0", requires_grad=True)
        with torch.no_grad():
            assert not bridge.cross_once(shared).requires_grad
        assert bridge.cross_once(shared).requires_grad

    def test_host_tensors_lists_and_dicts_stay(self) -> None:
        bridge = Bridge(torch.device("cuda:1"))
        on_host, held = torch.empty(3), [torch.empty(3, device="cuda:0")]
        assert bridge.cross_once(on_host) is on_host
        assert bridge.cross_once(held) is held

    def test_tuple_crosses_item_by_item(self) -> None:
        bridge, item = Bridge(torch.device("cuda:1")), torch.empty(3, device="cuda:0")
        crossed = bridge.cross_once((item, 7))
        assert str(crossed[0].device) == "cuda:1"
        assert crossed[1] == 7
