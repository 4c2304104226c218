"""DiffSynth's own models, sharded over gloo ranks, take the unsharded step: loss and every trained gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model

import wanshim
from tests.contract.diffsynth import fp8_models, variants, wan
from tests.distributed.decoding.ranks import made_together, run_ranks, values
from tests.distributed.sequence.tiny import farthest
from wanshim.adapters.diffsynth.splitting import low_precision
from wanshim.adapters.diffsynth.splitting.wan import block_lists
from wanshim.undo import Undo

EXACT = 1e-5
COVERED = ("t2v", "i2v", "ti2v-5b", "fun-control", "camera", "vace")
SIZE = replace(  # five heads and 45 tokens: nothing divides, and a reference latent makes them 60
    variants.TINY,
    dit={**variants.TINY.dit, "dim": 60, "num_heads": 5, "num_layers": 3},
    latent=(3, 10, 6),
    layers=(0, 2),
)


def made(name: str, lora: bool) -> variants.Variant:
    variants.TINY = SIZE
    variant = variants.tiny(name)
    if lora:
        variant.dit.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=wan.TARGETS), variant.dit)
        for parameter_name, parameter in variant.dit.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1)
    return variant


def step(variant: variants.Variant, accumulation: int, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for seed in range(accumulation):
        noise = torch.randn(variant.inputs["latents"].shape, generator=torch.Generator().manual_seed(seed))
        loss = torch.nn.functional.mse_loss(variant(**options), noise)
        loss.backward()
        losses.append(loss.item())
    modules = variant.modules().items()
    named = {f"{of}.{name}": p.grad for of, module in modules for name, p in module.named_parameters()}
    return losses, {name: gradient for name, gradient in named.items() if gradient is not None}


def compare(rank: int, size: int, names: tuple[str, ...], ranks: tuple[int, ...]) -> dict[Any, float]:
    groups = {n: dist.new_group(list(range(n))) for n in ranks}
    cases = list(product(names, (False, True), (False, True)))

    def step_of(variant: variants.Variant, checkpointing: bool, lora: bool) -> Any:
        return step(variant, 3 if checkpointing and lora else 1, use_gradient_checkpointing=checkpointing)

    references = made_together(cases, lambda case: step_of(made(case[0], case[2]), *case[1:]))
    done = {}
    for n, (name, checkpointing, lora) in product(ranks, cases):
        if rank >= n:
            continue
        variant = made(name, lora)
        handle = wanshim.shard_sequence(variant.dit, groups[n], blocks=block_lists(variant.pipe), deadline=60)
        found = step_of(variant, checkpointing, lora)
        done[name, n, checkpointing, lora] = farthest(found, references[name, checkpointing, lora])
        handle.remove()
    return done


def check(names: tuple[str, ...], ranks: tuple[int, ...], seconds: float = 200) -> None:
    for done in values(run_ranks(compare, max(ranks), names, ranks, seconds=seconds)):
        assert done
        for case, distance in done.items():
            assert distance <= EXACT, case


@pytest.mark.sweep
@pytest.mark.slow
def test_every_covered_variant_on_two_ranks_takes_the_unsharded_step() -> None:
    check(COVERED, (2,))


@pytest.mark.slow
def test_per_token_modulation_and_a_reference_latent_on_three_ranks_take_the_unsharded_step() -> None:
    check(("ti2v-5b", "fun-control"), (3,))


@pytest.mark.sweep
@pytest.mark.slow
def test_every_covered_variant_on_three_and_four_ranks_takes_the_unsharded_step() -> None:
    check(COVERED, (3, 4), 280)


def trained(rank: int, size: int) -> float:
    """How far the LoRA is after five steps, of AdamW, from the unsharded one, by norm."""

    def train(variant: variants.Variant) -> torch.Tensor:
        lora = [p for p in variant.dit.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in lora]
        optimizer = torch.optim.AdamW(lora, lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            step(variant, 1)
            optimizer.step()
        return torch.cat([(p.detach() - b).flatten() for p, b in zip(lora, before)])

    expected, variant = train(made("t2v", lora=True)), made("t2v", lora=True)
    handle = wanshim.shard_sequence(variant.dit, deadline=60)
    found = train(variant)
    handle.remove()
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.slow
def test_lora_after_five_steps_is_the_unsharded_one() -> None:
    assert max(values(run_ranks(trained, 2))) <= 1e-4


def quantized(rank: int, size: int, name: str, features: str) -> float:
    """Distances of loss and gradients, of LoRA on a base of --fp8_models, from those of the same base dequantised."""
    torch.cpu.empty_cache = lambda: None  # DiffSynth empties the cache of whatever device it runs on
    wanshim.activate(features)

    def step_of(*, managed: bool) -> Any:
        variant, owner = fp8_models.with_lora(name, managed=managed)
        undo = Undo()
        if managed:
            low_precision.share_in_copies(owner, undo)
            handle = wanshim.shard_sequence(variant.dit, blocks=block_lists(variant.pipe), deadline=60)
            undo.add(handle.remove)
        loss, gradients = fp8_models.step(variant, owner, checkpointing=True)
        undo.remove()
        return [loss.item()], gradients

    return farthest(step_of(managed=True), step_of(managed=False))


@pytest.mark.slow
@pytest.mark.parametrize("features", ["none", "none,diffsynth.fp8_lora"], ids=["alone", "with the repair"])
def test_lora_on_a_base_of_fp8_models_on_two_ranks_has_the_gradients_of_one(features: str) -> None:
    assert max(values(run_ranks(quantized, 2, "t2v", features))) <= 0.02  # rounding of bfloat16


def removed(rank: int, size: int) -> tuple[bool, bool, list[str]]:
    """Whether the model computes the same bits before and after, and what of it is another object than before."""
    variant = made("t2v", lora=True)

    def parts() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, module in variant.dit.named_modules():
            for name, value in vars(module).items():
                plain = isinstance(value, (int, str, float, tuple, type(None)))
                hooks = name.startswith(("_forward", "_backward")) and isinstance(value, dict)
                found[f"{path}.{name}"] = value if plain else list(value) if hooks else id(value)
        for name, parameter in variant.dit.named_parameters():
            found[name] = tuple(
                len(hooks or ()) for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
            )
        return found

    before, output = parts(), variant()
    step(variant, 1)
    variant.dit.zero_grad()
    handle = wanshim.shard_sequence(variant.dit, deadline=60)
    assert variant.dit.blocks[0].self_attn.num_heads < 5
    step(variant, 1)
    handle.remove()
    handle.remove()
    after = parts()
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return torch.equal(variant(), output), wanshim.core.sequence.sequence_of(variant.dit) is None, changed


def test_removed_handle_leaves_the_model_as_it_was() -> None:
    for same_bits, forgotten, changed in values(run_ranks(removed, 2)):
        assert same_bits
        assert forgotten
        assert [name for name in changed if "hooks" not in name] == []
