"""Wan's blocks compiled while DiffSynth trains: one graph, close to eager, in every plan, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffsynth.models import wan_video_dit

import wanshim
from tests.compiling import use_aot_eager
from tests.contract.diffsynth import variants, video_job
from tests.contract.diffsynth.launched import call, check_refusal_is_reported, least_cosine, notes, plain, refuse, train
from tests.contract.diffsynth.variant_steps import step
from wanshim import settings
from wanshim.adapters.diffsynth.compiled_blocks import STEP, compile_blocks, graphs_of_a_block, refusal
from wanshim.adapters.diffsynth.splitting.micro_batch import micro_batch
from wanshim.adapters.diffsynth.training_road import Row
from wanshim.core.strategy import Request, Strategy
from wanshim.errors import FeatureUnavailable
from wanshim.undo import Undo

FEATURE, KEPT, SPLIT = "diffsynth.compiled_blocks", "diffsynth.kept_attention", "diffsynth.model_split"
ROTARY = wan_video_dit.rope_apply


@pytest.fixture(autouse=True)
def _own_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert wan_video_dit.rope_apply is ROTARY


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", ["t2v", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("i2v", "vace"))])
def test_variant_gives_nearly_the_same_loss_and_gradients(
    name: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "aot_eager":  # the runs below compile by inductor too
        use_aot_eager(monkeypatch)
    expected = step(variants.tiny(name), use_gradient_checkpointing=True)
    said: list[str] = []
    made = variants.tiny(name)
    with Undo() as undo:
        compile_blocks(made.pipe, undo, Row.of(said.append))
        found = step(made, use_gradient_checkpointing=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert said[-1].startswith("graphs compiled: 1, in ")
    assert (name == "vace") == ("VACE's own blocks are not compiled" in said[0])


RUNS = {
    "alone": {},
    "attention kept": {"KEEP": "attention"},
    "split, attention kept": {"DEVICES": "cpu:0,cpu:1", "PIPELINE": "0", "KEEP": "attention"},
    "pipeline, checkpoints offloaded": {"DEVICES": "cpu,cpu", "OFFLOAD": "on"},
    "streamed, attention kept": {"PLAN": "stream:3", "KEEP": "attention"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(given, id=name, marks=[pytest.mark.sweep] * (name != "split, attention kept"))
        for name, given in RUNS.items()
    ],
)
def test_run_compiles_one_graph_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    expected = plain(2)
    for name, value in {"COMPILE": "1", **variables}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    planned = "DEVICES" in variables or "PLAN" in variables
    wanshim.activate(f"none,{FEATURE},{KEPT}" + f",{SPLIT}" * planned)
    found = train(tmp_path / "ours", 2)
    said = notes(FEATURE)
    assert "blocks are compiled" in said
    assert "graphs compiled: 1, in " in said
    assert least_cosine(found, expected) > 0.999
    if "KEEP" in variables:
        assert "16 attentions kept" in notes(KEPT)
        assert "16 were used again" in notes(KEPT)


@pytest.mark.slow
def test_what_cannot_be_compiled_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on = settings.Settings(compile=True)
    assert refusal(call(), on) is None
    compiled = variants.tiny("t2v").dit
    compiled.blocks[0].compile()
    for given, read, reason in (
        (call(torch.nn.Linear(1, 1)), on, "Linear: its blocks"),
        (call(variants.tiny("s2v").dit), on, "WanS2VModel: its blocks"),
        (call(state=SimpleNamespace(deepspeed_plugin=object())), on, "DeepSpeed"),
        (call(state=SimpleNamespace(fsdp_plugin=object())), on, "FSDP"),
        (call(compiled), on, "the program compiles them itself"),
        (call(vap=object()), on, "vap computes"),
        (call(use_unified_sequence_parallel=True), on, "use_usp"),
        (call(), settings.Settings(chunk=512), "WANSHIM_CHUNK"),
        (call(), settings.Settings(base="int8"), "quantised"),
    ):
        assert reason in str(refusal(given, read))
    refuse(STEP, "no compiler", monkeypatch)
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    monkeypatch.setenv("WANSHIM_COMPILE", "1")
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(FeatureUnavailable, match="WANSHIM_COMPILE is unavailable here: no compiler"):
        train(tmp_path)


@pytest.mark.parametrize("split", [False, True], ids=["alone", "split"])
def test_refusal_is_reported_and_the_run_is_diffsynths_own(
    split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refusal_is_reported(STEP, {"COMPILE": "1"}, split, tmp_path, monkeypatch)


@pytest.mark.sweep
@pytest.mark.slow
def test_kept_blocks_give_the_bits_of_the_same_graphs_with_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_aot_eager(monkeypatch)
    monkeypatch.setenv("WANSHIM_COMPILE", "1")
    files = []
    for keep in ("off", "blocks"):
        monkeypatch.setenv("WANSHIM_KEEP", keep)
        wanshim.activate(f"none,{FEATURE},{KEPT}")
        files.append(video_job.train(tmp_path / keep, 2)[0])
        assert "graphs compiled: 1, in " in notes(FEATURE)
        assert ("4 blocks ran 12 times without being computed again" in notes(KEPT)) is (keep == "blocks")
        wanshim.deactivate()
        torch._dynamo.reset()
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("strategy", "processes", "graphs"),
    [(None, 1, 1), (None, 2, 4), (Strategy.SEQUENCE, 2, 4), (Strategy.RESIDENT, 2, 1), (Strategy.SPLIT, 1, 1)],
)
def test_graphs_of_a_block_are_four_where_ranks_may_exchange_tokens(
    strategy: Strategy | None, processes: int, graphs: int
) -> None:
    request = Request(strategy=strategy, block_changes={FEATURE: "blocks are compiled"})
    assert graphs_of_a_block(request, processes) == graphs
    assert graphs_of_a_block(replace(request, block_changes={}), processes) == 0


def test_compiled_block_keeps_less_than_it_does_as_it_is_and_more_as_four_graphs() -> None:
    pipe = video_job.module_with_video().pipe
    eager, one, four = (micro_batch(pipe, 480, None, graphs=graphs) for graphs in (0, 1, 4))
    assert one.kept < four.kept < eager.kept
    assert replace(one, kept=0) == replace(four, kept=0) == replace(eager, kept=0)
