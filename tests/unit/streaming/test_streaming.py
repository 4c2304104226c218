"""Streamed weights on the host, where a slot of the ring is plain memory that is really written over."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.streaming.model import BLOCKS, Block, Model, data
from wanshim.core.model_split import split_model
from wanshim.core.ranks.group import Group
from wanshim.core.streaming import StreamHandle, shared_memory, stream, stream_model, stream_of, streamable_bytes
from wanshim.core.streaming.block_weights import can_wait
from wanshim.core.streaming.plan import plan_stream, streamed_blocks
from wanshim.errors import HostMemoryInvalid, PlacementInvalid, WanshimError

GIB = 2**30


def train(model: Model, steps: int = 3) -> list[torch.Tensor]:
    """Losses, and the adapters after some optimizer steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for seed in range(steps):
        loss = model(data(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + [p.detach().clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("count", [3, 4, 8])
def test_streamed_model_trains_as_the_resident_one_bit_for_bit(count: int, slots: int) -> None:
    expected, model = train(Model()), Model()
    handle = stream_model(model, "cpu", count=count, slots=slots)
    assert all(map(torch.equal, expected, train(model)))
    assert handle.ring.count.loads > count or slots == count


def test_blocks_that_the_program_compiled_stay_one_graph() -> None:
    def compiled() -> tuple[Model, list[object]]:
        model, graphs = Model(), []

        def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
            graphs.append(graph)
            return graph.forward

        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model, graphs

    torch._dynamo.reset()
    alone, expected = compiled()
    losses = train(alone)
    torch._dynamo.reset()
    model, graphs = compiled()
    handle = stream_model(model, "cpu", count=BLOCKS)
    assert all(map(torch.equal, losses, train(model)))
    assert len(graphs) == len(expected) > 0
    handle.remove()
    assert all(map(torch.equal, train(alone), train(model)))


def test_a_merge_on_the_host_lasts() -> None:
    def merged(model: Model, move: Callable[[], object]) -> list[torch.Tensor]:
        losses = train(model)
        move()
        for block in model.blocks:
            block.base.weight.data += block.down.weight.new_full((12, 12), 0.25)
        return losses + train(model)

    expected, model = Model(), Model()
    stream_model(model, "cpu", count=4)
    assert all(map(torch.equal, merged(expected, lambda: None), merged(model, lambda: model.to("cpu"))))
    assert all(map(torch.equal, expected.state_dict().values(), model.state_dict().values()))


def test_weights_come_ahead_of_use_and_no_more_often_than_planned() -> None:
    model = Model()
    handle = stream_model(model, "cpu", count=4)
    train(model, steps=1)
    late = handle.ring.count.late
    handle.ring.count.loads = handle.ring.count.loaded_bytes = 0
    train(model, steps=1)
    assert handle.ring.count.late == late <= 1  # only the very first one
    assert handle.ring.count.loaded_bytes == handle.plan.link_bytes


def test_parameters_keep_their_identity_and_adapters_stay() -> None:
    model = Model()
    before = {name: id(p) for name, p in model.named_parameters()}
    handle = stream_model(model, "cpu", count=4)
    train(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert "blocks.1.base.weight" in handle.waiting
    assert "blocks.1.scale" in handle.waiting
    assert not [name for name in handle.waiting if "up" in name or "down" in name]


def test_state_dict_in_the_middle_of_a_step_is_whole() -> None:
    expected = {name: t.clone() for name, t in Model().state_dict().items()}
    model = Model()
    stream_model(model, "cpu", count=4)
    loss = model(data(0))
    found = model.state_dict()
    loss.backward()
    model(data(1)).backward()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_remove_gives_back_a_model_of_its_own() -> None:
    expected, model = train(Model()), Model()
    before = list(model.state_dict())
    handle = stream_model(model, "cpu", count=4)
    model(data(0)).backward()
    model.zero_grad()
    shallow = copy.copy(model)
    handle.remove()
    handle.remove()
    assert stream_of(model) is stream_of(shallow) is None
    assert not [m for m in model.modules() if "_apply" in vars(m) or m._forward_pre_hooks]
    assert list(model.state_dict()) == before
    handle.ring.host.memory.zero_()
    assert all(map(torch.equal, expected, train(model)))
    model.load_state_dict(Model().state_dict())


def test_forward_without_gradients_streams_round_and_round() -> None:
    expected, model = Model(), Model()
    handle = stream_model(model, "cpu", count=4)
    with torch.no_grad():
        for seed in range(3):
            assert torch.equal(expected(data(seed)), model(data(seed)))
    assert handle.ring.count.late == 1
    assert all(map(torch.equal, model.parameters(), expected.parameters()))  # also of blocks whose slot was filled anew


def test_slots_keep_the_blocks_nearest_to_the_one_that_comes() -> None:
    model = Model()
    ring = stream_model(model, "cpu", count=BLOCKS, slots=3).ring
    held = []
    with torch.no_grad():
        for index in (0, 1, 2, 0, 3, 1):
            ring.acquire(index)
            held.append({slot.index for slot in ring.slots})
    assert held == [{0, 1, None}, {0, 1, 2}, {1, 2, 3}, {0, 1, 2}, {2, 3, 4}, {1, 2, 3}]


def test_block_larger_than_those_before_it_fits_a_slot() -> None:
    models = [Model(), Model()]
    for model in models:
        model.blocks[5].register_buffer("large", torch.ones(5000))
    stream_model(models[1], "cpu", count=BLOCKS)
    assert torch.equal(*(model(data(0)) for model in models))


def test_backwards_one_after_another_without_a_forward_between_them_are_each_in_order() -> None:
    models = [Model(), Model()]
    stream_model(models[1], "cpu", count=4)
    for model in models:
        for loss in [model(data(seed)) for seed in range(2)]:
            loss.backward()
    gradients = [[p.grad for p in model.parameters() if p.requires_grad] for model in models]
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("gradients", [True, False])
def test_block_at_work_stays_in_its_slot_whatever_the_order_of_calls(gradients: bool, slots: int) -> None:
    """A block that lost its slot to the one fetched ahead would compute from the host here, and on a GPU not at all."""
    reference, model = dict(Model().named_parameters()), Model()
    ring = stream_model(model, "cpu", count=BLOCKS, slots=slots).ring
    orders = [[*range(BLOCKS)] * 2, [*range(BLOCKS)][::-1] * 2, [3, 2, 0, 7, 5, 6, 4, 0, 1]]
    orders += [torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(200)]
    nothing_kept = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.set_grad_enabled(gradients), nothing_kept:
        for index in [index for order in orders for index in order]:
            ring.acquire(index)
            (slot,) = [slot for slot in ring.slots if slot.index == index]
            for weight in ring.blocks[index].weights:
                assert weight.tensor.untyped_storage().data_ptr() == slot.memory.untyped_storage().data_ptr()
                if weight.path in reference:
                    assert torch.equal(weight.tensor, reference[weight.path])


def test_blocks_compute_from_the_device_in_training_and_without_gradients() -> None:
    """Also in a hook that was there before the streaming began."""
    model = Model()
    at_work: list[bool] = []

    def note(block: Block, args: object) -> None:
        memory = {slot.memory.data_ptr() for slot in ring.slots}
        at_work.append(block.base.weight.untyped_storage().data_ptr() in memory)

    for number in streamed_blocks(BLOCKS, 4):
        model.blocks[number].register_forward_pre_hook(note)
    ring = stream_model(model, "cpu", count=4).ring
    train(model, steps=2)
    with torch.no_grad():
        for seed in range(2):
            model(data(seed))
    assert at_work == [True] * (2 * 2 * 4 + 2 * 4)  # forward and recomputation of two steps, two forwards


class Ranks:
    """Two ranks of one host in one process, each a thread with a model of its own."""

    def __init__(self, models: list[Model]) -> None:
        self.models, self.errors = models, [None, None]
        self.store = torch.distributed.HashStore()

    def run(self) -> list[str]:
        threads = [threading.Thread(target=self._rank, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [str(error) for error in self.errors]

    def _rank(self, rank: int) -> None:
        try:
            stream_model(self.models[rank], "cpu", count=4, host=Group(range(2), rank, self.store))
        except Exception as error:
            self.errors[rank] = error


def test_ranks_with_the_same_weights_stream_together() -> None:
    assert Ranks([Model(), Model()]).run() == ["None", "None"]


@pytest.mark.parametrize("name", ["base.weight", "base.bias", "turned", "scale"])
def test_rank_whose_streamed_weights_differ_stops_both_and_is_named(name: str) -> None:
    models = [Model(), Model()]
    last = streamed_blocks(BLOCKS, 4)[-1]
    weights = dict(models[1].blocks[last].named_parameters()) | dict(models[1].blocks[last].named_buffers())
    weights[name].data[..., -1].add_(2**-10)
    first, second = Ranks(models).run()
    assert f"blocks.{last}.{name} is not what the first rank of this host has" in second
    assert f"rank 1 failed: WanshimError: blocks.{last}.{name}" in first


def test_rank_that_fails_before_the_ranks_meet_again_stops_the_other_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that cannot lock its pages: the other would wait for it until the deadline."""
    models = [Model(), Model()]
    write = stream._hand_over

    def fail_on_rank_1(layouts: object, shared: shared_memory.Shared, undo: object) -> None:
        if not shared.leads:
            raise HostMemoryInvalid("no page can be locked")
        write(layouts, shared, undo)

    monkeypatch.setattr(stream, "_hand_over", fail_on_rank_1)
    ranks = Ranks(models)
    assert ranks.run()[1] == "no page can be locked."
    assert "rank 1 failed: HostMemoryInvalid: no page can be locked" in str(ranks.errors[0])
    assert all(stream_of(model) is None for model in models)


def test_training_without_checkpointing_is_refused_before_it_is_wrong() -> None:
    model = Model()
    stream_model(model, "cpu", count=4)
    model.checkpointing = False
    with pytest.raises(WanshimError, match="without checkpointing"):
        model(data(0))
    model.checkpointing = True
    assert torch.equal(model(data(0)), Model()(data(0)))


def test_checkpoint_over_several_blocks_is_refused() -> None:
    model = Model()
    stream_model(model, "cpu", count=4)
    x = model.embed(data(0)).requires_grad_()
    for first in range(0, BLOCKS, 4):
        x = checkpoint(nn.Sequential(*model.blocks[first : first + 4]), x, use_reentrant=False)
    with pytest.raises(WanshimError, match=r"streamed block 7 after block 5.*a checkpoint for each block"):
        x.sum().backward()


@pytest.mark.parametrize("count", [4, 5])
def test_backward_of_several_forwards_is_that_of_the_resident_model(count: int) -> None:
    """Of two losses, and of steps one after the other as a distillation takes them."""

    def gradients(model: Model) -> list[torch.Tensor]:
        latent = data(0).requires_grad_()
        for _ in range(3):
            latent = latent - model(latent)
        (model(data(1)) + latent.sum() * model(data(2))).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected, model = gradients(Model()), Model()
    stream_model(model, "cpu", count=count)
    assert all(map(torch.equal, expected, gradients(model)))


def test_step_after_an_error_in_the_middle_is_right() -> None:
    def fail(*args: object) -> None:
        raise ValueError("in the middle")

    model = Model()
    stream_model(model, "cpu", count=4)
    hook = model.blocks[4].register_forward_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        model(data(0))
    hook.remove()
    assert all(map(torch.equal, train(Model()), train(model)))


def test_everything_but_what_waits_goes_to_the_device() -> None:
    model = Model()
    model.register_buffer("positions", torch.ones(3))  # the only tensor of its module
    waiting = stream_model(model, "meta", count=4).waiting
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.is_meta is (name not in waiting), name


def test_moves_leave_what_waits_and_take_the_rest() -> None:
    parent, shared = nn.ModuleDict({"dit": Model()}), torch.ones(3)
    for block in parent["dit"].blocks:  # these stay beside what waits in the same module
        block.shift = nn.Parameter(torch.zeros(12))
        block.register_buffer("positions", shared)
    handle = stream_model(parent["dit"], "cpu", count=4)
    waiting = {f"dit.{name}" for name in handle.waiting}
    parent.to("meta")
    for name, tensor in (*parent.named_parameters(), *parent.named_buffers()):
        assert tensor.is_meta is (name not in waiting), name


def test_change_of_dtype_is_refused_while_weights_wait() -> None:
    model = Model()
    stream_model(model, "cpu", count=4)
    with pytest.raises(WanshimError, match=r"were to become torch\.bfloat16"):
        model.to(torch.bfloat16)


def test_base_weights_are_not_loaded_over_those_the_ranks_share() -> None:
    """Nor frozen buffers, whose new values would last until the slot is filled again; also through a parent."""
    model = Model()
    stream_model(model, "cpu", count=4)
    for module, prefix in ((model, ""), (nn.ModuleDict({"dit": model}), "dit.")):
        whole = module.state_dict()
        for name in ("base.weight", "scale"):
            path = f"{prefix}blocks.1.{name}"
            with pytest.raises(WanshimError, match=f"{path} was to be loaded .* shared between ranks"):
                module.load_state_dict({path: whole[path]}, strict=False)
        adapters = {name: t for name, t in whole.items() if "up" in name or "down" in name}
        module.load_state_dict(adapters, strict=False)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.requires_grad_(True), "no block .* has a frozen weight"),
        (lambda m: split_model(m, ["cpu", "cpu"]), "is split already"),
        (lambda m: stream_model(m, "cpu", count=4), "is streamed already"),
    ],
)
def test_model_that_cannot_be_streamed_is_refused(spoil: Callable[[Model], object], message: str) -> None:
    model = Model()
    if "frozen" in message:
        for block in model.blocks:
            del block.scale
    spoil(model)
    with pytest.raises(PlacementInvalid, match=message):
        stream_model(model, "cpu")


def test_one_slot_is_refused() -> None:
    with pytest.raises(PlacementInvalid, match=r"1 slots.*at least 2"):
        stream_model(Model(), "cpu", slots=1)


def test_failure_to_place_the_rest_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = []

    def fail(blocks: object, host: torch.Tensor, *args: object) -> None:
        hosts.append(host)
        raise torch.OutOfMemoryError("no room for the ring")

    model = Model()
    monkeypatch.setattr(stream, "Ring", fail)
    with pytest.raises(torch.OutOfMemoryError):
        stream_model(model, "cpu", count=4)
    hosts.pop().memory.zero_()
    assert not [m for m in model.modules() if "_apply" in vars(m) or m._forward_pre_hooks]
    assert all(map(torch.equal, train(Model()), train(model)))


def test_frozen_plain_tensors_wait_down_to_one_element() -> None:
    assert can_wait(nn.Parameter(torch.ones(1), requires_grad=False))
    assert can_wait(torch.ones(1))
    quantised = torch.ones(2).as_subclass(type("Quantised", (torch.Tensor,), {}))
    for stays in (torch.empty(0), nn.Parameter(torch.ones(1)), torch.ones(2).to_sparse(), quantised):
        assert not can_wait(stays)


def test_seconds_of_each_step_count_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 13.0])
    monkeypatch.setattr(stream.time, "perf_counter", lambda: next(clock))
    laps = stream.Laps()
    laps.end("first")
    laps.end("second")
    assert laps.seconds == {"first": 2.5, "second": 0.5}


def test_tied_weight_and_shared_module_stay_on_the_device() -> None:
    model = Model()
    model.blocks[3].base.weight = model.blocks[1].base.weight
    model.blocks[4].base = model.blocks[5].base
    handle: StreamHandle = stream_model(model, "cpu", count=8)
    assert "blocks.1.base.weight" not in handle.waiting
    assert "blocks.5.base.weight" not in handle.waiting
    assert "blocks.1.base.bias" in handle.waiting


def test_plan_streams_as_few_blocks_as_the_budget_asks_for() -> None:
    plan = plan_stream([100] * 40, 500, "cuda:0", count=None, budget=3000, slots=2)
    assert plan.device_bytes <= 3000
    assert len(plan.streamed) == 17
    assert len(plan_stream([100] * 40, 500, "cuda:0", count=None, budget=700, slots=2).streamed) == 40
    with pytest.raises(PlacementInvalid, match=r"every block streamed .* holds 7\.00 GiB .* at most 6\.50 GiB"):
        plan_stream([GIB] * 40, 5 * GIB, "cuda:0", count=None, budget=13 * GIB // 2, slots=2)


def test_plan_shows_how_many_blocks_are_streamed_and_what_lies_and_travels_where() -> None:
    plan = plan_stream([4 * GIB, 3 * GIB, 3 * GIB, 3 * GIB], 6 * GIB, "cuda:1", count=3, budget=None, slots=2)
    assert str(plan).splitlines() == [
        "streaming 3 of 4 blocks to cuda:1",
        "  cuda:1: 9.00 GiB for good, and 8.00 GiB in which 2 streamed blocks take turns",
        "  host: 10.00 GiB of frozen weights, page-locked, one copy for all its ranks",
        "  link: 6.67 GiB a step, ahead of use",
    ]


def test_plan_streams_half_of_the_blocks_unless_told_and_as_many_as_take_turns_at_least() -> None:
    def streamed(**choice: int | None) -> int:
        return len(plan_stream([100] * 9, 500, "cuda:0", slots=2, **{"count": None, "budget": None, **choice}).streamed)

    assert streamed() == 4
    assert streamed(budget=10**6) == 2
    assert (streamed(count=2), streamed(count=9)) == (2, 9)
    for count in (1, 10):
        with pytest.raises(PlacementInvalid, match=f"{count} streamed blocks in a model of 9 with 2 taking turns"):
            streamed(count=count)


def test_plan_of_few_blocks_streams_all_that_take_turns_and_names_the_least_number() -> None:
    for blocks in (2, 3):
        assert len(plan_stream([100] * blocks, 500, "cuda:0", count=None, budget=None, slots=2).streamed) == 2
    for budget in (None, 10**6):
        with pytest.raises(PlacementInvalid, match=r"^a model of 1 block .* Expected at least 2 .* WANSHIM_PLAN=auto"):
            plan_stream([100], 500, "cuda:0", count=None, budget=budget, slots=2)


def test_plan_counts_bytes_by_where_they_lie_and_how_often_they_travel() -> None:
    plan = plan_stream([100, 100, 30, 71], 500, "cuda:0", count=4, budget=None, slots=2)
    assert (plan.resident_bytes, plan.host_bytes, plan.ring_bytes) == (500, 301, 200)
    assert plan.device_bytes == 700
    assert plan.link_bytes == 301  # half of the blocks are not in the ring when their turn comes, twice a step
    assert plan_stream([100] * 3, 0, "cuda:0", count=3, budget=None, slots=3).link_bytes == 0
    assert replace(plan, streamed=(), host_bytes=0).link_bytes == 0


def test_bytes_of_a_split_model_are_those_that_streaming_would_move() -> None:
    model = Model()
    expected = streamable_bytes(model)
    split_model(model, ["cpu", "cpu"])
    assert streamable_bytes(model) == expected
    streamed = stream_model(Model(), "cpu", count=4).plan
    assert streamed.host_bytes == sum(expected[i] for i in streamed.streamed)


def test_streamed_blocks_are_spread_evenly() -> None:
    assert streamed_blocks(8, 4) == (1, 3, 5, 7)
    assert streamed_blocks(8, 2) == (3, 7)
    assert streamed_blocks(3, 3) == (0, 1, 2)
