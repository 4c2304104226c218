"""A dry run notes what a call launches: the same for any size of the same divisibility, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tests.distributed.decoding.tiny import make_latent, make_vae
from wanshim.cli import warm
from wanshim.core.decoding import find_binding, read_graph
from wanshim.core.decoding.dry_run import dry_run, usual_shapes
from wanshim.core.decoding.model.graph import Graph
from wanshim.core.decoding.operators.layout import used_strides
from wanshim.core.shared.kernel_launch import Launch

pytest.importorskip("triton", reason="this torch comes without Triton")
BF16 = torch.bfloat16
# By layout, verb and mode: the launches of a call whose convolutions go by engines. Of a video of 480x832 an H100 with
# cuDNN 9.19 launched all of the 2.1 VAE's, but for two by which a framework's norm of another precision is compared.
COUNTS = {
    ("2.1", "decode", True): 22,
    ("2.1", "decode", False): 16,
    ("2.1", "encode", True): 18,
    ("2.1", "encode", False): 16,
    ("2.2", "decode", True): 29,
    ("2.2", "decode", False): 17,
    ("2.2", "encode", True): 25,
    ("2.2", "encode", False): 16,
}


def graph_of(layout: str, verb: str) -> Graph:
    """Of the real widths."""
    return find_binding(warm.make_vae(layout, torch.device("meta"), BF16), verb).graph


def names(launches: Sequence[Launch]) -> set[str]:
    return {launch.kernel.fn.__name__ for launch in launches}


def arguments(launch: Launch) -> dict[str, Any]:
    return dict(zip(launch.kernel.arg_names, launch.arguments))


def norms(launches: Sequence[Launch]) -> list[dict[str, Any]]:
    return [arguments(each) for each in launches if each.kernel.fn.__name__ == "_norm"]


@pytest.mark.parametrize(("layout", "verb", "strict"), COUNTS)
def test_launches_of_a_usual_size(layout: str, verb: str, strict: bool) -> None:
    graph = graph_of(layout, verb)
    launches = dry_run(graph, usual_shapes(graph)[0], BF16, strict=strict, by="engines")
    assert len(launches) == COUNTS[layout, verb, strict]
    assert len({(each.kernel.fn.__name__, each.arguments, each.options) for each in launches}) == len(launches)
    assert ("_transpose" in names(launches)) is strict, "of weights and inputs that are compared channels last"
    assert ("_attend" in names(launches)) is (not strict and layout == "2.1"), "of 384 channels"


@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_usual_sizes_are_those_of_the_models(verb: str) -> None:
    for layout, pixels, sides in (("2.1", 8, [(480, 832), (720, 1280)]), ("2.2", 16, [(480, 832), (704, 1280)])):
        graph = graph_of(layout, verb)
        scale = 1 if verb == "encode" else pixels
        assert [shape[3:] for shape in usual_shapes(graph)] == [(h // scale, w // scale) for h, w in sides]
        for shape in usual_shapes(graph):
            assert graph.extent(shape)[:3] == (1, graph.input_channels, 9)


@pytest.mark.parametrize("strict", [True, False])
def test_sizes_of_one_divisibility_and_longer_videos_launch_the_same(strict: bool) -> None:
    graph = read_graph(make_vae("2.1", BF16))

    def launched(frames: int, height: int, width: int, batch: int = 1) -> set[Launch]:
        shape = (batch, graph.input_channels, frames, height, width)
        return set(dry_run(graph, shape, BF16, strict=strict, by="engines"))

    assert launched(9, 12, 24) == launched(21, 12, 24)
    assert launched(9, 12, 24) == launched(9, 20, 24)
    if strict:  # others read no rows in place
        assert launched(9, 12, 24) != launched(9, 12, 18)


def test_what_cudnn_allows_leads_to_other_kernels() -> None:
    """Without engines strict convolutions lie channels first, and fast ones do not use Winograd's method."""
    graph = graph_of("2.1", "decode")
    shape = usual_shapes(graph)[0]
    strict = [dry_run(graph, shape, BF16, strict=True, by=by) for by in ("engines", "torch")]
    sums = [[arguments(each) for each in some if each.kernel.fn.__name__ == "_sum"] for some in strict]
    channels_last = [{each["xc"] == (False, True, False) for each in some} for some in sums]
    assert channels_last == [{True, False}, {False}]
    assert {each["HAS_BIAS"] for each in sums[1]} == {True, False}, "torch adds the bias, or the kernel does"
    assert "_transpose" not in names(strict[1])
    either = {*dry_run(graph, shape, BF16, strict=True, by="either")}
    assert either - {*strict[0], *strict[1]}, "what one writes channels last another reads channels first"
    fast = [names(dry_run(graph, shape, BF16, strict=False, by=by)) for by in ("engines", "torch")]
    assert fast[0] - fast[1] == {"_split", "_sum_of_products"}
    few = (*shape[:2], 1, *shape[3:])
    assert "_split" not in names(dry_run(graph, few, BF16, strict=False, by="engines")), "too few frames for a gain"


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("verb", "strict"), [*product(("decode", "encode"), (True, False))])
def test_dry_run_touches_no_weight(verb: str, strict: bool, dtype: torch.dtype) -> None:
    vae = make_vae("2.1", dtype)
    graph = read_graph(vae, verb)
    before = [(name, x.data_ptr(), x.stride(), x._version, x.device) for name, x in vae.named_parameters()]
    calls: list[object] = []
    for module in vae.modules():
        module.register_forward_pre_hook(lambda *args: calls.append(args))
        module.register_forward_hook(lambda *args: calls.append(args))
        module.forward = lambda *args: calls.append(args)
    shape = (1, graph.input_channels, 3, 8, 8) if verb == "decode" else (1, 3, 9, 64, 64)
    random = torch.get_rng_state()
    launches = dry_run(graph, shape, dtype, strict=strict, by="torch")
    assert launches
    assert {each.arguments[0][0] for each in launches} == {dtype}
    assert [(name, x.data_ptr(), x.stride(), x._version, x.device) for name, x in vae.named_parameters()] == before
    assert torch.equal(torch.get_rng_state(), random)
    assert not calls, "hooks, and what replaces a forward, are for the user's calls"


