"""What a framework would run and the graph would not: such a call is left to the framework, by a word that says why."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.decoding.tiny import encode, make_latent, make_vae, make_video
from wanshim.core.decoding import parallelize_decode, parallelize_encode
from wanshim.errors import ModelInvalid


class Half(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def halve(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2


def halve_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0] / 2, *args[1:])


def replace_forward(module: nn.Module) -> None:
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs) / 2  # type: ignore[method-assign]


def replace_layer(vae: Any) -> None:
    vae.decoder.conv_out = type(vae.decoder.conv_out)(8, 3, 3, padding=1).requires_grad_(False)


def replace_by_subclass(vae: Any) -> None:
    sampler = vae.decoder.up_blocks[0].upsamplers[0].resample
    sampler[1] = Half(*sampler[1].weight.shape[1::-1], 3, padding=1).requires_grad_(False)


def drop_all(vae: Any) -> None:
    for module in vae.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 1.0


def halved_graph(module: Any, inputs: Any) -> Callable[..., Any]:
    """A backend of torch.compile that nobody takes for eager."""
    return lambda *args: tuple(x / 2 if isinstance(x, torch.Tensor) else x for x in module(*args))


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook of a convolution": (
        lambda v: v.decoder.conv_out.register_forward_hook(halve),
        "decoder.conv_out has forward hooks",
    ),
    "hook before a block": (
        lambda v: v.decoder.mid_block.resnets[0].register_forward_pre_hook(halve_input),
        "decoder.mid_block.resnets.0 has forward hooks",
    ),
    "hook of a norm": (
        lambda v: v.decoder.norm_out.register_forward_hook(halve),
        "decoder.norm_out has forward hooks",
    ),
    "hook of the decoder": (lambda v: v.decoder.register_forward_hook(halve), "decoder has forward hooks"),
    "forward of SiLU": (
        lambda v: replace_forward(v.decoder.nonlinearity),
        "decoder.nonlinearity has a forward of its own",
    ),
    "forward of attention": (
        lambda v: replace_forward(v.decoder.mid_block.attentions[0]),
        "decoder.mid_block.attentions.0 has a forward of its own",
    ),
    "parametrization": (lambda v: weight_norm(v.post_quant_conv), "post_quant_conv is parametrized|was replaced after"),
    "layer": (replace_layer, "a layer of the VAE was replaced after it was read"),
    "dropout": (drop_all, r"decoder.mid_block.resnets.0.dropout drops at random: call eval\(\)"),
    "compiled layer": (lambda v: v.decoder.conv_out.compile(backend=halved_graph), "decoder.conv_out is compiled"),
}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "fast"])
@pytest.mark.parametrize("change", CHANGES)
def test_change_of_a_vae_in_use_is_seen_and_its_calls_are_the_framework_s(
    change: str, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    vae, latent = make_vae("2.1"), make_latent(2)
    handle = parallelize_decode(vae, strict=strict)
    apply, reason = CHANGES[change]
    apply(vae)
    with caplog.at_level(logging.WARNING, "wanshim.decoding"):
        found = [vae.decode(latent).sample for _ in range(2)][1]
    handle.remove()
    assert torch.equal(found, vae.decode(latent).sample)
    (said,) = [text for text in caplog.messages if "left to the framework" in text]
    assert re.search(reason, said)


def test_layer_of_a_strange_class_is_seen_whenever_it_came() -> None:
    vae, latent = make_vae("2.1"), make_latent(2)
    replace_by_subclass(vae)
    expected = vae.decode(latent).sample
    handle = parallelize_decode(vae, strict=False)
    found = vae.decode(latent).sample
    handle.remove()
    assert torch.equal(found, expected)


def test_hook_for_all_modules_is_seen() -> None:
    vae, latent = make_vae("2.1"), make_latent(1)
    handle = parallelize_decode(vae)
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output / 2 if isinstance(module, nn.Conv2d) else None
    )
    try:
        found = vae.decode(latent).sample
        handle.remove()
        assert torch.equal(found, vae.decode(latent).sample)
    finally:
        hook.remove()


def test_hook_of_the_encoder_leaves_the_encode_and_not_the_decode() -> None:
    vae = make_vae("2.1")
    vae.encoder.conv_in.register_forward_hook(halve)
    expected = encode(vae, make_video(5, 48, 64))
    handles = [parallelize_encode(vae), parallelize_decode(vae)]
    assert torch.equal(encode(vae, make_video(5, 48, 64)), expected)
    vae.decode(make_latent(1))
    assert [bool(handle.plan.tries) for handle in handles] == [True, False]


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "fast"])
def test_trained_weights_get_gradients_from_an_input_that_wants_none(strict: bool) -> None:
    vae = make_vae("2.1").requires_grad_(True)
    handles = [parallelize_decode(vae, strict=strict), parallelize_encode(vae, strict=strict)]
    vae.decode(make_latent(1)).sample.sum().backward()
    encode(vae, make_video(1, 48, 64)).sum().backward()
    assert all(p.grad is not None for p in (vae.decoder.conv_in.weight, vae.encoder.conv_in.weight))
    with torch.no_grad():
        vae.decode(make_latent(1))
    assert handles[0].plan is not None


def test_weights_laid_channels_last_between_two_calls_are_compared_anew() -> None:
    vae, video = make_vae("2.1"), make_video(9, 64, 96)
    handle = parallelize_encode(vae)
    encode(vae, video)
    for weight in (p for p in vae.parameters() if p.dim() > 3):
        layout = torch.channels_last_3d if weight.dim() == 5 else torch.channels_last
        weight.data = weight.data.contiguous(memory_format=layout)
    found = encode(vae, video)
    handle.remove()
    assert torch.equal(found, encode(vae, video))


class Tagged(torch.Tensor):
    """Keeps its class through torch's functions."""


