"""`parallelize_decode` in one process: it goes in, equals the VAE's decode, and comes out by identity."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed.decoding.tiny import LAYOUTS, encode, make_latent, make_vae, make_video, tiny, vae_config
from wanshim.core.decoding import Binding, ParallelVae, call, parallelize_decode, parallelize_encode, read_graph, run
from wanshim.core.decoding.model.binding import find_binding
from wanshim.core.decoding.plan import CallFacts, VaeJob
from wanshim.errors import ModelInvalid

THIRD_PARTY = """
from diffusers import AutoencoderKLWan
from wanshim.core.decoding import Binding, read_graph

class VAE(AutoencoderKLWan):
    def frames(self, latent):
        return self.decode(latent).sample

def build_decoder(vae):
    graph = read_graph(vae, own=lambda vae, z: vae.frames(z))
    return Binding(graph=graph, target=vae, methods={"frames": lambda call, vae, latent: call(latent)})
"""


ALONE: Any = SimpleNamespace(size=1, rank=0, ranks=[0], verb="decode")


def facts(parallel: ParallelVae, given: torch.Tensor) -> CallFacts:
    return parallel._facts(ALONE, given, parallel._state(given), None, lean=False)


def agreed(parallel: ParallelVae, given: torch.Tensor, *others: CallFacts) -> VaeJob:
    every = [facts(parallel, given), *others]
    return parallel._agree(ALONE, given, parallel._state(given), every, None, lean=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strict_decode_in_one_process_is_bit_identical(layout: str) -> None:
    vae, latent = make_vae(layout), make_latent(3, batch=2)
    reference = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    assert torch.equal(vae.decode(latent).sample, reference)
    assert str(handle.plan).startswith("single on 1 rank, strict, compared")
    handle.remove()


def test_remove_puts_method_and_weight_layouts_back_and_may_be_called_twice() -> None:
    vae, latent = make_vae("2.1"), make_latent(2)
    strides = {name: parameter.stride() for name, parameter in vae.named_parameters()}
    parameters = dict(vae.named_parameters())
    handle = parallelize_decode(vae, strict=False)
    vae.decode(latent)
    assert {n: p.stride() for n, p in vae.named_parameters()} != strides
    handle.remove()
    handle.remove()
    assert "_decode" not in vae.__dict__
    assert {n: p.stride() for n, p in vae.named_parameters()} == strides
    assert all(parameters[n] is p for n, p in vae.named_parameters())


def test_second_handle_on_one_vae_is_refused() -> None:
    vae = make_vae("2.1")
    handle = parallelize_decode(vae)
    with pytest.raises(ModelInvalid, match="parallelized already"):
        parallelize_decode(vae)
    handle.remove()


def test_latent_that_wants_gradients_goes_the_frameworks_way() -> None:
    vae, latent = make_vae("2.1"), make_latent(1).requires_grad_()
    handle = parallelize_decode(vae)
    vae.decode(latent).sample.sum().backward()
    assert latent.grad is not None
    assert handle.plan.tries  # none has run
    handle.remove()


def test_latent_given_by_name_is_decoded_and_its_gradients_are_seen() -> None:
    vae, latent = make_vae("2.1"), make_latent(1)
    expected = vae.decode(latent).sample
    binding = Binding(graph=read_graph(vae), target=vae, methods={"decode": lambda call, vae, given: (call(given),)})
    handle = parallelize_decode(vae, binding=binding)
    assert torch.equal(vae.decode(z=latent)[0], expected)
    assert vae.decode(z=latent.requires_grad_()).sample.requires_grad
    handle.remove()


def test_frames_that_another_library_decodes_go_where_the_output_says() -> None:
    vae, latent, seen = make_vae("2.1"), make_latent(2), []
    handle = parallelize_decode(vae, uint8=True, on_chunk=lambda frames, start: seen.append(frames.dtype))
    vae._is_parallelized = True  # as cache-dit leaves it
    assert vae.decode(latent).sample is None
    assert seen == [torch.uint8]
    handle.remove()


def test_builder_of_a_third_party_is_found_for_its_class_and_before_that_of_a_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "third_party.py").write_text(THIRD_PARTY)
    information = tmp_path / "third_party-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[wanshim.decoder_graphs]\nthird_party.VAE = third_party:build_decoder\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    vae, latent = tiny(importlib.import_module("third_party").VAE, vae_config("2.1")), make_latent(2)
    expected = vae.frames(latent)
    handle = parallelize_decode(vae)
    assert torch.equal(vae.frames(latent), expected)
    assert handle.binding.methods.keys() == {"frames"}
    assert handle.plan.compared
    handle.remove()
    assert find_binding(vae, "encode").methods.keys() == {"_encode"}  # diffusers'


def test_unknown_vae_names_what_is_known() -> None:
    with pytest.raises(ModelInvalid, match=r"no decoder graph for torch\.nn.*AutoencoderKLWan"):
        parallelize_decode(torch.nn.Linear(1, 1))


def test_decoder_built_another_way_names_the_module() -> None:
    vae = make_vae("2.1")
    vae.decoder.up_blocks[0].resnets[0].nonlinearity = torch.nn.ReLU()
    with pytest.raises(ModelInvalid, match=r"up_blocks\.0\.resnets\.0\.nonlinearity"):
        read_graph(vae)


@pytest.mark.parametrize(
    ("place", "module", "expected"),
    [
        (0, torch.nn.Upsample(scale_factor=2.0, mode="bilinear"), "nearest-exact upsampling by 2"),
        (1, torch.nn.Conv2d(8, 4, 5, padding=2), "a convolution of 3 x 3 pixels"),
    ],
)
def test_other_upsampling_is_refused(place: int, module: torch.nn.Module, expected: str) -> None:
    vae = make_vae("2.1")
    vae.decoder.up_blocks[0].upsamplers[0].resample[place] = module
    with pytest.raises(ModelInvalid, match=rf"resample\.{place} of the VAE .* Expected {expected}"):
        read_graph(vae)


@pytest.mark.parametrize("shape", [(1, 4, 0, 8, 8), (1, 16, 3, 8, 8), (1, 4, 8, 8)])
def test_latent_that_does_not_fit_is_refused_with_what_would(shape: tuple[int, ...]) -> None:
    vae = make_vae("2.1")
    handle = parallelize_decode(vae)
    expected = rf"a latent of shape \[{', '.join(map(str, shape))}\]\. Expected \[batch, 4, frames, height, width\]"
    with pytest.raises(ModelInvalid, match=expected):
        handle.parallel(torch.zeros(shape))
    handle.remove()


@pytest.mark.parametrize(
    ("layout", "shape", "sizes"),
    [
        ("2.1", (1, 3, 5, 7, 64), "height and width at least 8"),
        ("2.2", (1, 3, 5, 32, 40), "height and width multiples of 16"),
        ("2.2", (1, 12, 5, 32, 32), "height and width multiples of 16"),
        ("2.1", (1, 3, 0, 32, 32), "height and width at least 8"),
    ],
)
def test_video_that_does_not_fit_is_refused_with_what_would(layout: str, shape: tuple[int, ...], sizes: str) -> None:
    handle = parallelize_encode(make_vae(layout))
    with pytest.raises(ModelInvalid, match=rf"a video of shape .* Expected \[batch, 3, frames, .*\], {sizes}"):
        handle.parallel(torch.zeros(shape))
    handle.remove()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strict_encode_in_one_process_is_bit_identical_and_removed_without_trace(layout: str) -> None:
    vae, video = make_vae(layout), make_video(9, 48, 80, batch=2)
    vae.enable_slicing()  # one call a sample
    reference = encode(vae, video)
    handle = parallelize_encode(vae)
    assert torch.equal(encode(vae, video), reference)
    assert str(handle.plan).startswith("single on 1 rank, strict, compared")
    handle.remove()
    handle.remove()
    assert not {"encode", "_encode", "_wanshim_encode"} & set(vae.__dict__)


def test_decode_and_encode_of_one_vae_are_parallelized_apart() -> None:
    vae = make_vae("2.1")
    handles = [parallelize_decode(vae), parallelize_encode(vae)]
    with pytest.raises(ModelInvalid, match=r"Expected one parallel encode per VAE"):
        parallelize_encode(vae)
    for handle in handles:
        handle.remove()


def test_tile_mode_of_an_encode_is_refused() -> None:
    with pytest.raises(ModelInvalid, match=r"encode mode 'tile'.*temporal, spatial"):
        parallelize_encode(make_vae("2.1"), mode="tile")


def test_video_that_wants_gradients_goes_the_frameworks_way() -> None:
    vae, video = make_vae("2.1"), make_video(1, 16, 16).requires_grad_()
    handle = parallelize_encode(vae)
    encode(vae, video).sum().backward()
    assert video.grad is not None
    assert handle.plan.tries  # none has run
    handle.remove()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda vae: setattr(vae.encoder.down_blocks[1].resample[1], "stride", (1, 1)), r"down_blocks\.1\.resample\.1"),
        (
            lambda vae: vae.encoder.down_blocks[1].resample.__setitem__(0, torch.nn.ZeroPad2d(1)),
            r"down_blocks\.1\.resample\.0",
        ),
        (lambda vae: setattr(vae.encoder, "nonlinearity", torch.nn.ReLU()), r"encoder\.nonlinearity"),
    ],
)
def test_encoder_built_another_way_names_the_module(change: Any, name: str) -> None:
    vae = make_vae("2.1")
    change(vae)
    with pytest.raises(ModelInvalid, match=name):
        read_graph(vae, "encode")


@pytest.mark.parametrize("output", ["rank0", 0, (0,), [0]])
def test_output_names_one_rank_in_any_of_its_ways(output: Any) -> None:
    vae, latent = make_vae("2.1"), make_latent(2)
    reference = vae.decode(latent).sample
    handle = parallelize_decode(vae, output=output)
    assert torch.equal(vae.decode(latent).sample, reference)
    handle.remove()


@pytest.mark.parametrize("output", ["rank", "0", "none", "rank-1", "", -1, True, (), (0, 0), ("rank0",), 1.0])
def test_output_that_names_no_rank_is_refused(output: Any) -> None:
    vae = make_vae("2.1")
    with pytest.raises(ModelInvalid, match=r"output=.*Expected 'all', a rank of the group"):
        parallelize_decode(vae, output=output)
    assert not {"decode", "_decode", "_wanshim_decode"} & set(vae.__dict__)


def test_frames_that_a_callback_took_are_none_in_the_result() -> None:
    vae, latent, seen = make_vae("2.1"), make_latent(2, batch=2), []
    vae.enable_slicing()
    handle = parallelize_decode(vae, on_chunk=lambda frames, start: seen.append(frames.shape[2]))
    assert vae.decode(latent).sample is None
    assert vae.decode(latent, return_dict=False) == (None,)
    assert sum(seen) == 2 * 2 * 5
    handle.remove()
    assert vae.decode(latent).sample.shape[2] == 5


def test_latent_that_wants_gradients_keeps_its_frames_whatever_the_output() -> None:
    vae, latent = make_vae("2.1"), make_latent(1).requires_grad_()
    handle = parallelize_decode(vae, on_chunk=lambda frames, start: None)
    assert vae.decode(latent).sample.requires_grad
    handle.remove()


@pytest.mark.parametrize("parallelize", [parallelize_decode, parallelize_encode])
def test_engines_are_asked_for_unless_they_are_off(parallelize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(run, "engines_on", lambda device, *args: asked.append(device))
    parallelize(make_vae("2.1"), engines=False).remove()
    assert asked == []
    parallelize(make_vae("2.1")).remove()
    assert asked == [torch.device("cpu")]


@pytest.mark.parametrize(
    ("own", "other", "together"),
    [
        (None, [], None),  # a rank that has not compared yet: all stay in the prediction
        ([], [], ()),
        (["up"], ["down", "up"], ("down", "up")),
    ],
)
def test_ranks_predict_for_every_convolution_that_stays_channels_first_on_any_of_them(
    own: list[str] | None, other: list[str], together: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae, latent = make_vae("2.1"), make_latent(1)
    handle = parallelize_decode(vae)
    parallel = handle.parallel
    theirs = replace(facts(parallel, latent), strict_cuda=True, channels_first=other, by_winograd=True)
    assert not agreed(parallel, latent, theirs).strict_cuda  # this rank has no GPU
    monkeypatch.setattr(parallel.operators, "fused", lambda given: True)
    monkeypatch.setattr(parallel.operators.checks.ways, "channels_first", lambda shape: own)
    job = agreed(parallel, latent, theirs)
    assert job.strict_cuda
    assert job.channels_first == together
    assert job.by_winograd  # the other takes the memory
    handle.remove()


@pytest.mark.parametrize("strict", [True, False])
def test_host_that_compares_waits_for_the_device_within_the_deadline_of_the_call(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engines:
        settle: Any = None
        by_winograd: Any = None

    engines, drained = Engines(), []
    monkeypatch.setattr(run, "engines_on", lambda *args: engines)
    handle = parallelize_decode(make_vae("2.1"), strict=strict)
    parallel, latent = handle.parallel, make_latent(1)
    job = parallel._job((1, 4, 1, 9, 14), 1, torch.float32, strict_cuda=True)
    plan = parallel._plans(job)[0]

    class Comm:
        def checkpoint(self, *, drain: bool) -> None:
            drained.append(drain)

    with parallel.operators.of(Comm(), plan, job, latent, torch.float32):  # type: ignore[arg-type]
        (parallel.operators.checks.ways if strict else engines).settle()
    assert drained == [True]
    handle.remove()


@pytest.mark.parametrize("fits", [True, False])
def test_operators_use_winograd_only_where_the_plan_does(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = SimpleNamespace(settle=None, by_winograd=object())
    monkeypatch.setattr(run, "engines_on", lambda *args: engines)
    handle = parallelize_decode(make_vae("2.1"), strict=False)
    parallel, latent = handle.parallel, make_latent(1)
    job = parallel._job((1, 4, 1, 9, 14), 1, torch.float32, by_winograd=fits)
    comm: Any = SimpleNamespace(checkpoint=lambda **how: None)
    with parallel.operators.of(comm, parallel._plans(job)[0], job, latent, torch.float32) as ops:
        assert ops._by_winograd is (engines.by_winograd if fits else None)  # type: ignore[attr-defined]
    handle.remove()


@pytest.mark.parametrize(
    ("dtype", "strict", "engines", "asked"),
    [
        (torch.bfloat16, False, object(), True),
        (torch.float32, False, object(), False),
        (torch.bfloat16, True, object(), False),
        (torch.bfloat16, False, None, False),
    ],
)
def test_winograd_is_planned_for_fast_decodes_in_16_bits_with_engines(
    dtype: torch.dtype, strict: bool, engines: object, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "engines_on", lambda *args: engines)
    handle = parallelize_decode(make_vae("2.1", dtype), strict=strict)
    assert agreed(handle.parallel, make_latent(1, dtype=dtype)).by_winograd is asked
    handle.remove()


def test_plans_are_made_again_only_for_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[VaeJob] = []
    possible = call.possible_plans
    monkeypatch.setattr(call, "possible_plans", lambda graph, job: made.append(job) or possible(graph, job))  # type: ignore[func-returns-value]
    free = iter((2**40, 2**39, 2**38, 1))
    own = ParallelVae._facts
    monkeypatch.setattr(ParallelVae, "_facts", lambda *given: replace(own(*given), free=next(free)))
    vae = make_vae("2.1")
    handle = parallelize_decode(vae, raise_failures=True)
    shapes = [(1, 4, frames, 4, 6) for frames in (1, 1, 2)]
    for shape in shapes:
        vae.decode(torch.zeros(shape))
    assert [job.latent for job in made] == shapes[1:]
    with pytest.raises(ModelInvalid, match="fits"):  # the memory that is free counts, whatever was kept
        vae.decode(torch.zeros(shapes[-1]))
    handle.remove()


def test_call_that_takes_most_of_the_free_memory_begins_without_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr(run, "release_cached", lambda device: released.append(device.type))
    vae, latent = make_vae("2.1"), make_latent(3)
    expected = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    assert torch.equal(vae.decode(latent).sample, expected)  # how much is free is not known
    peak, own = max(handle.plan.peak), ParallelVae._facts
    for share, times in ((0.6, 0), (0.8, 1), (0.8, 2)):
        monkeypatch.setattr(
            ParallelVae, "_facts", lambda *given, share=share: replace(own(*given), free=int(peak / share))
        )
        assert torch.equal(vae.decode(latent).sample, expected)
        assert released == ["cpu"] * times
    handle.remove()


def test_weights_that_lie_channels_last_are_left_to_the_framework_s_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    vae, latent = make_vae("2.1"), make_latent(1)
    handle = parallelize_decode(vae)
    parallel = handle.parallel
    monkeypatch.setattr(run, "available", lambda like: True)  # as on a GPU
    monkeypatch.setattr(parallel.operators.checks, "prepare", lambda *args: True)
    assert facts(parallel, latent).strict_cuda
    weight = vae.decoder.conv_in.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)
    assert not facts(parallel, latent).strict_cuda
    handle.remove()


def test_autocast_that_casts_nothing_leaves_strict_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM-Omni has one around each decode, in the dtype of the weights."""
    vae, latent = make_vae("2.1", torch.bfloat16), make_latent(1, dtype=torch.bfloat16)
    handle = parallelize_decode(vae)
    parallel = handle.parallel
    monkeypatch.setattr(run, "available", lambda like: True)  # as on a GPU
    monkeypatch.setattr(parallel.operators.checks, "prepare", lambda *args: True)
    assert facts(parallel, latent).strict_cuda
    with torch.autocast("cpu", torch.bfloat16):
        assert facts(parallel, latent).strict_cuda
        assert not facts(parallel, latent.float()).strict_cuda
    with torch.autocast("cpu", torch.float16):
        assert not facts(parallel, latent).strict_cuda
    norm = vae.decoder.norm_out
    assert parallel.graph.framework is not None
    parallel.graph.framework._rebound = lambda module: module is norm
    with monkeypatch.context() as patch:
        patch.setattr(norm, "forward", lambda x: type(norm).forward(norm, x).float())  # as CUDA's autocast has some
        with torch.autocast("cpu", torch.bfloat16):
            assert not facts(parallel, latent).strict_cuda
    vae.decoder.conv_out.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert not facts(parallel, latent).strict_cuda
    handle.remove()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_input_of_another_dtype_than_the_weights_is_the_framework_s_own_error(verb: str, strict: bool) -> None:
    vae, given = make_vae("2.1"), (make_latent(1) if verb == "decode" else torch.zeros(1, 3, 1, 32, 32)).bfloat16()
    with pytest.raises(RuntimeError) as expected:
        getattr(vae, verb)(given)
    handle = (parallelize_decode if verb == "decode" else parallelize_encode)(vae, strict=strict)
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"^{re.escape(str(expected.value))}$"):
        getattr(vae, verb)(given)
    handle.remove()


