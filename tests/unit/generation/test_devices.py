"""Which devices a pipeline's forwards go over, on machines of any number of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.generation import toy
from wanshim.core.generation import GenerationPlan, NotShared, Request, SharedPipeline, shared_pipeline
from wanshim.core.generation.devices import check_copied, check_plain, choose_devices, device_of
from wanshim.core.generation.shared_workers import SharedWorkers
from wanshim.core.workers import Workers
from wanshim.core.workers.copies import Copies
from wanshim.core.workers.packing import Packed, TensorSpec
from wanshim.errors import ModelInvalid

CPU = torch.device("cpu")


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


@pytest.mark.parametrize(
    ("gpus", "own", "request_", "expected"),
    [
        (4, "cuda:0", Request(), ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, "cuda:2", Request(gpus=3), ["cuda:2", "cuda:0", "cuda:1"]),
        (2, "cuda:1", Request(gpus=2), ["cuda:1", "cuda:0"]),
        (1, "cuda:0", Request(devices=("cuda:0", "cuda:0")), ["cuda:0", "cuda:0"]),
        (0, "cpu", Request(gpus=3), ["cpu", "cpu", "cpu"]),
        (0, "cpu", Request(), ["cpu"]),
    ],
    indirect=["gpus"],
)
def test_the_pipelines_own_device_comes_first(gpus: None, own: str, request_: Request, expected: list[str]) -> None:
    assert [str(device) for device in choose_devices(torch.device(own), request_)] == expected


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_more_gpus_than_there_are_and_another_first_device_are_refused(gpus: None) -> None:
    own = torch.device("cuda:0")
    with pytest.raises(NotShared, match=r"3 GPUs were asked for, and the program sees 2"):  # as it has set for itself
        choose_devices(own, Request(gpus=3))
    with pytest.raises(ModelInvalid, match=r"a pipeline on cuda:0 over cuda:1, cuda:0"):
        choose_devices(own, Request(devices=("cuda:1", "cuda:0")))


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_pipeline_that_was_not_moved_to_a_gpu_is_not_shared(gpus: None) -> None:
    with pytest.raises(NotShared, match="move the pipeline to a GPU first"):
        choose_devices(CPU, Request(gpus=2))


def test_models_on_several_devices_are_not_shared() -> None:
    with pytest.raises(NotShared, match="its models are not on one device: cpu, meta"):
        device_of([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])


def test_model_that_cannot_be_copied_is_named() -> None:
    model = nn.Linear(2, 2)
    calls: list[int] = []
    model.hook = lambda: calls.append(1)
    with pytest.raises(NotShared, match="transformer: Linear cannot be copied"):
        check_copied({"transformer": model}, CPU)


def bind(part: nn.Module, function: Callable[..., Any]) -> None:
    part.forward = MethodType(function, part)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: bind(model[0], nn.Linear.forward), ""),  # as a class may in its __init__
        (lambda model: bind(model[0], lambda self, x: 2 * x), r"m: 0\.forward is .*<lambda> here"),
        (lambda model: setattr(model[0], "forward", MethodType(nn.Linear.forward, model[1])), r"m \(0\) has a forward"),
        (lambda model: setattr(model[0], "forward", partial(nn.Linear.forward, model[0])), r"m \(0\) has a forward"),
        (lambda model: bind(model, nn.Identity.forward), "m has a forward of its own"),  # a worker calls its class's
        (lambda model: bind(model, nn.Sequential.forward), ""),  # as accelerate leaves it behind its hooks
    ],
    ids=["installed", "the program's", "another's", "partial", "of the whole", "its class's"],
)
def test_forward_of_a_part_is_carried_where_installed_code_has_bound_it(
    change: Callable[[nn.Module], None], reason: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    change(model)
    if not reason:
        check_plain("m", model)
        return
    with pytest.raises(NotShared, match=reason):
        check_plain("m", model)


def hold(workers: Workers, model: nn.Module) -> int:
    """Record that the worker has these parameters; how many bytes they are."""
    on_gpu = [replace(TensorSpec.of(tensor), on_host=False) for tensor in model.parameters()]
    addresses = [(number, spec) for number, spec in enumerate(on_gpu)]
    workers._running.copies[0].put(workers.key(model), Packed(b"", tuple(on_gpu)), addresses)
    return sum(spec.num_bytes for spec in on_gpu)


@pytest.fixture
def on_three_gpus(monkeypatch: pytest.MonkeyPatch) -> tuple[SharedPipeline, Callable[[int], GenerationPlan], toy.Model]:
    """A pipeline whose third GPU has a worker with copies, and its plan by the bytes that are free on each."""
    model, devices = toy.Model(), tuple(torch.device("cuda", index) for index in range(3))
    shared, binding = SharedPipeline(Request()), toy.bind(model)
    workers = Workers(devices[0], devices[2:])
    monkeypatch.setattr(shared, "_all", SharedWorkers(60, ""))
    shared._own, shared._all._workers[devices[0]] = devices[0], workers
    workers._running.copies.append(Copies())
    workers._running.workers.append(SimpleNamespace(link=SimpleNamespace(send=lambda message: None), end=lambda: None))
    hold(workers, model)
    monkeypatch.setattr(shared, "working_bytes", lambda forward, args, kwargs: 1000)

    def plan(free: int) -> GenerationPlan:
        monkeypatch.setattr(shared_pipeline, "available_bytes", lambda device, **_: free)
        call = shared_pipeline._Call(shared, binding, devices)
        with call.attached():
            return call._decide(binding.forwards[0], (), {})

    return shared, plan, model


def test_copies_that_one_worker_holds_are_no_memory_of_another_device(on_three_gpus: Any) -> None:
    """The GPU that had no memory for them in the first call has none in the second."""
    _, plan, _ = on_three_gpus
    found = plan(1000)
    assert found.devices == ("cuda:0", "cuda:2")
    assert set(found.rejected) >= {"cuda:1"}


def test_worker_that_holds_a_part_of_the_models_has_no_more_of_the_memory(on_three_gpus: Any) -> None:
    """After a failure the VAE's encode is what new workers hold first."""
    shared, plan, model = on_three_gpus
    whole, workers = plan(1000), shared._workers
    workers._running.copies[0].drop([workers.key(model)])
    vae = nn.Linear(2, 2)
    assert shared.used_by_worker("cuda:2", [model]) < 0
    assert shared.used_by_worker("cuda:2", [model]) != hold(workers, vae) == shared.used_by_worker("cuda:2", [model])
    assert plan(1000).gpus == 1
    hold(workers, model)
    assert plan(1000) == whole


def test_copies_of_other_models_are_freed_where_there_is_no_memory_beside_them(on_three_gpus: Any) -> None:
    """Of another pipeline, which sends them again if it is called again."""
    shared, plan, model = on_three_gpus
    workers, other = shared._workers, nn.Linear(300, 300)
    assert plan(1000).gpus == 2
    hold(workers, other)
    assert plan(1000).gpus == 2
    assert workers.holds(0, [model, other]), "there is memory for both"
    shared.plan = None
    workers._running.copies[0].drop([workers.key(model)])
    assert plan(1000).gpus == 2
    assert not workers.holds(0, [other])


def test_memory_that_a_workers_forwards_left_in_its_allocator_is_there_for_the_next_ones(on_three_gpus: Any) -> None:
    shared, plan, _ = on_three_gpus
    first = plan(1000)
    assert plan(0) == first
    shared.plan = None
    assert plan(0).gpus == 1