def test_decode_inside_torch_func_and_of_another_class_of_tensor_is_the_framework_s() -> None:
    vae, latents = make_vae("2.1"), torch.stack([make_latent(1), -make_latent(1)])
    expected = torch.vmap(lambda latent: vae.decode(latent).sample)(latents)
    parallelize_decode(vae)
    assert torch.equal(torch.vmap(lambda latent: vae.decode(latent).sample)(latents), expected)
    assert type(vae.decode(latents[0].as_subclass(Tagged)).sample) is Tagged
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert vae.decode(mode.from_tensor(latents[0])).sample.shape == expected.shape[1:]


class LargerSums(TorchDispatchMode):
    """Changes what operators return, as a mode may."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 1.01 if function is torch.ops.aten.add.Tensor else found


def traced(vae: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    function = partial(vae.decode, return_dict=False)
    return lambda latent: torch.jit.trace(lambda x: function(x)[0], torch.ones_like(latent), check_trace=False)(latent)  # type: ignore[no-any-return, no-untyped-call]


def in_a_mode(vae: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def decode(latent: torch.Tensor) -> torch.Tensor:
        with LargerSums():
            return vae.decode(latent).sample  # type: ignore[no-any-return]

    return decode


@pytest.mark.parametrize("seen", [traced, in_a_mode])
def test_decode_whose_operations_are_recorded_or_changed_is_the_framework_s(
    seen: Callable[[Any], Callable[[torch.Tensor], torch.Tensor]],
) -> None:
    vae, latent = make_vae("2.1"), make_latent(2)
    expected = seen(vae)(latent)
    handle = parallelize_decode(vae)
    assert torch.equal(seen(vae)(latent), expected)
    assert handle.parallel.plan is None, "nothing was computed by the graph"


def test_layer_that_holds_others_is_refused_in_one_line() -> None:
    vae = make_vae("2.1")
    vae.decoder.conv_out = nn.Sequential(vae.decoder.conv_out)
    with pytest.raises(ModelInvalid) as caught:
        parallelize_decode(vae)
    assert str(caught.value).startswith("conv_out of the VAE is a torch.nn.modules.container.Sequential.")
    assert "\n" not in str(caught.value)


def test_frames_of_the_framework_go_where_they_were_asked_for() -> None:
    vae, latent = make_vae("2.1"), make_latent(2)
    expected = vae.decode(latent).sample
    vae.decoder.register_forward_hook(lambda *_: None)
    taken: list[tuple[torch.Tensor, int]] = []
    handle = parallelize_decode(vae, on_chunk=lambda frames, start: taken.append((frames, start)))
    assert vae.decode(latent).sample is None
    handle.remove()
    assert [start for _, start in taken] == [0]
    assert torch.equal(taken[0][0], expected)
    handle = parallelize_decode(vae, uint8=True)
    frames = vae.decode(latent).sample
    handle.remove()
    assert torch.equal(frames, ((expected.float() + 1) * 127.5).round().to(torch.uint8))
