"""The random states that a run is resumed with, and the batches that it draws with them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from wanshim.core.resume.draws import Draws, as_text
from wanshim.core.resume.order import Order

SEED = 7
KINDS = {
    "python": (lambda: random.Random(SEED), lambda one: one.random()),
    "torch": (lambda: torch.Generator().manual_seed(SEED), lambda one: torch.rand(1, generator=one).item()),
    "numpy": (lambda: numpy.random.default_rng(SEED), lambda one: one.random()),
    "numpy, legacy": (lambda: numpy.random.RandomState(SEED), lambda one: one.normal()),
}


class Holder:
    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


@pytest.mark.parametrize("kind", KINDS)
def test_generator_draws_again_what_it_drew(kind: str) -> None:
    make, draw = KINDS[kind]
    holder = Holder(own=make())
    draw(holder.own)
    draws = Draws(holder)
    text = draws.text()
    expected = [draw(holder.own) for _ in range(3)]
    draws.set(text)
    assert [draw(holder.own) for _ in range(3)] == expected
    held = as_text(draws.held_states())
    expected = [draw(holder.own) for _ in range(3)]
    torch.manual_seed(SEED)
    of_process = torch.get_rng_state()
    draws.set(held)
    assert [draw(holder.own) for _ in range(3)] == expected
    assert torch.equal(torch.get_rng_state(), of_process)
    assert json.loads(held).keys() == {"held"}


def test_process_draws_again_what_it_drew() -> None:
    def drawn() -> list[float]:
        return [random.gauss(), torch.rand(1).item(), numpy.random.normal()]

    drawn()  # of two normal numbers the second is kept
    text = Draws(None).text()
    expected = [drawn(), drawn()]
    Draws(None).set(text)
    assert [drawn(), drawn()] == expected


def test_generators_are_found_wherever_a_dataset_holds_them_and_each_once() -> None:
    found = [random.Random(number) for number in range(8)]

    def closure() -> Any:
        return found_in_it

    found_in_it, bound = found[4], Holder(own=found[5])
    holder = Holder(
        first=found[0],
        again=found[0],
        listed=[1, "text", (found[1], {found[2]})],
        mapped={"deep": {"deeper": Holder(own=found[3])}},
        function=closure,
        method=SimpleNamespace(call=bound.__init__),
        part=partial(print, found[6], end=found[7]),
        system=random.SystemRandom(),
        weight=torch.zeros(2),
        kind=Holder,
        module=random,
    )
    holder.itself = holder
    held = Draws(holder).held
    assert {*map(id, held)} == {*map(id, found)}
    assert len(held) == len(found)
    assert held[0] is found[0]
    assert [*map(id, Draws(holder, Draws(bound).held).held)] == [id(one) for one in held if one is not found[5]]


def test_a_cell_that_is_not_set_yet_holds_none() -> None:
    def function() -> Any:
        return later

    assert Draws(Holder(function=function)).held == []
    later = random.Random(SEED)
    assert Draws(Holder(function=function)).held == [later]


def test_generators_of_another_number_are_left_alone() -> None:
    """The user has accepted that the run is another one."""
    one, two = Holder(own=random.Random(SEED)), Holder(own=random.Random(1), other=random.Random(2))
    expected = random.Random(1).random(), random.Random(2).random()
    Draws(two).set(as_text(Draws(one).held_states()))
    assert (two.own.random(), two.other.random()) == expected


class Drawing(Dataset[float]):
    """Its samples are drawn, from a generator of its own and from the process's."""

    def __init__(self) -> None:
        self.own = random.Random(SEED)
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> float:
        self.loaded.append(index)
        return 1000.0 * index + 100.0 * self.own.random() + random.random() + torch.rand(1).item()


class Run:
    """A training that loads a batch before it trains the one before it, as accelerate's loader does."""

    def __init__(self, workers: int, size: int = 2) -> None:
        torch.manual_seed(SEED)
        random.seed(SEED)
        self.dataset = Drawing()
        self.loader: DataLoader[float] = DataLoader(self.dataset, size, num_workers=workers)
        self.order = Order(self.loader)
        self.states: list[tuple[dict[str, Any], str, str]] = []  # behind each batch

    def train(self, first: int, noted: dict[str, Any], states: str, began: str) -> Iterator[tuple[list[float], float]]:
        """Batches, and what training drew with each."""
        order = self.order
        if began:  # the seed of workers is drawn then
            order.draws.set(began)
        began = order.draws.text()
        order.begin(first, noted, states)
        batches = iter(self.loader)
        given = next(batches)
        for place in range(order.base, order.length):
            following = next(batches, None)
            batch = order.batch_of(place, given)
            if place >= first:
                if place == first > 0 and (order.workers or first == order.length - 1):
                    order.draws.set(states)
                yield batch.tolist(), torch.rand(1).item()
                self.states.append((json.loads(json.dumps(order.note())), order.draws.text(), began))
            given = following


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [1, 2, 5, 6])
def test_resumed_epoch_has_the_batches_and_draws_of_the_whole_one(workers: int, first: int) -> None:
    whole = Run(workers)
    expected = list(whole.train(0, {}, "", ""))
    assert len(expected) == len({tuple(batch) for batch, _ in expected}) == 7
    resumed = Run(workers)
    torch.manual_seed(1)  # a new process has drawn otherwise
    random.seed(1)
    assert list(resumed.train(first, *whole.states[first - 1])) == expected[first:]
    if not workers:
        assert resumed.dataset.loaded == list(range(2 * first, 14))  # nothing before it was loaded
    assert (resumed.order.base, len(resumed.loader)) == (first - first % workers if workers else first, 7)


def test_resumed_epoch_of_batches_of_one_sample_goes_on_with_its_workers() -> None:
    whole, resumed = Run(2, size=1), Run(2, size=1)
    expected = list(whole.train(0, {}, "", ""))
    assert list(resumed.train(3, *whole.states[2])) == expected[3:]


def test_an_epoch_behind_a_resumed_one_begins_anew() -> None:
    whole, resumed = Run(0), Run(0)
    list(whole.train(0, {}, "", ""))
    list(resumed.train(3, *whole.states[2]))
    assert len(list(resumed.train(0, {}, "", ""))) == 7


def test_what_stands_in_for_a_dataset_has_its_attributes() -> None:
    run = Run(0)
    assert run.loader.dataset.loaded is run.dataset.loaded  # type: ignore[attr-defined]
    assert not hasattr(run.loader.dataset, "_hidden")
