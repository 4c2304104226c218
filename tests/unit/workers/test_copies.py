"""The record of what a worker holds: tensors by their elements, shared between modules, and gone with the last."""

from __future__ import annotations

import dataclasses

import torch

from wanshim.core.workers.copies import Address, Copies, Update
from wanshim.core.workers.packing import Packed, TensorSpec

CPU = torch.device("cpu")


def module(*elements: int, on_host: bool = False, data: bytes = b"structure") -> tuple[Packed, list[Address]]:
    """A module whose tensors, of 12 bytes each, have these digests."""
    spec = TensorSpec.of(torch.zeros(3), on_host=on_host)
    return Packed(data, (spec,) * len(elements)), [(digest, spec) for digest in elements]


def test_tensors_of_equal_elements_are_sent_once_and_numbered_alike() -> None:
    copies = Copies()
    assert copies.put(1, *module(10, 11)) == Update((0, 1), (0, 1), ())
    assert copies.put(2, *module(11, 12)) == Update((1, 2), (1,), ())
    assert copies.keys == {1, 2}


def test_equal_tensors_of_one_module_stay_apart() -> None:
    copies = Copies()
    assert copies.put(1, *module(10, 10, 10)) == Update((0, 1, 2), (0, 1, 2), ())
    assert copies.put(2, *module(10, 10)) == Update((0, 1), (), ())


def test_module_is_held_as_it_is_and_not_with_another_structure_or_elements() -> None:
    copies, held = Copies(), module(10, 11)
    copies.put(1, *held)
    assert copies.has(1, *held)
    assert not copies.has(2, *held)
    assert not copies.has(1, *module(10, 12))
    assert not copies.has(1, *module(10, 11, data=b"another"))


def test_tensors_that_no_module_has_any_more_are_dropped_and_sent_anew() -> None:
    copies = Copies()
    copies.put(1, *module(10, 11))
    copies.put(2, *module(11, 12))
    assert copies.put(1, *module(13)) == Update((3,), (0,), (0,))
    assert copies.drop([2, 7]) == (1, 2)
    assert copies.keys == {1}
    assert copies.put(2, *module(11)) == Update((4,), (0,), ())


def test_bytes_count_each_tensor_once_and_those_of_the_host_on_the_cpu_alone() -> None:
    copies = Copies()
    copies.put(1, *module(10, 11))
    copies.put(2, *module(11, 12))
    copies.put(3, *module(13, on_host=True))
    assert copies.num_bytes({1}, on_host=False) == 24
    assert copies.num_bytes({1, 2, 3}, on_host=False) == 36
    assert copies.num_bytes({1, 2, 3}, on_host=True) == 48


def test_broadcast_dimension_has_one_element_in_memory() -> None:
    x = torch.arange(3.0).reshape(3, 1).expand(3, 5)
    spec = TensorSpec.of(x)
    assert (spec.stored_size, spec.num_bytes) == ([3, 1], 12)
    assert torch.equal(spec.copy(x), x)
    assert spec.copy(x).stride() == x.stride()
    made = dataclasses.replace(spec, is_parameter=True, requires_grad=True).empty(CPU)
    assert isinstance(made, torch.nn.Parameter)
    assert made.requires_grad