def test_precision_of_a_framework_s_norms_shows_without_a_comparison() -> None:
    """diffusers casts to fp32 before it computes lengths, other frameworks do not."""
    vae, shape = make_vae("2.1", BF16), (1, 4, 3, 8, 8)
    graph = read_graph(vae)

    def sizes() -> set[object]:
        found = norms(dry_run(graph, shape, BF16, strict=True, by="torch"))
        return {each["SIZE"][0] for each in found if each["SILU"] and each["C"] != (False, True, False)}

    assert sizes() == {torch.float32}
    norm = type(next(iter(graph.norms())).module)
    own, norm.forward = norm.forward, lambda self, x: F.normalize(x, dim=1) * self.scale * self.gamma
    try:
        assert sizes() == {BF16}
        norm.forward = lambda self, x: x
        assert sizes() == {torch.float32}, "where it does not show"
    finally:
        norm.forward = own


def test_no_other_thread_is_told_of_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps that in one flag for all of them, which two modes that end in the order of their beginning leave set:
    torch.compile then compiles nothing more."""
    graph = graph_of("2.1", "decode")
    norm, told = type(next(iter(graph.norms())).module), list[bool]()
    forward = norm.forward
    monkeypatch.setattr(
        norm, "forward", lambda self, x: (told.append(is_in_torch_dispatch_mode()), forward(self, x))[1]
    )
    assert norms(dry_run(graph, usual_shapes(graph)[0], BF16, strict=True, by="engines"))
    assert told
    assert not any(told)


def test_real_operators_after_a_dry_run_compute() -> None:
    vae, latent = make_vae("2.1"), make_latent(3)
    expected = vae.decode(latent).sample
    with pytest.raises(ValueError, match="not enough values"):
        dry_run(read_graph(vae), latent.shape[1:], latent.dtype, strict=True, by="torch")
    assert torch.equal(vae.decode(latent).sample, expected)


def test_strides_that_are_not_used_compile_no_kernel_of_their_own() -> None:
    x = torch.empty((2, 3, 4, 5, 6), device="meta")
    assert used_strides(x) == x.stride()
    assert used_strides(x[:1, :, :1]) == (0, 120, 0, 6, 1)
