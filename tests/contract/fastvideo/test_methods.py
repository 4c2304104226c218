"""The table of training methods that read no negative prompt, held against FastVideo's own source."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from tests.contract.fastvideo.conftest import needs_training
from wanshim.adapters.fastvideo.conditioning import NEED_NO_NEGATIVE_PROMPT, needs_no_negative_prompt
from wanshim.patching import SourceTree


@needs_training
@pytest.mark.parametrize("name", sorted(NEED_NO_NEGATIVE_PROMPT))
def test_method_in_the_table_never_predicts_unconditionally(name: str) -> None:
    module, kind = name.rsplit(".", 1)
    tree = SourceTree.of_installed("fastvideo").tree(module)
    if tree is None:
        pytest.skip(f"this FastVideo has no {module}")
    assert kind in {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    conditional = [
        keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "conditional"
    ]
    assert conditional, "the method predicts somewhere"
    assert all(isinstance(value, ast.Constant) and value.value is True for value in conditional)


@pytest.mark.parametrize(
    ("cfg_uncond", "expected"),
    [
        (None, False),
        ({}, False),
        ({"text": "negative_prompt"}, False),
        ({"text": "zero"}, True),
        ({"text": "Keep"}, True),
    ],
)
def test_method_with_its_own_unconditional_text_needs_no_negative_prompt(
    cfg_uncond: dict[str, str] | None, expected: bool
) -> None:
    assert needs_no_negative_prompt(SimpleNamespace(_cfg_uncond=cfg_uncond)) is expected
