"""The hang of rank-0-only encoding, with FastVideo's own code on gloo: shown first, then gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.fastvideo.conftest import Ranks, needs_per_rank, needs_training
from tests.contract.fastvideo.methods import METHODS, origins

pytestmark = needs_training

ALONE = "none,fastvideo.negative_prompt"


@pytest.mark.parametrize("world", [2, 4])
def test_rank_zero_only_encode_without_the_feature_hangs(affected: Ranks, world: int) -> None:
    reports = affected(world=world, sp=2, deadline=10 * world)  # on a busy machine four ranks meet later than two
    assert all("hung" in report for report in reports), reports
    first, *others = [report["hung"] for report in reports]
    assert "from_pretrained" in first, "rank 0 builds the pipeline and meets a collective there"
    assert all("broadcast" in stack and "from_pretrained" not in stack for stack in others)


@pytest.mark.parametrize("world", [2, 4])
def test_negative_prompt_with_the_feature_completes_on_all_ranks(
    affected: Ranks, upstream: dict[str, Any], world: int, tmp_path: Path
) -> None:
    reports = affected(world=world, sp=2, features=ALONE, cache=tmp_path / "cache")
    assert {row["verdict"] for report in reports for row in report["features"]} <= {"patch", "unknown"}
    assert origins(reports) == ["encoded"] + ["waited"] * (world - 1)
    for report in reports:
        assert torch.equal(report["embeds"], upstream["embeds"])
        assert torch.equal(report["mask"], upstream["mask"])
        assert report["embeds"].dtype is torch.bfloat16


def test_negative_prompt_selected_by_auto_completes(affected: Ranks, tmp_path: Path) -> None:
    reports = affected(sp=2, features="auto", cache=tmp_path / "cache")
    assert [report["encoded"] for report in reports] == [True, True]


def test_negative_prompt_of_a_method_without_guidance_is_not_encoded(affected: Ranks, tmp_path: Path) -> None:
    method = f"{METHODS}.fine_tuning.finetune.FineTuneMethod"
    reports = affected("method_start", sp=2, features=ALONE, cache=tmp_path / "cache", method=method)
    assert [report["encoded"] for report in reports] == [False, False]
    assert not (tmp_path / "cache").exists()


def test_negative_prompt_under_tensor_parallelism_is_encoded_by_one_rank(
    affected: Ranks, upstream: dict[str, Any], tmp_path: Path
) -> None:
    reports = affected(tp=2, features=ALONE, cache=tmp_path / "cache")
    assert all(torch.equal(report["embeds"], upstream["embeds"]) for report in reports)


@needs_per_rank
def test_installed_release_has_no_hang_and_says_native(installed: Ranks, upstream: dict[str, Any]) -> None:
    reports = installed(sp=2, features=ALONE)
    assert [report["features"][0]["verdict"] for report in reports] == ["native", "native"]
    assert all(torch.equal(report["embeds"], upstream["embeds"]) for report in reports)


def test_doctor_of_affected_code_says_patch(affected: Ranks) -> None:
    """A checkout calls itself 0.1.7, like a release without this code: the code alone says what it is."""
    (report,) = affected("doctor", world=1)
    assert report["verdicts"]["fastvideo.negative_prompt"] == affected.verdict
    assert report["versions"]["fastvideo.negative_prompt"] == "0.1.7"


@needs_per_rank
def test_doctor_of_a_release_says_native(installed: Ranks) -> None:
    (report,) = installed("doctor", world=1)
    assert report["verdicts"]["fastvideo.negative_prompt"] == "native"
    assert report["verdicts"]["fastvideo.prompt_cache"] == "patch"
