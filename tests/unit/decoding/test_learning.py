"""Learning spread over calls: what is known of other sizes serves first, and searching has a share of the time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.decoding.engines_double import PADDING, STRIDE, Double, Made, Timed, inputs, key_of
from wanshim.core.decoding.operators import learning as learning_module
from wanshim.core.decoding.operators import strict_convolutions
from wanshim.core.decoding.operators.convolution import torch_convolve
from wanshim.core.decoding.operators.cudnn_graph import Engine
from wanshim.core.decoding.operators.engine_store import EngineStore, engine_table
from wanshim.core.decoding.operators.engines import Engines
from wanshim.core.decoding.operators.learning import Learning, NotYet
from wanshim.core.decoding.operators.winograd import split_weight

MADE = {1: 8.0, 2: 5.0, 3: 7.0}


class Clock:
    """Seconds that pass as the test says, and one with each engine that is timed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(learning_module, "perf_counter", clock)
    return clock


class Slow(Double):
    def __init__(self, clock: Clock) -> None:
        super().__init__({number: Made(time) for number, time in MADE.items()})
        self.clock = clock

    def milliseconds(self, work: object) -> float:
        self.clock.now += 1.0
        return super().milliseconds(work)  # type: ignore[arg-type]


def engines_of(double: Double, folder: Path) -> Engines:
    return Engines(double, EngineStore(folder), Learning())  # type: ignore[arg-type]


def test_a_call_spends_its_share_on_learning_and_later_ones_go_on(tmp_path: Path, clock: Clock) -> None:
    double = Slow(clock)
    engines = engines_of(double, tmp_path)
    x, weight = inputs()
    expected = torch_convolve(x, weight, STRIDE, PADDING)
    spent = []
    for _ in range(30):
        begun = clock.now
        with engines.call():
            clock.now += 20.0  # other work
            working = clock.now
            assert torch.equal(engines(x, weight, STRIDE, PADDING), expected)
            spent.append(clock.now - working)
        assert clock.now - begun >= 20.0
    assert double.searches == 1  # it goes on with the same one
    assert all(sum(spent[:n]) <= 0.1 * 20.0 * n + 8.0 for n in range(1, 31))  # one engine more, which was begun
    assert spent[0] > 0
    assert spent[-1] == 0
    double.made[2].lengths.clear()
    with engines.call():
        engines(x, weight, STRIDE, PADDING)
    assert len(double.made[2].lengths) == 1
    assert Engines(double, EngineStore(tmp_path))(x, weight, STRIDE, PADDING) is not None  # type: ignore[arg-type]
    assert double.searches == 1  # kept for other processes


def test_until_all_engines_are_timed_torch_computes_and_nothing_is_kept(tmp_path: Path, clock: Clock) -> None:
    double = Slow(clock)
    engines = engines_of(double, tmp_path)
    x, weight = inputs()
    with engines.call():
        clock.now += 1.0
        engines(x, weight, STRIDE, PADDING)
        with pytest.raises(NotYet):
            engines.equal(x, weight, STRIDE, PADDING, lambda out: True)
        assert engines.by_winograd(x, weight, lambda: split_weight(weight), PADDING) is None
    assert list(tmp_path.iterdir()) == []


def test_another_size_takes_the_engine_of_the_nearest_one_without_a_search(tmp_path: Path, clock: Clock) -> None:
    for rows, engine in ((10, 1), (40, 3)):
        known = Double({engine: Made(2.0)})
        Engines(known, EngineStore(tmp_path))(*key_of(rows=rows))  # type: ignore[arg-type]
    double = Slow(clock)
    for rows, used in ((12, 1), (32, 3)):
        arguments = key_of(rows=rows)
        for made in double.made.values():
            made.lengths.clear()
        out = engines_of(double, tmp_path)(*arguments)
        assert torch.equal(out, torch_convolve(*arguments))
        assert [number for number, made in double.made.items() if made.lengths] == [used]
    assert double.searches == 0