@pytest.mark.parametrize("verb", ["decode", "encode"])
@pytest.mark.parametrize("given", [None, np.zeros((1, 4, 1, 5, 7), np.float32)], ids=["None", "array"])
def test_input_that_is_no_tensor_is_the_framework_s_own_error(
    verb: str, given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    vae = make_vae("2.1")
    with pytest.raises(Exception) as expected:
        getattr(vae, verb)(given)
    handle = (parallelize_decode if verb == "decode" else parallelize_encode)(vae, raise_failures=True)
    with pytest.raises(expected.type, match=f"^{re.escape(str(expected.value))}$"):
        getattr(vae, verb)(given)
    handle.remove()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.endswith(f"is a {type(given).__module__}.{type(given).__qualname__}")


def test_latents_of_fast_operators_lie_as_the_framework_s_and_take_a_view() -> None:
    vae, video = make_vae("2.1", torch.bfloat16), make_video(5, 48, 64, dtype=torch.bfloat16)
    expected = encode(vae, video)
    handle = parallelize_encode(vae, strict=False)
    found = encode(vae, video)
    handle.remove()
    assert found.stride() == expected.stride()
    assert torch.allclose(found.view(-1), expected.view(-1), atol=0.05)


def test_call_computes_with_the_device_of_its_input_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which is the first one in a thread and behind `.to("cuda:1")`."""
    current: list[torch.device] = []
    seen: list[list[torch.device]] = []

    @contextmanager
    def device_of(given: torch.Tensor) -> Iterator[None]:
        current.append(given.device)
        yield
        current.pop()

    def watched(method: Any) -> Any:
        return lambda *args, **kwargs: (seen.append(list(current)), method(*args, **kwargs))[1]

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for owner, name in ((ParallelVae, "_facts"), (run.CallRun, "_execute")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    vae, latent = make_vae("2.1"), make_latent(1)
    ParallelVae(read_graph(vae))(latent)
    assert seen == [[latent.device], [latent.device]]


def test_connections_of_another_device_are_closed_by_the_call_that_moved() -> None:
    """As of a VAE that decodes on the CPU first and on a GPU later; another device stands in for the CPU."""
    vae, latent = make_vae("2.1"), make_latent(1)
    parallel = ParallelVae(read_graph(vae))
    parallel(latent)
    comm, peers = parallel._connect(latent.device), object()
    comm._peers, comm.device = peers, torch.device("meta")
    parallel(latent)
    assert (comm._peers, comm.device) == (None, latent.device)
    comm._peers = peers
    parallel(latent)
    assert comm._peers is peers


def test_fast_under_autocast_computes_and_answers_in_its_dtype() -> None:
    vae, latent, video = make_vae("2.1"), make_latent(2), make_video(5, 48, 64)
    handles = [parallelize_decode(vae, strict=False), parallelize_encode(vae, strict=False)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [vae.decode(latent).sample.dtype, encode(vae, video).dtype]
    weights = [handle.parallel.operators.weights for handle in handles]
    computed = [each.dtype for each in weights if each is not None]
    for handle in handles:
        handle.remove()
    assert found == computed == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("options", [{"mode": "temporl"}, {"axis": "depth"}])
@pytest.mark.parametrize("parallelize", [parallelize_decode, parallelize_encode])
def test_misspelt_mode_is_refused_before_anything_is_changed(parallelize: Any, options: dict[str, str]) -> None:
    vae = make_vae("2.1")
    before = dict(vae.__dict__)
    (word,) = options.values()
    with pytest.raises(ModelInvalid, match=f"{word}.*Expected .*auto"):
        parallelize(vae, **options)
    assert vae.__dict__ == before


@pytest.mark.parametrize(
    ("options", "ranks", "claim", "tries"),
    [
        ({}, 1, "strict, not compared", ("single",)),
        ({}, 3, "strict, not compared", ("temporal", "single")),
        ({"mode": "spatial"}, 2, "within tolerance, not compared", ("spatial",)),
        ({"mode": "tile"}, 2, "approximate, not compared", ("tile",)),
        ({"strict": False}, 2, "within tolerance", ("temporal", "spatial", "single", "tile")),
    ],
)
def test_plan_before_the_first_decode_says_what_will_be_tried(
    options: dict[str, Any], ranks: int, claim: str, tries: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = make_vae("2.1")
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    handle = parallelize_decode(vae, **options)
    assert (handle.plan.ranks, handle.plan.claim, handle.plan.tries) == (ranks, claim, tries)
    assert str(handle.plan) in repr(handle)
    monkeypatch.undo()
    vae.decode(make_latent(2))
    assert not handle.plan.tries
    handle.remove()


def test_handle_prints_what_it_does_and_its_plan() -> None:
    vae = make_vae("2.1")
    handle = parallelize_decode(vae, mode="temporal")
    assert repr(handle).startswith("VaeHandle: decode of ")
    assert repr(handle).endswith(
        ", mode temporal; temporal on 1 rank, strict, not compared\n"
        "  tries    single: the fastest that fits in memory at the size of the first decode"
    )
    vae.decode(make_latent(2))
    assert str(handle.plan) in repr(handle)
    handle.remove()
