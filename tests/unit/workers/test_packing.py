"""Objects that are packed come out again: specs of tensors, functions, compiled modules, and those refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.workers import functions
from wanshim.core.streaming import HostCopy
from wanshim.core.workers.packing import Packed, TensorSpec, elements, pack, unpack
from wanshim.errors import WorkersInvalid

CPU, META = torch.device("cpu"), torch.device("meta")


def again(value: Any) -> Any:
    return unpack(*pack(value, CPU))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4).t(),
        torch.ones(3, 1).expand(3, 5),
        torch.ones(2, 3, 8)[..., ::2],
        torch.ones(0, 3),
        torch.tensor(1, dtype=torch.int8),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    ids=["transposed", "broadcast", "every second", "empty", "scalar", "trained", "frozen"],
)
def test_spec_has_all_of_a_tensor_but_its_elements(tensor: torch.Tensor) -> None:
    spec = TensorSpec.of(tensor)
    for made in (spec.empty(META), spec.copy(tensor)):
        assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert (type(made), made.requires_grad, made.device) == (type(tensor), tensor.requires_grad, CPU)
    assert torch.equal(spec.copy(tensor), tensor)
    assert spec.num_bytes == elements(tensor).numel() * tensor.element_size()


def test_what_is_on_no_host_is_made_on_the_device_and_a_caller_may_say_which_is() -> None:
    tensor = torch.ones(2)
    assert TensorSpec.of(tensor).empty(META).device == CPU
    assert TensorSpec.of(tensor, on_host=False).empty(META).device == META
    assert TensorSpec.of(tensor.to(META)).empty(META).device == META
    assert TensorSpec.of(tensor.to(META), on_host=True).empty(META).device == CPU


def test_weights_are_told_from_other_tensors_of_a_module() -> None:
    """And those alone are for the device of the other process when the program moves them."""
    model = functions.Scale()
    weights = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for moved in (False, True):
        packed, tensors = pack(model, CPU, moved=moved)
        assert len({*map(id, tensors)}) == len(tensors) == 6, "each once: weight, bias, turned, offset, two of plain"
        for spec, tensor in zip(packed.specs, tensors, strict=True):
            assert spec.is_weight is (id(tensor) in weights)
            assert spec.on_host is not (moved and spec.is_weight)
    assert not any(spec.is_weight for spec in pack([model.turned], CPU)[0].specs), "a value beside no module"


def test_weight_in_memory_that_is_shared_is_the_one_that_lies_there() -> None:
    model = functions.Blocks().requires_grad_(False)
    host = HostCopy.of(model, shared=True)
    host.wait()
    weight = model.blocks[0].weight
    offsets = host.offsets([weight])
    made = TensorSpec.of(weight).in_memory(host, offsets[0])
    assert torch.equal(made, weight)
    assert (type(made), made.requires_grad) == (nn.Parameter, False)
    host.memory.zero_()
    assert not made.any()


def test_module_that_is_held_is_its_key() -> None:
    model, other = functions.Scale(), functions.Scale()
    packed, tensors = pack((model, [model], 5), CPU, {3: model})
    assert tensors == []
    assert unpack(packed, [], {3: other}) == (other, [other], 5)


def made_in(scale: float, word: str) -> Callable[..., Any]:
    def function(x: float, y: float = 2.0, *, z: float = 3.0) -> Any:
        return word, scale * x, y, z, CPU

    return function


def test_function_made_in_another_one_has_its_defaults_variables_and_module() -> None:
    function = again(made_in(4.0, "word"))
    assert function(1.0) == ("word", 4.0, 2.0, 3.0, CPU)
    assert function(1.0, 5.0, z=6.0) == ("word", 4.0, 5.0, 6.0, CPU)
    assert function.__name__ == "function"
    assert pack(made_in(4.0, "word"), CPU)[0] == pack(made_in(4.0, "word"), CPU)[0]
    assert pack(made_in(4.0, "word"), CPU)[0] != pack(made_in(4.5, "word"), CPU)[0]


def test_method_of_a_class_stays_that_of_the_object() -> None:
    model = functions.Scale()
    method = again(model.extra_repr)
    assert type(method.__self__) is functions.Scale
    assert method() == model.extra_repr()


@pytest.mark.parametrize("way", ["torch.compile(module)", "module.compile()"])
def test_compiled_module_is_compiled_again_and_packed_alike_once_it_has_run(way: str) -> None:
    model: nn.Module = nn.Linear(3, 2)
    x = torch.ones(1, 3)
    if way == "module.compile()":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    before, _ = pack(model, CPU)
    expected = model(x)
    assert pack(model, CPU)[0] == before
    made = again(model)
    assert type(made) is type(model)
    assert (made._compiled_call_impl is None) is (model._compiled_call_impl is None)
    assert torch.equal(made(x), expected)


def test_module_that_is_compiled_in_an_unknown_way_is_refused() -> None:
    for compiled in (len, lambda x: x):
        model = nn.Linear(3, 2)
        model._compiled_call_impl = compiled  # type: ignore[assignment]
        with pytest.raises(WorkersInvalid, match="compiled in a way that this torch does not say"):
            pack(model, CPU)


def test_what_cannot_be_pickled_is_refused_by_its_class_and_the_reason() -> None:
    with pytest.raises(WorkersInvalid, match=r"^list cannot be copied to another process: .*generator") as caught:
        pack([iter(x for x in ())], CPU)
    assert isinstance(caught.value.__cause__, TypeError)


def test_tensor_of_another_device_than_the_module_s_is_refused_and_one_of_the_host_is_not() -> None:
    packed, tensors = pack((torch.ones(2), torch.ones(2, device="meta")), META)
    assert [spec.on_host for spec in packed.specs] == [True, False]
    assert isinstance(packed, Packed)
    assert unpack(packed, tensors)[1] is tensors[1]
    with pytest.raises(WorkersInvalid, match="a tensor on meta beside others on cpu"):
        pack(torch.ones(2, device="meta"), CPU)


def test_quantized_weight_that_is_trained_stays_so_and_no_parameter_becomes_none() -> None:
    coded = functions.Coded(torch.ones(7, 5, dtype=torch.int8), torch.rand(7, 1))
    assert not isinstance(again(coded), nn.Parameter)
    for requires_grad in (False, True):
        made = again(nn.Parameter(coded, requires_grad))
        assert (isinstance(made, nn.Parameter), made.requires_grad) == (True, requires_grad)
        kind = again(functions.Kind(torch.ones(2), requires_grad))
        assert (type(kind), kind.requires_grad) == (functions.Kind, requires_grad)
