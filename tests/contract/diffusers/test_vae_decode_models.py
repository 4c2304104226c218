"""Every model of diffusers that docs/reference/vae_models.md names: its pipeline takes a VAE that is shared."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.contract.decoding import Case, Subject, check_shared
from tests.contract.diffusers.pipeline_vaes import CONFIGS, LATENT_CHANNELS, LAYERED, PIPELINES
from wanshim.patching import SourceTree
from wanshim.select.catalog import discover

MODULE = "tests.contract.diffusers.pipeline_vaes"
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "vae_models.md"
SHAPES = sorted({(layout, image) for _, layout, image in PIPELINES.values()})


@pytest.mark.parametrize("model", PIPELINES)
def test_pipeline_of_the_model_takes_a_class_that_both_features_patch(model: str) -> None:
    target, layout, _ = PIPELINES[model]
    source = SourceTree.of_installed("diffusers")
    place = f"diffusers.pipelines.{target}.__init__"
    node = source.node(place)
    if node is None:
        pytest.skip(f"this release has no {target}")
    assert isinstance(node, ast.FunctionDef)
    taken = next(ast.unparse(arg.annotation) for arg in node.args.args if arg.arg == "vae" and arg.annotation)
    cls = CONFIGS[layout][0]
    assert cls in taken
    for verb in ("decode", "encode"):
        seams = [seam.target for seam in discover().features[f"diffusers.vae_{verb}"].seams]
        assert any(f":{cls}._{verb}" in seam for seam in seams)


def test_page_names_every_model() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [model for model in PIPELINES if model not in page] == []


@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_vaes_in_the_shape_of_their_pipelines_shared_by_two_ranks_equal_diffusers(verb: str) -> None:
    known = [(layout, image) for layout, image in SHAPES if layout in _available()]
    if verb == "encode":
        known = [(layout, image) for layout, image in known if layout != LAYERED]  # its images have four channels
    assert known
    cases = [
        Case(layout, "float32", 1 if image else 3, mode="spatial" if image else "temporal") for layout, image in known
    ]
    check_shared(Subject(feature=f"diffusers.vae_{verb}", module=MODULE, target=""), cases)


def _available() -> list[str]:
    import inspect

    import diffusers

    assert set(LATENT_CHANNELS) == set(CONFIGS)
    found = []
    for layout, (name, config) in CONFIGS.items():
        cls = getattr(diffusers, name, None)
        if cls is not None and set(config) <= set(inspect.signature(cls.__init__).parameters):
            found.append(layout)
    return found
