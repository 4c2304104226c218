"""`diffsynth.patchify` against the real WanModel."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffsynth.models import wan_video_dit
from diffsynth.models.wan_video_dit import WanModel
from diffsynth.models.wan_video_dit_s2v import WanS2VModel
from diffsynth.pipelines.wan_video import model_fn_wan_video

import wanshim
from tests.contract.diffsynth import wan
from wanshim.patching import Finding, SourceTree
from wanshim.patching.probe import Verdict
from wanshim.select import catalog

SMALL = {**wan.TINY, "num_layers": 2}
KINDS = ["t2v", "i2v"]
USP = "diffsynth.utils.xfuser.xdit_context_parallel"


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def a_model(kind: str, cls: type[WanModel] = WanModel) -> WanModel:
    torch.manual_seed(0)
    model = wan.wan_model(kind, SMALL).eval()
    model.__class__ = cls
    return model


def call(model: WanModel | Callable[..., Any], kind: str, batch: int = 1) -> torch.Tensor:
    sample = wan.inputs(kind, batch=batch)
    return model(x=sample.pop("latents"), **sample)


def expected(model: WanModel, kind: str, batch: int = 1) -> torch.Tensor:
    return model_fn_wan_video(model, **wan.inputs(kind, batch=batch))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2])
def test_direct_forward_equals_the_pipelines_function_bit_for_bit(kind: str, batch: int) -> None:
    model = a_model(kind)
    before = expected(model, kind, batch)
    wanshim.activate("none,diffsynth.patchify")
    found = call(model, kind, batch)
    assert found.shape == (batch, 16, 3, 8, 8)
    assert torch.equal(found, before)
    assert torch.equal(expected(model, kind, batch), before)
    assert wanshim.report(strict=True).row("diffsynth.patchify").calls == 1


@pytest.mark.parametrize("kind", KINDS)
def test_direct_forward_fails_without_the_patch(kind: str) -> None:
    model = a_model(kind)
    with pytest.raises(ValueError, match="unpack"):
        call(model, kind)
    wanshim.activate("none,diffsynth.patchify")
    call(model, kind)
    wanshim.deactivate()
    with pytest.raises(ValueError, match="unpack"):
        call(model, kind)


def test_training_forward_gives_the_pipelines_gradients() -> None:
    wanshim.activate("none,diffsynth.patchify")
    gradients = []
    for forward in (call, expected):
        model = a_model("t2v").train()
        with torch.enable_grad():
            forward(model, "t2v").sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(g is not None for g in gradients[0])
    assert all(map(torch.equal, *gradients))


def test_no_patchify_is_touched_and_its_value_stays_one_tensor() -> None:
    originals = [vars(WanModel)["patchify"], vars(WanS2VModel)["patchify"]]
    model, video = a_model("t2v"), wan.inputs("t2v")["latents"]
    before = model.patchify(video)
    wanshim.activate("none,diffsynth.patchify")
    call(model, "t2v")
    assert [vars(WanModel)["patchify"], vars(WanS2VModel)["patchify"]] == originals
    after = model.patchify(video)
    assert after.shape == (1, SMALL["dim"], 3, 4, 4)
    assert torch.equal(after, before)


def test_subclass_that_returns_the_pair_itself_passes_through() -> None:
    class Mended(WanModel):
        def patchify(self, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, tuple[int, int, int]]:
            embedded = super().patchify(x, *args)
            return embedded.flatten(2).transpose(1, 2), tuple(embedded.shape[2:])

    model = a_model("t2v", Mended)
    before = call(model, "t2v")
    wanshim.activate("none,diffsynth.patchify")
    assert torch.equal(call(model, "t2v"), before)
    assert torch.equal(before, expected(a_model("t2v"), "t2v"))


def test_forward_with_a_hook_on_the_model_runs_it() -> None:
    wanshim.activate("none,diffsynth.patchify")
    model = a_model("t2v")
    seen: list[tuple[int, ...]] = []
    model.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    call(model, "t2v")
    assert seen == [(1, 48, SMALL["dim"]), (1, 16, 3, 8, 8)]


@pytest.mark.slow
def test_compiled_caller_sees_the_patch() -> None:
    """A patch that torch.compile skips would raise here: the plain forward cannot unpack."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def step(model: WanModel, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return model(x=x, timestep=timestep, context=context) * 2

    wanshim.activate("none,diffsynth.patchify")
    model, sample = a_model("t2v"), wan.inputs("t2v")
    arguments = (model, sample["latents"], sample["timestep"], sample["context"])
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=keep, fullgraph=True)
    assert torch.equal(compiled(*arguments), step(*arguments))
    assert len(graphs) == 1
    assert any("conv3d" in str(node.target) for node in graphs[0].graph.nodes)
    wanshim.deactivate()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="unpack"):
        torch.compile(step, backend="eager", fullgraph=True)(*arguments)


