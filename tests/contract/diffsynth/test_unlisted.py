"""What doctor says of the installed code where no row knows it, or where it is not what its row knows."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from tests.contract.unlisted import REFUSED_WITHOUT_ITS_ROW, UnlistedCode, judged, without_row
from wanshim.adapters.diffsynth import FRAMEWORK, patchify
from wanshim.patching import SourceTree
from wanshim.patching.verdict import Verdict
from wanshim.select.decision import decide, installed_version
from wanshim.select.matrix import Matrix
from wanshim.settings import Settings

UNPACKS = "x, (f, h, w) = self.patchify(x)"
FIXED = "x = self.patchify(x); f, h, w = x.shape[2:]"
OLDEST_ABILITIES = {"fp8_lora", "model_split", "patchify", "progress", "s2v_checkpointing", "vae_decode"}


class TestUnlistedDiffSynth(UnlistedCode):
    framework = "diffsynth"

    def test_every_ability_is_recognised_without_the_row(self, known: Matrix, source: SourceTree) -> None:
        version = installed_version(FRAMEWORK.distribution)
        hidden = without_row(known, "diffsynth", version)
        features = [feature for feature in judged(FRAMEWORK, known) if feature.ability in OLDEST_ABILITIES]
        found = {
            feature.ability: decide(replace(feature, blocked=None), FRAMEWORK, hidden, Settings()).verdict
            for feature in features
        }
        refused = {
            ability
            for ability in OLDEST_ABILITIES
            if version in REFUSED_WITHOUT_ITS_ROW.get(f"diffsynth.{ability}", ())
        }
        assert found == dict.fromkeys(OLDEST_ABILITIES, Verdict.UNKNOWN) | dict.fromkeys(refused, Verdict.REFUSE)

    def test_judge_alone_sees_the_fault_where_no_release_is_known(self, known: Matrix) -> None:
        found = decide(patchify.FEATURE, FRAMEWORK, replace(known, rows=()), Settings())
        assert (found.verdict, found.reason) == (
            Verdict.UNKNOWN,
            "WanModel.forward unpacks a pair from patchify, which returns one tensor",
        )

    @pytest.mark.parametrize("listed", [True, False])
    def test_code_that_upstream_mended_is_native_whatever_its_version(
        self, known: Matrix, source: SourceTree, monkeypatch: pytest.MonkeyPatch, listed: bool
    ) -> None:
        module = patchify.FORWARD.split(":")[0]
        text = ast.unparse(source.tree(module))
        assert UNPACKS in text
        fixed = replace(source, _trees={module: ast.parse(text.replace(UNPACKS, FIXED))})
        monkeypatch.setattr(SourceTree, "of_installed", lambda package: fixed)
        rows = known if listed else without_row(known, "diffsynth", installed_version(FRAMEWORK.distribution))
        assert decide(patchify.FEATURE, FRAMEWORK, rows, Settings()).verdict is Verdict.NATIVE
