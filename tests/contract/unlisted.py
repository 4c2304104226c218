"""Code that no row speaks of, made from the installed framework: its row hidden, its bodies or its layout changed."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache

import pytest

from wanshim import settings
from wanshim.doctor import diagnosis
from wanshim.patching import Feature, Framework, SourceTree
from wanshim.patching.probe import find
from wanshim.patching.verdict import Verdict
from wanshim.select import matrix
from wanshim.select.catalog import discover
from wanshim.select.decision import decide, installed_version
from wanshim.select.matrix import Matrix
from wanshim.settings import Settings

# Code that stands in no other row and that no judge can prove to fit: nobody has read it, so it is refused. For every
# other cell that rests on code, the probe alone gives the verdict of its row.
REFUSED_WITHOUT_ITS_ROW: dict[str, tuple[str, ...]] = {
    "diffsynth.attention_gradient": ("2.0.12",),
    "diffsynth.checkpoint_offload": ("2.0.12", "2.0.16"),
    "diffsynth.compiled_blocks": ("2.0.12", "2.0.16"),
    "diffsynth.eight_bit_compute": ("2.0.12", "2.0.16"),
    "diffsynth.encode_cache": ("2.0.12", "2.0.16"),
    "diffsynth.kept_attention": ("2.0.12", "2.0.16"),
    "diffsynth.model_split": ("2.0.3", "2.0.4", "2.0.12", "2.0.16"),
    "diffsynth.progress": ("2.0.12", "2.0.16"),
    "diffusers.fast_blocks": ("0.34.0", "0.35.2", "0.36.0", "0.38.0", "0.39.0"),
    "diffusers.generate": ("0.34.0", "0.36.0"),
    "diffsynth.resume": ("2.0.12", "2.0.16"),
    "diffsynth.strict_blocks": ("2.0.5",),
    "diffusers.strict_blocks": ("0.36.0",),
    "diffusers.vae_decode": ("0.34.0", "0.36.0"),
    "diffusers.vae_encode": ("0.34.0", "0.36.0"),
    "fastvideo.progress": ("0.1.4", "0.1.7", "0.1.7+bc27a032c", "0.2.0", "0.2.1"),
    "fastvideo.prompt_cache": ("0.2.0", "0.2.1"),
    "fastvideo.vae_decode": ("0.1.7", "0.2.0", "0.2.1"),
    "fastvideo.vae_encode": ("0.1.7", "0.2.0", "0.2.1"),
    "vllm_omni.vae_allowlist": ("0.16.0",),
    "vllm_omni.vae_decode": ("0.32.0rc1",),
    "vllm_omni.vae_encode": ("0.32.0rc1",),
}
# Code that stands in no other row but for that of some families of models: these alone are left out.
LEFT_OUT_WITHOUT_ITS_ROW: dict[str, dict[str, tuple[str, ...]]] = {
    "diffsynth.generate": dict.fromkeys(("2.1.0", "2.1.1", "2.1.2"), ("MiniMax-H3",)),
    "diffsynth.model_split": {
        **dict.fromkeys(("2.0.2", "2.0.5", "2.0.6"), ("Wan",)),
        **dict.fromkeys(("2.0.10", "2.0.11"), ("FLUX.2",)),
        "2.1.0": ("Wan", "MiniMax-H3"),
        **dict.fromkeys(("2.1.5", "2.1.6"), ("MiniMax-H3",)),
    },
    "diffusers.generate": {
        **dict.fromkeys(("0.35.0", "0.38.0"), ("Qwen-Image",)),
        **dict.fromkeys(("0.35.2", "0.40.0"), ("Wan",)),
    },
    "diffusers.strict_blocks": {"0.35.2": ("Wan",), "0.39.0": ("Qwen-Image",)},
}
# Code that stands in no other row, and whose verdict the feature's judge finds from its structure.
LEFT_TO_THE_JUDGE: dict[str, tuple[str, ...]] = {
    "diffsynth.fp8_lora": ("2.1.12",),
    "diffsynth.gradient_accumulation": ("2.0.12",),
    "diffsynth.patchify": ("1.1.8", "1.1.9"),
    "fastvideo.negative_prompt": ("0.1.7+14261bc98", "0.1.7+1a383f3f6", "0.1.7+71bfc13d7", "0.1.7+bc27a032c"),
    "torch.pg_timeout": ("2.11.0", "2.13.0"),
    "vllm_omni.vae_allowlist": ("0.32.0rc1",),
}


def without_row(known: Matrix, framework: str, version: str | None) -> Matrix:
    row = known.row(framework, version or "")
    assert row is not None, f"{framework} {version} is no row: these tests need one"
    return known.without(row)


def judged(framework: Framework, known: Matrix) -> dict[Feature, Verdict]:
    """The features whose row for the installed version rests on code, with its verdict."""
    row = known.row(framework.name, installed_version(framework.distribution) or "")
    assert row is not None
    cells = {feature: row.cells.get(feature.ability) for feature in discover().features.values()}
    return {
        feature: cell.verdict
        for feature, cell in cells.items()
        if feature.framework == framework.name and cell and any(cell.seams.values())
    }


def expected_without_row(feature: Feature, version: str, verdict: Verdict) -> Verdict:
    """What the row said, as far as code alone shows it: `unknown` patches with a warning."""
    if version in REFUSED_WITHOUT_ITS_ROW.get(feature.name, ()):
        return Verdict.REFUSE
    return Verdict.UNKNOWN if verdict is Verdict.PATCH else verdict


_text = cache(ast.unparse)  # a module has many targets


def relaid(source: SourceTree, module: str) -> SourceTree:
    """The package with one module laid out anew: no comments, other quotes and line breaks, new docstrings."""
    tree = source.tree(module)
    assert tree is not None
    text = _text(tree).replace("):\n", "):  # new\n")
    return replace(source, _trees={module: ast.parse(text)})


def rewritten(source: SourceTree, target: str) -> SourceTree:
    """The package with one more statement in a function, or another value in an assignment."""
    module, qualname = target.split(":")
    original = source.tree(module)
    assert original is not None
    tree = ast.parse(_text(original))
    node = find(tree, qualname)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        node.value = ast.Constant(value="changed")
    else:
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        node.body.append(ast.parse("changed = 1").body[0])
    return replace(source, _trees={module: tree})


class UnlistedCode:
    """The tests, for a subclass that pytest collects and that names `framework`."""

    framework: str

    @pytest.fixture
    def known(self) -> Matrix:
        return matrix.load()

    @pytest.fixture
    def installed(self) -> Framework:
        return discover().frameworks[self.framework]

    @pytest.fixture
    def source(self) -> SourceTree:
        return SourceTree.of_installed(self.framework)

    def test_doctor_without_the_row_gives_its_verdict_from_the_code_alone(
        self, known: Matrix, installed: Framework, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hidden = without_row(known, installed.name, installed_version(installed.distribution))
        monkeypatch.setattr(matrix, "load", lambda: hidden)
        rows = {row.feature: row for row in diagnosis.examine(settings.read(), "none").rows}
        features = judged(installed, known)
        assert features
        for feature, verdict in features.items():
            row = rows[feature.name]
            assert row.version == installed_version(installed.distribution)
            if not row.reason.startswith("calls itself"):  # a commit, which its own row speaks of
                assert row.verdict == expected_without_row(feature, row.version, verdict).value, row
                for family in LEFT_OUT_WITHOUT_ITS_ROW.get(feature.name, {}).get(row.version, ()):
                    assert f"{family} is left out: its code is unlike that of any version" in row.reason

    def test_changed_layout_and_comments_keep_the_verdict(
        self, known: Matrix, installed: Framework, source: SourceTree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for feature, verdict in judged(installed, known).items():
            for module in {target.split(":")[0] for target in feature.targets if source.node(target) is not None}:
                changed = relaid(source, module)
                monkeypatch.setattr(SourceTree, "of_installed", lambda package, changed=changed: changed)
                found = decide(replace(feature, blocked=None), installed, known, Settings())
                assert found.verdict is verdict, f"{feature.name}, {module}: {found.reason}"

    def test_changed_body_under_the_known_version_is_refused(
        self, known: Matrix, installed: Framework, source: SourceTree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for feature, verdict in judged(installed, known).items():
            for target in feature.targets if verdict is Verdict.PATCH else ():
                if source.node(target) is None:
                    continue
                changed = rewritten(source, target)
                monkeypatch.setattr(SourceTree, "of_installed", lambda package, changed=changed: changed)
                found = decide(replace(feature, blocked=None), installed, known, Settings())
                family = feature.family_of(target)
                here = {feature.family_of(one) for one in feature.targets if source.node(one) is not None}
                if family is None or not here - {None, family}:
                    assert found.verdict is Verdict.REFUSE, f"{feature.name}, {target}: {found.reason}"
                else:
                    assert found.verdict is Verdict.PATCH, f"{feature.name}, {target}: {found.reason}"
                    assert list(found.left_out) == [family]
                assert target in found.reason