def test_engine_of_another_size_that_is_wrong_here_is_not_used(tmp_path: Path, clock: Clock) -> None:
    Engines(Double({1: Made(2.0)}), EngineStore(tmp_path))(*key_of())  # type: ignore[arg-type]
    double = Slow(clock)
    double.made[1].change = torch.zeros_like
    arguments = key_of(rows=12)
    assert torch.equal(engines_of(double, tmp_path)(*arguments), torch_convolve(*arguments))


def test_engine_of_a_size_far_away_or_of_another_layer_is_not_tried(tmp_path: Path) -> None:
    store = EngineStore(tmp_path)
    facts = {"gpu": "NVIDIA X", "input": [96, 704, 1280], "weight": [96, 96, 3, 3, 3], "stride": [1], "padding": [0]}
    store.put(facts, Engine(1, {}))

    def near(**changed: object) -> list[Engine | None]:
        return EngineStore(tmp_path).near(facts | changed)

    assert near(input=[96, 480, 832]) == [Engine(1, {})]
    assert near(dtype="torch.float16") == [Engine(1, {})]
    assert near(input=[96, 44, 80]) == []
    assert near(gpu="NVIDIA Y") == near(weight=[96, 96, 1, 1, 1]) == near(equal="random values") == []
    assert EngineStore(tmp_path).near({"gpu": "NVIDIA X"}) == []
    store.put(facts | {"input": [96, 352, 640]}, None)
    assert near(input=[96, 480, 832]) == [None]  # nothing behind torch's own choice is of use
    assert near(input=[96, 704, 1200]) == [Engine(1, {}), None]


def test_strict_looks_for_a_better_way_once_there_is_time(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def channels_last(x: torch.Tensor) -> torch.Tensor:  # its own is a kernel for GPUs
        return x.to(memory_format=torch.channels_last_3d)

    monkeypatch.setattr(strict_convolutions.kernels, "channels_last", channels_last)
    module = torch.nn.Conv3d(8, 16, 3, bias=False).bfloat16()
    conv = SimpleNamespace(name="conv", current=lambda: module)
    like = torch.empty(0, dtype=torch.bfloat16)
    double = Slow(clock)
    ways = strict_convolutions.Ways()
    ways.engines = engines_of(double, tmp_path)
    found = []
    for _ in range(8):
        with ways.engines.call():
            clock.now += 20.0
            found.append(ways.of(conv, (1, 8, 5, 10, 12), (1, 1), like))  # type: ignore[arg-type]
    double.made[2].lengths.clear()
    assert found[0] != found[-1]
    assert found[-1].relaid is not None
    found[-1].relaid(torch.ones(1, 8, 5, 10, 12).bfloat16(), module.weight, (1, 1, 1), (0, 1, 1))
    assert double.made[2].lengths


def test_table_of_the_package_names_engines_for_every_layer_of_the_vaes() -> None:
    table = engine_table((9, 0))
    assert len(table) > 100
    assert engine_table((1, 0)) == []
    store = EngineStore(None, table)
    facts = dict(table[0][0]) | {"gpu": "NVIDIA H100"}
    assert store.near(facts)[0] == table[0][1]
    kept = json.loads(json.dumps([facts for facts, _ in table]))
    assert all(facts["cudnn"] and facts["driver"] and len(facts["input"]) == 3 for facts in kept)


def test_product_of_winograd_at_another_size_is_taken_from_the_nearest(tmp_path: Path, clock: Clock) -> None:
    def used(double: Double, rows: int, engines: Engines) -> bool:
        x, weight, _, padding = key_of(rows=rows, frames=10)
        return engines.by_winograd(x, weight, lambda: split_weight(weight), padding) is not None

    double = Timed({1: Made(8.0)}, product=1.3)
    assert used(double, 10, Engines(double, EngineStore(tmp_path)))  # type: ignore[arg-type]
    searches = double.searches
    assert used(double, 12, engines_of(double, tmp_path))
    assert double.searches == searches
