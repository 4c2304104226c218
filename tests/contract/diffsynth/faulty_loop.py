"""Loops that DiffSynth's training loop is held against, whichever release is installed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffsynth.diffusion import runner

from wanshim.patching import SourceTree
from wanshim.patching.verdict import Verdict
from wanshim.select import decision

FEATURE = "diffsynth.gradient_accumulation"
CLEARS = "optimizer.zero_grad()"
Tensors = list[torch.Tensor]


def rearranged(tree: ast.AST, *, faulty: bool) -> ast.AST:
    """A loop with `zero_grad` before the forward, as DiffSynth had it until 2.0.9, or behind the optimizer's step."""
    (block,) = [n for n in ast.walk(tree) if isinstance(n, ast.With) and "accelerator.accumulate" in ast.unparse(n)]
    kept = [statement for statement in block.body if ast.unparse(statement) != CLEARS]
    assert len(kept) == len(block.body) - 1
    last = next(i for i, statement in enumerate(kept) if ast.unparse(statement) == "optimizer.step()")
    kept.insert(0 if faulty else last + 1, ast.parse(CLEARS).body[0])
    block.body = kept
    return ast.fix_missing_locations(tree)


def install_faulty_loop(patch: pytest.MonkeyPatch) -> None:
    """Put the fault into the installed loop, and let the feature be decided as on a release that has it."""
    original = inspect.unwrap(runner.launch_training_task)
    tree = rearranged(ast.parse(inspect.getsource(original)), faulty=True)
    found: dict[str, Any] = {}
    exec(compile(tree, original.__code__.co_filename, "exec"), vars(runner), found)
    patch.setattr(runner, "launch_training_task", found["launch_training_task"])
    decide = decision.decide

    def decided(feature: Any, *known: Any) -> Any:
        found = decide(feature, *known)
        return replace(found, verdict=Verdict.PATCH) if feature.name == FEATURE else found

    patch.setattr(decision, "decide", decided)


def source_with(*, faulty: bool) -> SourceTree:
    """The installed package with the loop of the runner arranged so."""
    source = SourceTree.of_installed("diffsynth")
    node = source.node(f"{runner.__name__}:launch_training_task")
    assert node is not None
    tree = rearranged(ast.parse(ast.unparse(node)), faulty=faulty)
    assert isinstance(tree, ast.Module)
    return replace(source, _trees={runner.__name__: tree})


def train_by_hand(module: Any, numbers: Sequence[Sequence[int]], accumulation: int) -> list[Tensors]:
    """The right loop without accelerate: each of `numbers` is one step's samples, in order. What each step saw."""
    parameters = module.trainable_modules()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    steps = []
    for group in numbers:
        for number in group:
            (module({"number": number}) / accumulation).backward()
        steps.append([parameter.grad.clone() for parameter in parameters])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return steps
