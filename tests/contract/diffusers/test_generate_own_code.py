"""`diffusers.generate` where the program changes what a process computes with, or calls models between the steps."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import wrapt
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils import is_torch_available as of_a_package
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

import wanshim
from tests.contract.diffusers import wan_pipelines
from tests.contract.diffusers.wan_pipelines import generate
from wanshim.adapters.diffusers.generate import bind
from wanshim.core.generation import NotShared, Request, SharedPipeline, own_code
from wanshim.core.workers import Workers, numerics
from wanshim.errors import ModelInvalid
from wanshim.patching.pipeline_call import SHARED

pytestmark = pytest.mark.timeout(600)  # a worker imports torch and diffusers
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPipeline]:
    """One worker for several pipelines."""
    made = SharedPipeline(Request(gpus=2))
    yield made
    made.close()


def over_two(shared: SharedPipeline, pipe: Any, **changed: Any) -> torch.Tensor:
    return shared.run(partial(bind, pipe, **changed), partial(generate, pipe, "wan", **changed))


class Counting:
    """An attention processor of the user's own."""

    def __init__(self, own: Any) -> None:
        self.own, self.calls = own, 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return self.own(*args, **kwargs) * self.calls


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def doubled(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As such patches are written: it has the name of what it wraps."""

    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        return own(*args, **kwargs) * 2

    return call


def patch_attention(pipe: Any, patch: Patch) -> None:
    patch.setattr(F, "scaled_dot_product_attention", doubled(F.scaled_dot_product_attention))


def patch_class(part: Callable[[Any], Any], name: str = "forward") -> Callable[[Any, Patch], None]:
    def change(pipe: Any, patch: Patch) -> None:
        cls = type(part(pipe.transformer))
        patch.setattr(cls, name, doubled(getattr(cls, name)))

    return change


def patch_function(module: str, name: str) -> Callable[[Any, Patch], None]:
    def change(pipe: Any, patch: Patch) -> None:
        patch.setattr(f"{module}.{name}", doubled(getattr(importlib.import_module(module), name)))

    return change


def forward_of_a_block(pipe: Any, patch: Patch) -> None:
    """As such patches are written: by a function whose name is that of what it replaces."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = type(self).forward(self, *args, **kwargs)
        return found * 2

    block = pipe.transformer.blocks[0]
    block.forward = MethodType(forward, block)


def own_processor(pipe: Any, patch: Patch) -> None:
    attention = pipe.transformer.blocks[0].attn1
    attention.processor = Counting(attention.processor)


def own_layer(pipe: Any, patch: Patch) -> None:
    pipe.transformer.proj_out.__class__ = Doubled


def attention_dispatch() -> Any:
    return pytest.importorskip("diffusers.models.attention_dispatch")


def attention_backend(pipe: Any, patch: Patch) -> None:
    dispatch = attention_dispatch()
    patch.setattr(dispatch._AttentionBackendRegistry, "_active_backend", dispatch.AttentionBackendName("_native_math"))


OTHERS: dict[str, tuple[Callable[[Any, Patch], None], str]] = {
    "attention": (patch_attention, r"torch\.nn\.functional\.scaled_dot_product_attention is .* here"),
    "block": (patch_class(lambda model: model.blocks[0]), r"blocks\.0: WanTransformerBlock\.forward is .* here"),
    "processor": (patch_class(lambda model: model.blocks[0].attn1.processor, "__call__"), r"\.__call__ is .* here"),
    "function": (patch_function("torch.nn.functional", "gelu"), r"torch\.nn\.functional\.gelu is .* here"),
    "function of a module": (
        patch_function("diffusers.models.embeddings", "get_timestep_embedding"),
        r"diffusers\.models\.embeddings\.get_timestep_embedding is .* here",
    ),
    "forward of a block": (forward_of_a_block, r"transformer: blocks\.0\.forward is .*forward_of_a_block.* here"),
    "own processor": (own_processor, r"blocks\.0\.attn1: .*Counting is no class of an installed package"),
    "own layer": (own_layer, "proj_out: .*Doubled is no class of an installed package"),
    "backend": (attention_backend, "computes attention by _native_math, which is set in this process alone"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_worker_would_compute_otherwise_runs_on_one_gpu(name: str, monkeypatch: Patch) -> None:
    change, text = OTHERS[name]
    pipe = wan_pipelines.wan()
    plain = generate(pipe, "wan", num_inference_steps=1)
    change(pipe, monkeypatch)
    with pytest.raises(ModelInvalid, match=text):
        wanshim.parallelize_pipeline(pipe, gpus=2)
    expected = generate(pipe, "wan", num_inference_steps=1)
    if name not in ("own processor", "backend"):  # whose first call multiplies by 1, and an equal one
        assert not torch.equal(expected, plain)
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    own = pipe.transformer.blocks[0].attn1.processor
    if isinstance(own, Counting):
        own.calls = 0
    assert torch.equal(expected, generate(pipe, "wan", num_inference_steps=1))
    (row,) = [row for row in wanshim.report().rows if row.feature == "diffusers.generate"]
    assert any(re.search(f"WanPipeline on one GPU: .*{text}", note) for note in row.notes), row.notes


@pytest.mark.parametrize("name", ["block", "processor", "function", "forward of a block", "own layer"])
def test_what_a_callback_changes_so_runs_on_one_gpu_from_there_on(
    name: str, shared: SharedPipeline, monkeypatch: Patch
) -> None:
    change, text = OTHERS[name]

    def call(over: Callable[..., torch.Tensor]) -> torch.Tensor:
        pipe = wan_pipelines.wan()
        with monkeypatch.context() as patch:

            def callback(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
                if step == 0:
                    change(pipe, patch)
                return {}

            return over(pipe, callback_on_step_end=callback)

    expected, before = call(lambda pipe, **given: generate(pipe, "wan", **given)), shared.shared_forwards
    assert torch.equal(expected, call(partial(over_two, shared)))
    assert shared.shared_forwards - before == 1
    assert shared.plan is not None
    assert re.search(text, shared.plan.rejected["guidance over 2"])


def louder(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            return own(model, args[0] * 1.1, *args[1:], **kwargs)
        return own(model, **kwargs | {"hidden_states": kwargs["hidden_states"] * 1.1})

    return call


@pytest.mark.parametrize(("part", "name"), [("transformer", "forward"), ("vae", "_decode")])
def test_what_a_callback_puts_on_the_class_of_a_model_is_called_from_there_on(
    part: str, name: str, shared: SharedPipeline, monkeypatch: Patch
) -> None:
    pipe = wan_pipelines.wan()
    cls, plain = type(getattr(pipe, part)), generate(pipe, "wan")

    def call(over: Callable[..., torch.Tensor]) -> torch.Tensor:
        with monkeypatch.context() as patch:

            def callback(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
                if step == 0:
                    patch.setattr(cls, name, louder(getattr(cls, name)))
                return {}

            return over(pipe, callback_on_step_end=callback)

    expected = call(lambda pipe, **given: generate(pipe, "wan", **given))
    assert not torch.equal(expected, plain)
    assert torch.equal(expected, call(partial(over_two, shared)))


def test_forward_that_a_callback_keeps_is_the_models_own_behind_the_call(
    shared: SharedPipeline, monkeypatch: Patch
) -> None:
    pipe, kept = wan_pipelines.wan(), []
    expected = forward(pipe)

    def callback(pipe: Any, *_: Any) -> dict[str, Any]:
        kept.append(pipe.transformer.forward)
        return {}

    over_two(shared, pipe, callback_on_step_end=callback)
    monkeypatch.setattr(pipe.transformer, "forward", kept[0])
    assert torch.equal(expected, forward(pipe))


class Larger(TorchFunctionMode):
    """A mode changes what functions return, in the thread that entered it alone."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 1.1 if function is F.linear else found


def larger_by_hooks() -> Any:
    return register_module_forward_hook(lambda module, _, found: found * 1.1 if type(module) is nn.Linear else None)


@pytest.mark.parametrize(
    ("around", "text"),
    [(Larger, "a Larger is on"), (larger_by_hooks, "torch has forward hooks for all modules")],
    ids=["mode", "hooks of all modules"],
)
def test_what_is_around_a_call_in_this_process_alone_leaves_it_to_one_gpu(
    shared: SharedPipeline, around: Callable[[], Any], text: str
) -> None:
    pipe = wan_pipelines.wan()
    plain = generate(pipe, "wan", num_inference_steps=1)
    with around():
        assert not torch.equal(plain, generate(pipe, "wan", num_inference_steps=1))
        with pytest.raises(NotShared, match=text):
            over_two(shared, pipe, num_inference_steps=1)
    with torch.device("cpu"):
        assert torch.equal(plain, over_two(shared, pipe, num_inference_steps=1))


def half_precision() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("around", "text"),
    [
        (Larger, "a Larger is on"),
        (larger_by_hooks, "torch has forward hooks for all modules"),
        (half_precision, "torch.autocast is on"),
        (lambda: attention_dispatch().attention_backend("_native_math"), "computes attention by _native_math"),
    ],
    ids=["mode", "hooks of all modules", "autocast", "backend"],
)
@pytest.mark.parametrize("last", [False, True], ids=["a step", "the decode"])
def test_what_a_callback_enters_leaves_the_rest_of_the_call_to_one_gpu(
    last: bool, shared: SharedPipeline, around: Callable[[], Any], text: str
) -> None:
    def call(over: Callable[..., torch.Tensor]) -> torch.Tensor:
        pipe = wan_pipelines.wan()
        with ExitStack() as entered:

            def callback(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
                if step == 2 * last:
                    entered.enter_context(around())
                return {}

            return over(pipe, callback_on_step_end=callback)

    expected, before = call(lambda pipe, **given: generate(pipe, "wan", **given)), shared.shared_forwards
    decodes = shared.shared_vae_calls
    assert torch.equal(expected, call(partial(over_two, shared)))
    assert shared.shared_forwards - before == (3 if last else 1)
    assert shared.plan is not None
    if last:
        assert shared.shared_vae_calls - decodes == (text.startswith("computes attention"))  # of the transformer
    else:
        assert text in shared.plan.rejected["guidance over 2"]


@pytest.mark.slow
def test_call_that_shares_nothing_is_no_effect_of_the_plan_of_the_one_before(monkeypatch: Patch) -> None:
    pipe = wan_pipelines.wan()
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    generate(pipe, "wan", num_inference_steps=1)
    own = pipe.scheduler.set_timesteps

    def none(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        pipe.scheduler.timesteps = pipe.scheduler.timesteps[:0]

    monkeypatch.setattr(pipe.scheduler, "set_timesteps", none)
    generate(pipe, "wan", num_inference_steps=1, output_type="latent")
    row = wanshim.report().row("diffusers.generate")
    assert (row.calls, row.fallbacks) == (2, {"WanPipeline: the call shared nothing of what it ran": 1})


class Relu:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (F, "gelu", partial(F.gelu, approximate="tanh")),
        (F, "gelu", Relu()),
        (F, "gelu", wrapt.FunctionWrapper(F.gelu, lambda own, _, args, kwargs: own(*args, **kwargs) * 2)),
        (F, "linear", of_a_package),  # of an installed package
        (F, "scaled_dot_product_attention", torch.ops.aten._scaled_dot_product_flash_attention_for_cpu),
        (F, "gelu", torch.compile(F.gelu)),
        (F, "gelu", nn.GELU(approximate="tanh")),
        (torch, "rsqrt", lambda x: x),
        (torch.Tensor, "unflatten", lambda *_: None),
    ],
    ids=["partial", "object", "wrapt", "package", "attention", "compiled", "layer", "torch", "tensor"],
)
def test_a_function_of_torch_that_the_program_replaced_is_found(
    owner: Any, name: str, other: Any, monkeypatch: Patch
) -> None:
    model = wan_pipelines.wan().transformer
    monkeypatch.setattr(torch, "load", lambda *_: None)  # programs do, and it computes nothing
    assert own_code.why_other_code(model) == ""
    monkeypatch.setattr(owner, name, other)
    assert f".{name} is " in own_code.why_other_code(model)


def test_a_module_without_a_name_is_no_error() -> None:
    """As those that `exec` and torch.fx make."""
    model = wan_pipelines.wan().transformer
    model.proj_out = fx.symbolic_trace(model.proj_out)
    assert re.search(r"proj_out: .*\.forward is .* here", own_code.why_other_code(model))


@pytest.mark.parametrize("taken", [True, False])
def test_what_a_module_imports_is_its_own_however_that_is_installed(
    taken: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """An egg and a checkout have no metadata beside the package."""
    (tmp_path / "some_attention.py").write_text("def attend(x):\n    return x\n")
    (tmp_path / "some_model-1.0.dist-info").mkdir()
    taking = "from some_attention import attend" if taken else "def attend(x):\n        return x"
    text = f"import torch\ntry:\n    {taking}\nexcept ImportError:\n    pass\n"
    (tmp_path / "some_model.py").write_text(f"{text}class Layer(torch.nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        model = importlib.import_module("some_model")
        other = importlib.import_module("some_attention")
        monkeypatch.setattr(model, "attend", other.attend)
        for known in (own_code._lies_among_packages, own_code._imports):
            known.cache_clear()
        monkeypatch.setitem(vars(other), "__file__", str(tmp_path / "egg" / "some_attention.py"))
        reason = own_code.why_other_code(model.Layer(2, 2))
    finally:
        for name in ("some_model", "some_attention"):
            sys.modules.pop(name, None)
        for known in (own_code._lies_among_packages, own_code._imports):
            known.cache_clear()
    assert reason == ("" if taken else "some_model.attend is some_attention.attend here")


@pytest.mark.parametrize("file", ["__init__.py", "inner.py"], ids=["package", "namespace package"])
@pytest.mark.parametrize("installed", [True, False])
def test_package_is_installed_where_its_metadata_lies(
    installed: bool, file: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Not by the interpreter's own folders alone: `pip install --target` knows others. A namespace package, as
    optimum is, has no file of its own."""
    (tmp_path / "some_layers").mkdir()
    text = "import torch\n\nclass Layer(torch.nn.Linear):\n    pass\n"
    (tmp_path / "some_layers" / file).write_text(text)
    if installed:
        (tmp_path / "some_layers-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    own_code._lies_among_packages.cache_clear()
    name = "some_layers" if file == "__init__.py" else "some_layers.inner"
    try:
        made = nn.Sequential(importlib.import_module(name).Layer(2, 2))
        reason = own_code.why_other_code(made)
    finally:
        for each in ("some_layers", "some_layers.inner"):
            sys.modules.pop(each, None)
        own_code._lies_among_packages.cache_clear()
    assert reason == ("" if installed else f"0: {name}.Layer is no class of an installed package")


def test_backend_that_the_model_has_itself_is_copied(shared: SharedPipeline, monkeypatch: Patch) -> None:
    pipe = wan_pipelines.wan()
    if not hasattr(pipe.transformer, "set_attention_backend"):
        pytest.skip("transformers of this release have no set_attention_backend")
    attention_backend(pipe, monkeypatch)
    pipe.transformer.set_attention_backend("_native_math")
    if not getattr(pipe.transformer.blocks[0].attn1.processor, "_attention_backend", None):
        pytest.skip("processors of this release keep no backend of their own")
    expected, before = generate(pipe, "wan"), shared.shared_forwards
    assert torch.equal(expected, over_two(shared, pipe))
    assert shared.shared_forwards - before == 3
    monkeypatch.undo()
    other = wan_pipelines.wan()  # whose attention the worker computes as this process does
    expected = generate(other, "wan")
    assert torch.equal(expected, over_two(shared, other))
    assert shared.shared_forwards - before == 6


def forward(pipe: Any, **options: Any) -> torch.Tensor:
    """Its transformer alone."""
    given = {
        "hidden_states": torch.ones(1, pipe.transformer.config.in_channels, 2, 4, 4),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": torch.ones(1, 8, pipe.transformer.config.text_dim),
    }
    with torch.no_grad():
        found: torch.Tensor = pipe.transformer(**given, **options)[0]
    return found


def test_models_that_another_thread_calls_meanwhile_compute_in_this_process(shared: SharedPipeline) -> None:
    pipe, seen = wan_pipelines.wan(), []
    alone, expected = forward(pipe), generate(pipe, "wan")

    def call() -> torch.Tensor:
        thread = threading.Thread(target=lambda: seen.append(forward(pipe)))
        thread.start()
        thread.join()
        return generate(pipe, "wan")

    assert torch.equal(expected, shared.run(partial(bind, pipe), call))
    assert torch.equal(seen[0], alone)


def test_a_vae_that_another_thread_calls_meanwhile_computes_in_this_process(shared: SharedPipeline) -> None:
    """As a service decodes the last video, or a preview, beside the steps: the workers are for the call."""
    pipe, seen = wan_pipelines.wan(), []
    latents = torch.ones(1, 16, 2, 4, 4)
    alone = pipe.vae.decode(latents, return_dict=False)[0].detach()

    def decode() -> None:
        with torch.no_grad():
            seen.append(pipe.vae.decode(latents, return_dict=False)[0])

    def callback(*_: Any) -> dict[str, Any]:
        thread = threading.Thread(target=decode)
        thread.start()
        thread.join()
        return {}

    expected, before = generate(pipe, "wan"), shared.shared_vae_calls
    assert torch.equal(expected, over_two(shared, pipe, callback_on_step_end=callback))
    assert shared.shared_vae_calls - before == 1
    assert len(seen) == 3
    assert all(torch.equal(alone, each) for each in seen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", pytest.param("object", marks=pytest.mark.slow), "diffusers"])
def test_models_that_a_callback_calls_compute_in_this_process(kind: str) -> None:
    """Directly, and through another pipeline of the same transformer."""
    from diffusers.callbacks import PipelineCallback

    pipe, other = wan_pipelines.wan(), wan_pipelines.wan()
    other.register_modules(transformer=pipe.transformer)
    seen: list[torch.Tensor] = []

    def callback(pipe: Any, step: int, timestep: Any, latents: dict[str, Any]) -> dict[str, Any]:
        seen.append(forward(pipe))
        seen.append(forward(pipe, return_dict=False))
        seen.append(generate(other, "wan", guidance_scale=1.0, num_inference_steps=1))
        return {}

    class Called:
        def __call__(self, *given: Any) -> dict[str, Any]:
            return callback(*given)

    class OfDiffusers(PipelineCallback):  # type: ignore[misc]
        tensor_inputs: ClassVar = ["latents"]

        def callback_fn(self, *given: Any) -> dict[str, Any]:
            return callback(*given)

    given = {"function": callback, "object": Called(), "diffusers": OfDiffusers()}[kind]
    alone, expected = generate(pipe, "wan", callback_on_step_end=given), list(seen)
    seen.clear()
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    assert torch.equal(alone, generate(pipe, "wan", callback_on_step_end=given))
    assert handle._shared.shared_forwards == 3
    assert len(seen) == len(expected) == 9
    assert all(torch.equal(one, two) for one, two in zip(seen, expected, strict=True))
    handle.remove()


def test_vae_whose_weights_change_in_place_is_shared_as_it_is_now(shared: SharedPipeline) -> None:
    pipe = wan_pipelines.wan()
    found = [over_two(shared, pipe)]
    for change in (lambda tensor: tensor.mul_(1.5), lambda tensor: tensor.data.mul_(0.5)):
        with torch.no_grad():
            change(pipe.vae.decoder.conv_out.weight)
        before = shared.shared_vae_calls
        found.append(over_two(shared, pipe))
        assert shared.shared_vae_calls == before + 1
        assert torch.equal(found[-1], generate(pipe, "wan"))
        assert not torch.equal(found[-1], found[-2])


def test_a_forward_that_a_callback_sets_is_called_and_stays(shared: SharedPipeline) -> None:
    def call(over: Callable[..., torch.Tensor]) -> torch.Tensor:
        pipe = wan_pipelines.wan()

        def callback(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
            own = pipe.transformer.forward
            if step == 0:
                pipe.transformer.forward = lambda *args, **kwargs: (2 * own(*args, **kwargs)[0],)
            return {}

        frames = over(pipe, callback_on_step_end=callback)
        later = generate(pipe, "wan")
        with pytest.raises(NotShared, match="transformer has a forward of its own"):
            over_two(shared, pipe)
        return torch.stack([frames, later])

    expected, before = call(lambda pipe, **given: generate(pipe, "wan", **given)), shared.shared_forwards
    assert torch.equal(expected, call(partial(over_two, shared)))
    assert shared.shared_forwards - before == 1
    assert shared.plan is not None
    assert "transformer has a forward of its own" in shared.plan.rejected["guidance over 2"]


@pytest.mark.parametrize("name", ["_decode", "decode"])
def test_a_decode_that_the_program_put_on_the_class_of_the_vae_is_called(
    name: str, shared: SharedPipeline, monkeypatch: Patch
) -> None:
    pipe = wan_pipelines.wan()
    cls, plain = type(pipe.vae), over_two(shared, pipe)
    own = getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda vae, z, *args, **kwargs: own(vae, z * 1.1, *args, **kwargs))
    expected = generate(pipe, "wan")
    assert not torch.equal(plain, expected)
    assert torch.equal(expected, over_two(shared, pipe))


def test_arguments_that_cannot_be_sent_run_on_one_gpu_and_the_plan_says_why(shared: SharedPipeline) -> None:
    calls: list[int] = []
    pipe, kept = wan_pipelines.wan(), {"attention_kwargs": {"note": lambda: calls.append(1)}}
    expected = generate(pipe, "wan", **kept)
    assert torch.equal(expected, over_two(shared, pipe, **kept))
    assert shared.plan is not None
    assert shared.plan.gpus == 1
    assert "cannot be copied to another process" in shared.plan.rejected["guidance over 2"]
    assert torch.equal(expected, over_two(shared, pipe))
    assert shared.plan.gpus == 2


@pytest.mark.slow
def test_subclass_whose_call_takes_other_arguments_is_served(monkeypatch: Patch) -> None:
    pipe = wan_pipelines.wan()
    expected = generate(pipe, "wan")
    own = type(pipe)

    class Short(own):  # type: ignore[misc, valid-type]
        def __call__(self, arguments: dict[str, Any]) -> Any:
            return super().__call__(**arguments)

    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    pipe.__class__ = Short

    class Taker:
        _execution_device = pipe._execution_device

        def __call__(self, **arguments: Any) -> Any:
            return pipe(arguments)

    assert torch.equal(expected, generate(Taker(), "wan"))
    (row,) = [row for row in wanshim.report().rows if row.feature == "diffusers.generate"]
    assert any("guidance over 2" in note for note in row.notes), row.notes


def test_one_model_under_two_names_is_one_copy(shared: SharedPipeline) -> None:
    pipe = wan_pipelines.wan()
    if not hasattr(pipe, "transformer_2"):
        pytest.skip("pipelines of this release have one transformer")
    pipe.register_modules(transformer_2=pipe.transformer)
    pipe.register_to_config(boundary_ratio=0.9)
    expected, before = generate(pipe, "wan"), shared.shared_forwards
    assert torch.equal(expected, over_two(shared, pipe))
    assert shared.shared_forwards - before == 3


def test_switches_of_torch_reach_a_worker() -> None:
    cpu = torch.device("cpu")
    switches = {name: (get, put) for name, get, put in numerics._GLOBALS}
    others = {
        "denormals": not switches["denormals"][0](),
        "half sums of attention": not switches["half sums of attention"][0](),
        "order of attentions": switches["order of attentions"][0]()[::-1],
        "mkldnn": not switches["mkldnn"][0](),
    }
    before = numerics.read(cpu)
    try:
        with numerics.apply(before | others):
            assert {name: numerics.read(cpu)[name] for name in others} == others
    finally:
        numerics.apply(before).close()  # type: ignore[attr-defined]
    assert numerics.read(cpu) == before


class Boosting(FlowMatchEulerDiscreteScheduler):
    """A scheduler of the program's own, which changes the model behind each step."""

    model: ClassVar[Any] = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        boost(self.model)
        return result


def boost(model: Any) -> None:
    weight = model.proj_out.weight
    weight.data = weight.data * 1.5


def own_scheduler(pipe: Any) -> None:
    pipe.scheduler = Boosting.from_config(pipe.scheduler.config)
    Boosting.model = pipe.transformer


def wrapped_step(pipe: Any) -> None:
    own = pipe.scheduler.step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        boost(pipe.transformer)
        return result

    pipe.scheduler.step = step


class Wrapper:
    """An object in place of a method."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.own = pipe, pipe.scheduler.step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        boost(self.pipe.transformer)
        return self.own(*args, **kwargs)


def object_in_place(pipe: Any) -> None:
    pipe.scheduler.step = Wrapper(pipe)


def own_bar(pipe: Any) -> None:
    class Bar:
        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def update(self) -> None:
            boost(pipe.transformer)

    pipe.progress_bar = Bar


class Controller:
    def __init__(self, pipe: Any) -> None:
        self.pipe, self.own = pipe, pipe.scheduler.step

    def step(self, *args: Any, **kwargs: Any) -> Any:
        boost(self.pipe.transformer)
        return self.own(*args, **kwargs)


def bound_method(pipe: Any) -> None:
    pipe.scheduler.step = Controller(pipe).step


def partial_of_it(pipe: Any) -> None:
    pipe.scheduler.step = partial(Controller(pipe).step)


class Delegating:
    """A scheduler that has no method of its own."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.own = pipe, pipe.scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "step":
            boost(self.pipe.transformer)
        return getattr(self.own, name)


def delegating(pipe: Any) -> None:
    pipe.scheduler = Delegating(pipe)


BETWEEN = {
    each.__name__: each
    for each in (
        own_scheduler,
        wrapped_step,
        object_in_place,
        bound_method,
        partial_of_it,
        delegating,
        own_bar,
    )
}


@pytest.mark.parametrize("name", BETWEEN)
def test_code_of_the_program_between_steps_changes_models_for_all_processes(name: str, shared: SharedPipeline) -> None:
    """Nobody can list all that runs there: what is no installed package's counts as what may change models."""

    def call(over: Callable[..., torch.Tensor]) -> torch.Tensor:
        pipe = wan_pipelines.wan()
        BETWEEN[name](pipe)
        return over(pipe)

    expected, before = call(lambda pipe: generate(pipe, "wan")), shared.shared_forwards
    assert not torch.equal(expected, generate(wan_pipelines.wan(), "wan"))
    assert torch.equal(expected, call(partial(over_two, shared)))
    assert shared.shared_forwards - before == 3


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("name", BETWEEN)
def test_code_of_the_program_between_steps_finds_its_offload(name: str, gpus: int, shared: SharedPipeline) -> None:
    """Its changes are in the model that the next step streams."""

    def call(over: Callable[..., torch.Tensor]) -> torch.Tensor:
        pipe, cpu = wan_pipelines.wan(), torch.device("cpu")
        offloaded = {"onload_device": cpu, "offload_device": cpu, "offload_type": "block_level"}
        pipe.transformer.enable_group_offload(**offloaded, num_blocks_per_group=1)
        BETWEEN[name](pipe)
        return over(pipe)

    made = SharedPipeline(Request(gpus=1)) if gpus == 1 else shared
    expected = call(lambda pipe: generate(pipe, "wan"))
    assert torch.equal(expected, call(partial(over_two, made)))
    assert gpus == 2 or made.streamed_forwards


def test_solver_that_calls_the_model_within_a_step_has_the_same_frames(shared: SharedPipeline) -> None:
    """As a solver of two orders does, in a method of the scheduler."""

    def call(over: Callable[..., torch.Tensor]) -> torch.Tensor:
        pipe = wan_pipelines.wan()
        own, prompt = pipe.scheduler.step, torch.ones(1, 4, pipe.transformer.config.text_dim)

        def step(noise: torch.Tensor, time: torch.Tensor, latents: torch.Tensor, **kwargs: Any) -> Any:
            again = pipe.transformer(latents, timestep=time.expand(1), encoder_hidden_states=prompt)[0]
            return own((noise + again) / 2, time, latents, **kwargs)

        pipe.scheduler.step = step
        return over(pipe)

    expected = call(lambda pipe: generate(pipe, "wan"))
    assert torch.equal(expected, call(partial(over_two, shared)))


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_of_a_model_that_is_made_within_a_call_is_a_model_of_its_own(
    way: Callable[[Any], Any], shared: SharedPipeline
) -> None:
    pipe, kept = wan_pipelines.wan(), []

    def callback(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        kept.extend([way(pipe.transformer)] if step == 0 else ())
        return {}

    expected = generate(pipe, "wan")
    assert torch.equal(expected, over_two(shared, pipe, callback_on_step_end=callback))
    (made,) = kept
    assert vars(made).keys() == vars(pipe.transformer).keys()
    made._parameters, made._modules = copy.deepcopy((made._parameters, made._modules))
    boost(made)
    pipe.transformer = made
    changed = generate(pipe, "wan")
    assert not torch.equal(changed, expected)
    assert torch.equal(changed, over_two(shared, pipe))


def test_attention_that_the_program_registers_runs_on_one_gpu(shared: SharedPipeline, monkeypatch: Patch) -> None:
    """For long sequences alone, perhaps, which the comparison of new copies has not."""
    dispatch = attention_dispatch()
    backends, name = dispatch._AttentionBackendRegistry._backends, dispatch.AttentionBackendName.NATIVE
    monkeypatch.setitem(backends, name, doubled(backends[name]))
    with pytest.raises(NotShared, match=r"transformer computes attention by native, which is .* here"):
        over_two(shared, wan_pipelines.wan())


class Engine:
    """A VAE that is no module, as of TensorRT."""

    def __init__(self, vae: Any) -> None:
        self.config, self.dtype, self.use_tiling = vae.config, vae.dtype, False


def test_pipeline_that_cannot_be_read_runs_as_without_wanshim(monkeypatch: Patch) -> None:
    pipe, given = wan_pipelines.wan(), {"output_type": "latent"}
    pipe.register_modules(vae=Engine(pipe.vae))
    expected = generate(pipe, "wan", **given)
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    assert torch.equal(expected, generate(pipe, "wan", **given))
    (row,) = [row for row in wanshim.report().rows if row.feature == "diffusers.generate"]
    assert any("it cannot be read: AttributeError: 'Engine'" in note for note in row.notes), row.notes


@pytest.mark.parametrize("reach", [lambda pipe: pipe, type], ids=["object", "class"])
def test_call_that_the_program_takes_from_under_no_grad_has_its_gradient(
    reach: Callable[[Any], Any], monkeypatch: Patch
) -> None:
    """A pipeline says that it is called under it by `__wrapped__`, which is the function itself, of no object."""
    pipe = wan_pipelines.wan()

    def gradient() -> torch.Tensor:
        taken = partial(reach(pipe).__call__.__wrapped__, pipe)
        taken._execution_device = pipe._execution_device  # type: ignore[attr-defined]
        video = generate(taken, "wan", num_inference_steps=1, output_type="latent")
        (found,) = torch.autograd.grad(video.sum(), [pipe.transformer.proj_out.weight])
        return found

    expected = gradient()
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    assert torch.equal(expected, gradient())
    row = wanshim.report().row("diffusers.generate")
    assert row.fallbacks == {
        "WanTransformer3DModel on one GPU: WanPipeline.__call__ calls it, which wanshim does not share": 2
    }


def test_call_in_a_fork_of_the_process_that_shares_the_pipeline_runs_there(monkeypatch: Patch) -> None:
    pipe = wan_pipelines.wan()
    expected = generate(pipe, "wan", num_inference_steps=1)
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    generate(pipe, "wan", num_inference_steps=1)
    monkeypatch.setattr(SHARED[pipe], "_process", -1)  # as one sees it that was forked
    assert torch.equal(expected, generate(pipe, "wan", num_inference_steps=1))
    (row,) = [row for row in wanshim.report().rows if row.feature == "diffusers.generate"]
    assert any("a forked process cannot use" in note for note in row.notes), row.notes
    SHARED[pipe].close()


def test_workers_import_no_module_of_the_program(monkeypatch: Patch) -> None:
    """It may load models, or bind a port. A VAE of its own class is not sent."""
    found: list[list[str]] = []

    class Own(type(wan_pipelines.wan().vae)):  # type: ignore[misc]
        pass

    pipe = wan_pipelines.wan()
    pipe.vae.__class__ = Own
    monkeypatch.setattr(Workers, "begin", lambda self, imports=(): found.append(list(imports)))
    monkeypatch.setattr(SharedPipeline, "pids", ())  # of other pipelines
    made = SharedPipeline(Request(gpus=2))
    made.begin(bind(pipe))
    assert found == [["diffusers.models.transformers.transformer_wan"]]
