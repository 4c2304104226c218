"""DiffSynth's own loading, LoRA and `launch_training_task`, with the feature on and off, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import ModelLogger

import wanshim
from tests.contract.diffsynth.clip_job import FEATURE, OneClip, make_module, train
from wanshim.core.model_split import split_of
from wanshim.demo import wan_checkpoint
from wanshim.errors import FeatureUnavailable, PlacementInvalid


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> wan_checkpoint.CheckpointFiles:
    made = wan_checkpoint.write(tmp_path_factory.mktemp("checkpoint"))
    wan_checkpoint.register(made)
    return made


@pytest.fixture
def two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")


@pytest.mark.slow
def test_split_training_saves_the_lora_of_unsplit_training(
    files: wan_checkpoint.CheckpointFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(2)
    expected = train(make_module(files), tmp_path / "unsplit")
    losses = [line for line in capsys.readouterr().out.splitlines() if line.startswith('{"loss"')]

    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    torch.manual_seed(2)
    module = make_module(files)
    handle = split_of(module.pipe.dit)
    assert handle is not None
    assert handle.plan.devices == ("cpu", "cpu", "cpu")
    found = train(module, tmp_path / "split")
    split_losses = [line for line in capsys.readouterr().out.splitlines() if line.startswith('{"loss"')]

    assert len(losses) == 3
    assert split_losses == losses
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    files_of = [(tmp_path / kind / "epoch-0.safetensors").read_bytes() for kind in ("split", "unsplit")]
    assert files_of[0] == files_of[1]
    row = wanshim.report(strict=True).row(FEATURE)
    assert row.state == "exercised"
    assert any("split into 3 stages" in note for note in row.notes)


@pytest.mark.slow
def test_pipeline_made_without_the_shim_is_split_when_training_starts(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_module(files)
    assert split_of(module.pipe.dit) is None
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    monkeypatch.setenv("WANSHIM_SPLIT_AT", "3")
    wanshim.activate(f"none,{FEATURE}")
    train(module, tmp_path)
    assert split_of(module.pipe.dit).plan.split_at == (3,)


@pytest.mark.usefixtures("two_stages")
def test_cpu_offload_of_the_trainer_is_refused_with_a_split(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path
) -> None:
    from diffsynth.diffusion import runner

    if "enable_model_cpu_offload" not in runner.launch_training_task.__wrapped__.__code__.co_varnames:
        pytest.skip("this DiffSynth has no CPU offload in its trainer")
    module = make_module(files)
    with pytest.raises(FeatureUnavailable, match="enable_model_cpu_offload"):
        runner.launch_training_task(
            Accelerator(), OneClip(), module, ModelLogger(str(tmp_path)), enable_model_cpu_offload=True
        )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WANSHIM_DEVICES": "cpu,cpu", "WANSHIM_SPLIT_AT": "99"}, "split points [99] in a model of 8 blocks"),
        ({"WANSHIM_DEVICES": "cpu,cpu", "WANSHIM_SPLIT_AT": "2,4"}, "2 split points [2, 4] for 2 devices"),
        ({"WANSHIM_DEVICES": ",".join(["cpu"] * 9)}, "9 devices for a model of 8 blocks"),
        ({"WANSHIM_DEVICES": "cpu"}, "1 device for a model split"),
        ({"WANSHIM_DEVICES": "cuda:98,cuda:99"}, "device 'cuda:98' does not exist"),
        ({"WANSHIM_DEVICES": "gpu0,gpu1"}, "device 'gpu0'"),
    ],
    ids=["outside", "too many points", "too many devices", "one device", "no such device", "no device"],
)
def test_bad_split_is_one_clear_error_and_leaves_nothing(
    files: wan_checkpoint.CheckpointFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    message: str,
) -> None:
    module = make_module(files)
    before = {name: id(p) for name, p in module.named_parameters()}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(PlacementInvalid) as caught:
        train(module, tmp_path)
    assert message in str(caught.value)
    assert split_of(module.pipe.dit) is None
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.pipe.dit.modules())
    assert "_apply" not in vars(module.pipe.dit)
    assert {name: id(p) for name, p in module.named_parameters()} == before


@pytest.mark.slow
@pytest.mark.usefixtures("two_stages")
@pytest.mark.parametrize(
    "name", ["LongCatVideoTransformer3DModel", pytest.param("WanAnimate2Transformer", marks=pytest.mark.sweep)]
)
def test_dit_that_cannot_be_split_is_refused_by_name(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, name: str
) -> None:
    module = make_module(files)
    split_of(module.pipe.dit).remove()
    module.pipe.dit.__class__ = type(name, (type(module.pipe.dit),), {})
    train(module, tmp_path)
    assert split_of(module.pipe.dit) is None
    row = wanshim.report().row(FEATURE)
    assert any(reason.startswith("not split") and name in reason for reason in row.fallbacks), row


def test_without_the_feature_the_names_are_the_originals() -> None:
    from diffsynth.diffusion import runner
    from diffsynth.models.model_loader import ModelPool
    from diffsynth.pipelines.wan_video import WanVideoPipeline

    places = [
        (runner, "launch_training_task"),
        (ModelPool, "load_model_file"),
        (WanVideoPipeline, "from_pretrained"),
    ]
    before = [vars(owner)[name] for owner, name in places]
    wanshim.activate("none")
    assert all(vars(owner)[name] is old for (owner, name), old in zip(places, before, strict=True))
    wanshim.activate(f"none,{FEATURE}")
    assert all(vars(owner)[name] is not old for (owner, name), old in zip(places, before, strict=True))
    wanshim.deactivate()
    assert all(vars(owner)[name] is old for (owner, name), old in zip(places, before, strict=True))
