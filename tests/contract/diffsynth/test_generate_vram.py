"""A script whose models are under DiffSynth's VRAM management generates as it does alone, streamed, on one GPU and on
two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffsynth.configs import VRAM_MANAGEMENT_MODULE_MAPS
from diffsynth.models.model_loader import ModelPool
from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline
from packaging.version import Version

import wanshim
from tests.contract import scripts
from tests.contract.diffsynth import variants, vram_management, wan_pipelines
from wanshim.adapters.diffsynth import vram
from wanshim.adapters.diffsynth.generate import bind
from wanshim.core.streaming import HostCopy
from wanshim.demo import wan_checkpoint
from wanshim.errors import ModelInvalid

SCRIPT = "tests.contract.diffsynth.vram_management"


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("way", "gpus"), [("disk", 2), ("disk", 1), ("host", 1), ("files", 2)])
def test_script_under_vram_management_has_its_frames(way: str, gpus: int, tmp_path: Path) -> None:
    expected, _ = scripts.run(tmp_path / "alone", SCRIPT, way, "pair")
    found, said = scripts.run(tmp_path / "shared", SCRIPT, way, "pair", behind=scripts.generate(gpus))
    assert all(map(torch.equal, expected, found))
    one = "on cpu: one GPU, bit for bit the frames of the script alone"
    assert (one if gpus == 1 else "guidance over 2") in said, said
    assert "cpu streams blocks of its models from host memory, where the script offloads them" in said
    assert "diffsynth.generate exercised, 3 calls" in said


@pytest.mark.parametrize("kind", ["pair", pytest.param("vace", marks=pytest.mark.sweep), "motion"])
@pytest.mark.parametrize("way", ["host", "disk", "files"])
def test_frames_are_those_of_the_script_and_its_management_goes_on(
    way: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = wan_pipelines.generate(wan_pipelines.MADE[kind](), kind)
    pipe = vram_management.manage(wan_pipelines.MADE[kind](), way, tmp_path)
    before = [type(module) for module in pipe.dit.modules()]
    handle = wanshim.parallelize_pipeline(pipe, gpus=1)
    request.addfinalizer(handle.remove)
    for _ in range(2):
        assert torch.equal(wan_pipelines.generate(pipe, kind), expected)
    assert handle.plan.replaces_offload
    assert [type(module) for module in pipe.dit.modules()] == before
    places = {"cpu"} if way == "host" else {"meta"}
    assert {weight.device.type for name, weight in pipe.dit.named_parameters() if "q.weight" in name} == places
    handle.remove()
    assert torch.equal(wan_pipelines.generate(pipe, kind), expected)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> wan_checkpoint.CheckpointFiles:
    made = wan_checkpoint.write(tmp_path_factory.mktemp("checkpoint"))
    wan_checkpoint.register(made)
    return made


def loaded(files: wan_checkpoint.CheckpointFiles, **places: Any) -> Any:
    return WanVideoPipeline.from_pretrained(
        torch_dtype=torch.bfloat16,
        device="cpu",
        model_configs=[ModelConfig(path=str(path), **places) for path in files.models],
        tokenizer_config=ModelConfig(path=str(files.tokenizer)),
        redirect_common_files=False,
    )


def clip(pipe: Any, **changed: Any) -> torch.Tensor:
    pipe.scheduler.set_timesteps(2)
    given = {"seed": 1, "height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2, "tiled": False}
    return torch.stack([torch.from_numpy(np.array(image)) for image in pipe(prompt="a clip", **given | changed)])


@pytest.fixture
def without_room_for_all(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No GPU is here to fill: the second model is said to have no room."""
    asked: list[str] = []
    load = ModelPool.load_model_file

    def load_model_file(self: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(config["model_name"])
        if len(asked) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load(self, config, *args, **kwargs)

    monkeypatch.setattr(ModelPool, "load_model_file", load_model_file)
    own = VRAM_MANAGEMENT_MODULE_MAPS["diffsynth.models.wan_video_vae.WanVideoVAE"]
    monkeypatch.setitem(VRAM_MANAGEMENT_MODULE_MAPS, f"{wan_checkpoint.__name__}.tiny_vae", own)
    return asked


@pytest.mark.parametrize("places", [{}, {"offload_device": "cpu"}], ids=["none", "half"])
def test_models_without_room_for_all_are_loaded_into_host_memory_and_streamed(
    places: dict[str, str],
    files: wan_checkpoint.CheckpointFiles,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = loaded(files)
    expected = [clip(pipe), clip(pipe, num_frames=9)]
    without_room = request.getfixturevalue("without_room_for_all")
    monkeypatch.setenv("WANSHIM_GENERATE", "1")
    wanshim.activate("none,diffsynth.generate")
    pipe = loaded(files, **places)
    assert len(without_room) == 2 + len(files.models)
    assert pipe.vram_management_enabled
    assert all(map(torch.equal, [clip(pipe), clip(pipe, num_frames=9)], expected))
    row = wanshim.report().row("diffsynth.generate")
    assert row.calls == 2
    (moved,) = (note for note in row.notes if "has no room" in note)
    assert moved == (
        "WanVideoPipeline has no room on cpu as a whole: its models are loaded into host memory, as with "
        'offload_device="cpu" in each ModelConfig'
    )
    assert any("cpu streams blocks of its models from host memory" in note for note in row.notes)


@pytest.mark.parametrize("way", ["off", "own places"])
def test_without_room_the_script_s_own_places_and_a_script_without_the_feature_get_the_error(
    way: str,
    files: wan_checkpoint.CheckpointFiles,
    without_room_for_all: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANSHIM_GENERATE", "1")
    wanshim.activate("none,diffsynth.generate")
    places: dict[str, Any] = {"offload_device": "cpu", "offload_dtype": torch.bfloat16}
    if way == "off":
        wanshim.deactivate()
        places = {}
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        loaded(files, **places)
    assert len(without_room_for_all) == 2


def test_blocks_that_another_model_computes_from_their_children_keep_their_management(tmp_path: Path) -> None:
    """VAP's blocks never call those of the DiT, whose weights come when they are called."""
    pipe = wan_pipelines.MADE["t2v"]()
    for part, model in variants.tiny("vap").modules().items():
        setattr(pipe, part, model.eval().requires_grad_(False))
    vram_management.manage(pipe, "host", tmp_path)
    called = bind(pipe)
    assert called.offload is None
    assert called.device == torch.device("cpu")
    pipe.vap = None
    assert bind(pipe).offload is not None


@pytest.mark.parametrize(
    ("limit", "changed", "room"),
    [(None, {}, float("inf")), (3.0, {}, 2), (0.5, {}, -0.5), (None, {"preparing_device": "disk"}, -1)],
)
def test_short_forwards_keep_what_the_management_itself_would_keep(
    limit: float | None,
    changed: dict[str, Any],
    room: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It prepares layers on the GPU up to its limit. The numbers are those of a GPU, which is not there."""
    pipe = vram_management.manage(wan_pipelines.MADE["pair"](), "host", tmp_path, **changed)
    for wrapper in vram.wrappers(pipe.dit):
        wrapper.vram_limit = limit
    offload = vram.replaceable(pipe, {"dit": pipe.dit})
    assert offload is not None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * 2**30, 8 * 2**30))
    with vram.without_management(pipe.dit):
        assert offload.room(pipe.dit) == room * 2**30
        assert offload.room(torch.nn.Linear(1, 1)) == -(2**30)


def test_models_of_one_forward_come_to_host_memory_once_a_step(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of each, from which it goes to workers, too. The program's own bar runs between steps, so none stays."""
    expected = wan_pipelines.generate(wan_pipelines.MADE["vace"](), "vace")
    pipe = vram_management.manage(wan_pipelines.MADE["vace"](), "files", tmp_path)
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    copied, of = list[str](), HostCopy.of.__func__  # type: ignore[attr-defined]
    noted = classmethod(lambda cls, model, **how: (copied.append(type(model).__name__), of(cls, model, **how))[1])
    monkeypatch.setattr(HostCopy, "of", noted)
    assert torch.equal(wan_pipelines.generate(pipe, "vace"), expected)
    assert handle.plan.gpus == 2
    steps = 3
    assert Counter(copied) == {"VaceWanModel": steps, "WanModel": steps}


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_of_files_stay_there_where_the_host_has_no_room(
    gpus: int, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = wan_pipelines.generate(wan_pipelines.MADE["t2v"](), "t2v")
    pipe = vram_management.manage(wan_pipelines.MADE["t2v"](), "files", tmp_path)
    handle = wanshim.parallelize_pipeline(pipe, gpus=gpus)
    request.addfinalizer(handle.remove)
    monkeypatch.setattr("wanshim.core.shared.host_memory.available_bytes", lambda: 1)
    for _ in range(2):
        assert torch.equal(wan_pipelines.generate(pipe, "t2v"), expected)
    assert not handle.plan.replaces_offload
    assert "GiB of host memory for the weights of WanModel, which its files have" in str(handle.plan)
    assert handle.plan.gpus == 1
    monkeypatch.undo()
    assert torch.equal(wan_pipelines.generate(pipe, "t2v"), expected)
    assert handle.plan.replaces_offload
    assert handle.plan.gpus == gpus


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["torchao_int8_w8a16", pytest.param("torchao_int8_w8a8", marks=pytest.mark.sweep)])
def test_quantized_layers_are_carried_without_their_management(
    method: str, gpus: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """They are no plain tensors, and so the script's own management stays on one GPU."""
    config = pytest.importorskip("diffsynth.core.quant.config", reason="this release quantizes nothing by itself")
    quantize = config.QuantizeConfig(method=method, target_modules=["q", "k", "v", "o"])
    pipe = wan_pipelines.MADE["t2v"]()
    quantize.quantize_model(pipe.dit, compute_device="cpu")
    pipe = vram_management.manage(pipe, "host", tmp_path, quantize=quantize)
    assert type(pipe.dit.blocks[0].self_attn.q).__name__ == "AutoWrappedQuantizedModule"
    expected = wan_pipelines.generate(pipe, "t2v")
    handle = wanshim.parallelize_pipeline(pipe, gpus=gpus)
    request.addfinalizer(handle.remove)
    assert torch.equal(wan_pipelines.generate(pipe, "t2v"), expected)
    assert handle.plan.guidance == gpus
    assert not handle.plan.replaces_offload
    pipe.load_lora(pipe.dit, state_dict=lora(pipe, 1), alpha=0.5)
    with pytest.raises(ModelInvalid, match="LoRAs under VRAM management beside quantized weights"):
        wan_pipelines.generate(pipe, "t2v")


def lora(pipe: Any, seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    layer = pipe.dit.blocks[0].self_attn.q
    return {
        "blocks.0.self_attn.q.lora_A.weight": torch.randn(2, layer.in_features, generator=made),
        "blocks.0.self_attn.q.lora_B.weight": torch.randn(layer.out_features, 2, generator=made),
    }


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.sweep])])
def test_loras_that_are_loaded_hot_go_along(gpus: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """As a service loads another LoRA for each video."""
    made = []
    for shared in (False, True):
        pipe = vram_management.manage(wan_pipelines.MADE["t2v"](), "host", tmp_path)
        if shared:
            handle = wanshim.parallelize_pipeline(pipe, gpus=gpus)
            request.addfinalizer(handle.remove)
        frames = [wan_pipelines.generate(pipe, "t2v")]
        for seed in (1, 2):
            pipe.load_lora(pipe.dit, state_dict=lora(pipe, seed), alpha=0.5)
            frames.append(wan_pipelines.generate(pipe, "t2v"))
        pipe.clear_lora()
        frames.append(wan_pipelines.generate(pipe, "t2v"))
        made.append(frames)
    assert all(map(torch.equal, *made))
    assert not any(torch.equal(made[0][0], other) for other in made[0][1:3])
    assert handle.plan.replaces_offload
    assert handle.plan.guidance == gpus


@pytest.mark.skipif(
    Version(version("diffsynth")) < Version("2.0.10"), reason="in this release DiffSynth's own call ends with an error"
)
def test_loras_that_are_loaded_hot_are_converted_as_diffsynth_does(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As a file of float32 that a script has read itself, for a pipeline of bfloat16."""
    pipe = vram_management.manage(wan_pipelines.MADE["t2v"](), "host", tmp_path)
    plain = wan_pipelines.generate(pipe, "t2v")
    pipe.load_lora(pipe.dit, state_dict={name: weight.bfloat16() for name, weight in lora(pipe, 1).items()})
    expected = wan_pipelines.generate(pipe, "t2v")
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    assert not torch.equal(plain, expected)
    assert torch.equal(wan_pipelines.generate(pipe, "t2v"), expected)
    assert handle.plan.guidance == 2


def converts(pipe: Any, folder: Path) -> None:
    vram_management.manage(pipe, "host", folder, onload_dtype=torch.float8_e4m3fn)


REFUSED: dict[str, tuple[Callable[[Any, Path], None], str]] = {
    "converted": (converts, r"VRAM management that converts its weights \(torch.float32, torch.float8_e4m3fn\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_computed_in_another_way_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, text = REFUSED[name]
    pipe = wan_pipelines.MADE["t2v"]()
    change(pipe, tmp_path)
    with pytest.raises(ModelInvalid, match=f"dit (is under )?{text}"):
        wanshim.parallelize_pipeline(pipe, gpus=2)