# -- sequence parallelism ------------------------------------------------------------------------------


class OneRank:
    """A sequence-parallel group of one: what xfuser answers when a single GPU runs."""

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Doubles of xfuser and yunchang, which import CUDA kernels and cannot be imported without a GPU. On one rank
    `usp_dit_forward` asks them for rank, size and group alone; attention is DiffSynth's own."""
    names = {
        "yunchang": {},
        "yunchang.kernels": {"AttnType": object},
        "yunchang.comm": {},
        "yunchang.comm.all_to_all": {"SeqAllToAll4D": object},
        "xfuser": {},
        "xfuser.core": {},
        "xfuser.core.distributed": {
            "get_sequence_parallel_rank": lambda: 0,
            "get_sequence_parallel_world_size": lambda: 1,
            "get_sp_group": OneRank,
        },
        "xfuser.core.long_ctx_attention": {"xFuserLongContextAttention": object},
    }
    for name, values in names.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    yield
    wanshim.deactivate()
    for name in (USP, "diffsynth.utils.xfuser"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["activate", "import"])
def test_sequence_parallel_forward_works_too(kind: str, first: str) -> None:
    if first == "activate":
        wanshim.activate("none,diffsynth.patchify")
    package = importlib.import_module("diffsynth.utils.xfuser")
    original = package.usp_dit_forward
    if first == "import":
        with pytest.raises(ValueError, match="unpack"):
            call(types.MethodType(original, a_model(kind)), kind)
        wanshim.activate("none,diffsynth.patchify")
        assert package.usp_dit_forward is not original
    model = a_model(kind)
    model.forward = types.MethodType(package.usp_dit_forward, model)
    assert torch.equal(call(model, kind, batch=2), expected(a_model(kind), kind, batch=2))
    seams = {seam.target: seam for seam in wanshim.report().row("diffsynth.patchify").seams}
    assert (seams[f"{USP}:usp_dit_forward"].state, seams[f"{USP}:usp_dit_forward"].calls) == ("exercised", 1)
    wanshim.deactivate()
    assert package.usp_dit_forward is sys.modules[USP].usp_dit_forward
    assert first == "activate" or package.usp_dit_forward is original


# -- the judge -----------------------------------------------------------------------------------------

FLATTENED = """x = self.patchify(x)
        f, h, w = x.shape[2:]
        x = rearrange(x, 'b c f h w -> b (f h w) c').contiguous()"""


def judged(folder: Path, *changes: tuple[str, str]) -> Finding | None:
    """The judge's finding on a copy of wan_video_dit.py with some lines rewritten."""
    source = Path(wan_video_dit.__file__).read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "wan_video_dit.py").write_text(source)
    judge = catalog.discover().features["diffsynth.patchify"].judge
    assert judge is not None
    return judge(SourceTree("diffsynth", folder))


RETURN = """            x = x[0].unsqueeze(0)
        return x
"""


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ([], Verdict.PATCH, "WanModel.forward unpacks a pair from patchify, which returns one tensor"),
        (
            [("x, (f, h, w) = self.patchify(x)", FLATTENED)],
            Verdict.NATIVE,
            "WanModel.forward no longer unpacks a pair from patchify",
        ),
        (
            [(RETURN, RETURN.replace("return x", "return x.flatten(2).transpose(1, 2), x.shape[2:]"))],
            Verdict.NATIVE,
            "WanModel.patchify returns the pair that forward unpacks",
        ),
        (
            [("x, (f, h, w) = self.patchify(x)", "x, f, h, w = embed(self, x)")],
            Verdict.NATIVE,
            "WanModel.forward no longer calls patchify",
        ),
        (
            [("def patchify(self", "def embed(self")],
            Verdict.ABSENT,
            "there is no diffsynth.models.wan_video_dit.WanModel with a patchify of its own",
        ),
    ],
    ids=["as_released", "mended_in_forward", "mended_in_patchify", "not_called", "renamed"],
)
def test_judge_reads_from_the_source_whether_upstream_has_mended_it(
    tmp_path: Path, changes: list[tuple[str, str]], verdict: Verdict, reason: str
) -> None:
    assert judged(tmp_path / "diffsynth", *changes) == Finding(verdict, reason)


def test_judge_leaves_code_that_it_cannot_tell_undecided(tmp_path: Path) -> None:
    apart = ("x, (f, h, w) = self.patchify(x)", "embedded = self.patchify(x)\n        x, (f, h, w) = embedded")
    assert judged(tmp_path / "diffsynth", apart) is None
