"""The installed FastVideo with the encoder loaded by one rank, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.fastvideo.conftest import Ranks, needs_per_rank, needs_training
from tests.contract.fastvideo.methods import METHODS, origins

pytestmark = [needs_training, needs_per_rank]

ALONE = "none,fastvideo.prompt_cache"


def test_prompt_cache_first_run_loads_one_encoder_and_keeps_upstreams_numbers(
    installed: Ranks, upstream: dict[str, Any], tmp_path: Path
) -> None:
    reports = installed(sp=2, features=ALONE, cache=tmp_path / "cache")
    assert origins(reports) == ["encoded", "waited"]
    for report in reports:
        assert torch.equal(report["embeds"], upstream["embeds"])
        assert torch.equal(report["mask"], upstream["mask"])


def test_prompt_cache_second_run_opens_no_encoder_file(
    installed: Ranks, model: Path, tmp_path: Path, count_opens: Callable[..., Any]
) -> None:
    first = installed(sp=2, features=ALONE, cache=tmp_path / "cache")
    counter = count_opens(model / "text_encoder", model / "tokenizer")
    second = installed(sp=2, features=ALONE, cache=tmp_path / "cache")
    assert origins(second) == ["cache", "cache"]
    assert counter.opened == []
    assert all(torch.equal(a["embeds"], b["embeds"]) for a, b in zip(first, second, strict=True))


def test_prompt_cache_without_it_every_run_opens_the_encoder(
    installed: Ranks, model: Path, count_opens: Callable[..., Any]
) -> None:
    counter = count_opens(model / "text_encoder")
    for _ in range(2):
        installed(sp=2)
        assert {name for name in counter.opened if name.endswith(".safetensors")} == {
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        }


def test_prompt_cache_report_says_what_was_done(installed: Ranks, tmp_path: Path) -> None:
    reports = installed(sp=2, features=ALONE, cache=tmp_path / "cache")
    (plan,) = [note for r in reports for row in r["features"] for note in row["notes"] if note.startswith("encoder (")]
    assert "float32) on cpu, whole" in plan
    assert {row["state"] for report in reports for row in report["features"]} == {"exercised"}
    by_origin = {tuple(origins([report])): report["features"][0]["seams"] for report in reports}
    conditioned = {"ensure_negative_conditioning": "exercised, 1 call"}
    assert by_origin["waited",] == conditioned
    assert by_origin["encoded",] == {**conditioned, "_get_weights_iterator": "exercised, 1 call"}


def test_prompt_cache_on_a_full_disk_has_no_effect_and_the_report_says_why(
    installed: Ranks, upstream: dict[str, Any], tmp_path: Path
) -> None:
    for report in installed("start_on_a_full_disk", sp=2, features=ALONE, cache=tmp_path / "cache"):
        assert torch.equal(report["embeds"], upstream["embeds"])
        (row,) = report["features"]
        assert row["state"] == "ineffective"
        assert set(row["seams"].values()) == {"without effect, 1 call"}
        reason = "No space left on device; every rank encodes the prompt for itself, and nothing is kept"
        assert any(reason in note for note in row["notes"])


@pytest.mark.parametrize(
    "method", ["fine_tuning.finetune.FineTuneMethod", "fine_tuning.dfsft.DiffusionForcingSFTMethod"]
)
def test_prompt_cache_of_a_method_without_guidance_encodes_nothing(
    installed: Ranks, tmp_path: Path, method: str
) -> None:
    reports = installed("method_start", features=ALONE, cache=tmp_path / "cache", method=f"{METHODS}.{method}")
    assert [report["encoded"] for report in reports] == [False, False]


def test_prompt_cache_of_a_method_with_guidance_encodes(installed: Ranks, tmp_path: Path) -> None:
    method = f"{METHODS}.distribution_matching.dmd2.DMD2Method"
    reports = installed("method_start", features=ALONE, cache=tmp_path / "cache", method=method)
    assert [report["encoded"] for report in reports] == [True, True]


def test_prompt_cache_layer_by_layer_from_a_narrow_checkpoint_keeps_upstreams_numbers(
    installed: Ranks, tmp_path: Path
) -> None:
    from tests.contract.fastvideo import umt5_checkpoint

    narrow = str(umt5_checkpoint.write(tmp_path, dtype="bfloat16"))
    (whole,) = installed("upstream", world=1, model=narrow)
    (layers,) = installed("layers", world=1, model=narrow)
    assert torch.equal(whole["embeds"], layers["embeds"])


@pytest.mark.parametrize("changes", [{"text_len": 64}, {"preprocess": [None]}, {"prompt": ["a", "b"]}])
def test_prompt_cache_of_other_settings_keeps_the_frameworks_numbers(
    installed: Ranks, upstream: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    cached = {"features": ALONE, "cache": tmp_path / "cache", "world": 1}
    (plain,) = installed(**cached)
    (own,) = installed("changed_start", world=1, **changes)
    for _ in range(2):
        (found,) = installed("changed_start", **changes, **cached)
        assert torch.equal(found["embeds"], own["embeds"])
        assert torch.equal(found["mask"], own["mask"])
    assert torch.equal(plain["embeds"], upstream["embeds"])
    assert origins([found]) == ["cache"]


def test_prompt_cache_of_a_model_without_a_negative_prompt_fails_as_the_framework_does(
    installed: Ranks, tmp_path: Path
) -> None:
    (own,) = installed("changed_start", world=1, prompt=None, expected=("ValueError",))
    cached = {"features": ALONE, "cache": tmp_path / "cache"}
    (found,) = installed("failing_start", world=1, prompt=None, expected=("ValueError",), **cached)
    assert found["error"] == own["error"] == "ValueError"
    (row,) = found["features"]
    assert row["seams"] == dict.fromkeys(
        ("ensure_negative_conditioning", "_get_weights_iterator"), "without effect, 1 call, of which 1 failed"
    )


def test_prompt_cache_of_a_model_that_has_its_embeddings_had_no_effect(installed: Ranks, tmp_path: Path) -> None:
    (found,) = installed("conditioned_start", world=1, features=ALONE, cache=tmp_path / "cache")
    (row,) = found["features"]
    assert row["seams"] == {"ensure_negative_conditioning": "without effect, 1 call"}


def test_prompt_cache_is_found_by_every_rank_that_starts_again(installed: Ranks, tmp_path: Path) -> None:
    reports = installed("changed_start", sp=2, features=ALONE, cache=tmp_path / "cache", starts=2)
    assert origins(reports) == ["cache", "cache", "encoded", "waited"]


def test_prompt_cache_leaves_a_plugin_with_a_method_of_its_own_alone(installed: Ranks, tmp_path: Path) -> None:
    missing, refused = ("ModuleNotFoundError",), ("NotImplementedError",)
    (own,) = installed("cosmos", world=1, rate=0.1, expected=(*missing, *refused))
    if own["error"] in missing:
        pytest.skip("this FastVideo has no cosmos plugin")
    cached = {"features": ALONE, "cache": tmp_path / "cache", "world": 1}
    (found,) = installed("cosmos", rate=0.1, expected=refused, **cached)
    assert found["message"] == own["message"]
    (found,) = installed("cosmos", rate=0.0, **cached)
    assert found["encoded"]
    assert [row["notes"] for row in found["features"]] == [[]]


@pytest.mark.parametrize("plugin", ["hunyuan", "kandinsky5"])
def test_prompt_cache_of_another_plugin_keeps_what_its_own_method_set(
    installed: Ranks, tmp_path: Path, plugin: str
) -> None:
    missing = ("ModuleNotFoundError",)
    (own,) = installed("plugin", world=1, plugin=plugin, model=str(tmp_path / "model"), expected=missing)
    if own.get("error") == "ModuleNotFoundError":
        pytest.skip(f"this FastVideo has no {plugin} plugin")
    environment = {"WANSHIM_ENCODE_ON": "cpu", "WANSHIM_CACHE_DIR": str(tmp_path / "cache")}
    cached = {"features": ALONE, "environment": environment}
    runs = [installed("plugin", world=1, plugin=plugin, model=str(tmp_path / "model"), **cached) for _ in range(2)]
    for ((row,),) in ([rank["features"] for rank in run] for run in runs):
        assert any(note.startswith("WANSHIM_ENCODE_ON=cpu has no effect") for note in row["notes"])
    assert [origins(run) for run in runs] == [["encoded"], ["cache"]]
    for (cached,) in runs:
        assert sorted(k for k in cached if k.startswith("negative_")) == sorted(
            k for k in own if k.startswith("negative_")
        )
        assert all(torch.equal(cached[name], own[name]) for name in own if name.startswith("negative_"))


def test_ranks_with_different_patch_sets_stop_with_the_same_table(installed: Ranks, tmp_path: Path) -> None:
    reports = installed(
        sp=2,
        features=[ALONE, f"{ALONE},torch.pg_timeout"],
        environment={"WANSHIM_CACHE_DIR": str(tmp_path / "cache"), "WANSHIM_PG_TIMEOUT_S": "600"},
        expected=("RankDisagreement",),
        deadline=30,
    )
    first, second = (report["message"] for report in reports)
    assert first == second
    assert "torch.pg_timeout" in first
    assert "different patch sets" in first


def test_pg_timeout_reaches_the_groups_that_fastvideo_makes(installed: Ranks) -> None:
    timeout = {"WANSHIM_PG_TIMEOUT_S": "432"}
    reports = installed(sp=2, features="none,torch.pg_timeout", environment=timeout)
    for report in reports:
        (row,) = report["features"]
        assert row["state"] == "exercised"
        assert any(note.startswith("init_process_group") and "cpu 432 s" in note for note in row["notes"])
        assert any(note.startswith("new_group") and "cpu 432 s" in note for note in row["notes"])
