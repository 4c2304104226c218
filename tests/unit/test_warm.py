"""`wanshim warm` and what doctor says of it. cuDNN's engines are a double's: cuDNN computes on GPUs alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.distributed.decoding import tiny
from tests.unit.decoding.engines_double import Double, Made
from wanshim.cli import warm
from wanshim.core.decoding import run
from wanshim.core.decoding.operators.engine_store import EngineStore
from wanshim.core.decoding.operators.engines import Engines
from wanshim.core.shared import gpus
from wanshim.doctor import known_engines
from wanshim.errors import WanshimError

LATENT = (1, 4, 2, 2, 3)
FACTS = {"gpu": "NVIDIA X", "driver": 13000, "cudnn": 91002, "dtype": "torch.bfloat16", "input": [96, 704, 1280]}


def learn(latent: tuple[int, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """How many searches a process makes that finds what `folder` keeps, and what it prints."""
    double = Double({1: Made(8.0), 2: Made(5.0)})
    engines = Engines(double, EngineStore(folder))  # type: ignore[arg-type]
    monkeypatch.setattr(run, "engines_on", lambda *args: engines)
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with torch.no_grad():
        warm.learn(tiny.make_vae("2.1", torch.bfloat16), {"decode": latent}, ("fast",), console)
    assert isinstance(console.file, io.StringIO)
    return double.searches, console.file.getvalue()


def test_what_is_learned_ahead_of_time_is_not_searched_for_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches, shown = learn(LATENT, tmp_path, monkeypatch)
    assert searches > 5
    assert "2/2" in shown
    assert learn(LATENT, tmp_path, monkeypatch)[0] == 0
    assert learn((1, 4, 2, 3, 3), tmp_path, monkeypatch)[0] > 5


@pytest.mark.parametrize("framework", ["diffusers", "diffsynth"])
@pytest.mark.parametrize("layout", sorted(warm.LAYOUTS))
def test_vae_is_the_frameworks_own_and_takes_the_latents(
    framework: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wanshim.core.decoding import find_binding

    pytest.importorskip(framework, reason=f"no {framework} here, whose VAE would be made")
    monkeypatch.setattr(warm, "find_spec", lambda name: name == framework or None)
    vae = warm.make_vae(layout, torch.device("meta"), torch.bfloat16)
    assert type(vae).__module__.startswith(f"{framework}.")
    shapes = warm.shapes_of("704x1280x81", warm.LAYOUTS[layout])
    assert find_binding(vae, "decode").graph.output_shape(shapes["decode"]) == shapes["encode"]
    assert find_binding(vae, "encode").graph.input_channels == 3


def test_environment_without_a_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "find_spec", lambda name: None)
    with pytest.raises(WanshimError, match="neither diffusers nor DiffSynth-Studio"):
        warm.make_vae("2.1", torch.device("meta"), torch.bfloat16)


def keep(home: Path, **changed: Any) -> None:
    folder = home / ".cache" / "wanshim" / "convolutions"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"facts": FACTS | changed, "engine": None})
    (folder / f"{len(list(folder.iterdir()))}.json").write_text(text)


def test_what_is_known_is_counted_by_card_and_cudnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert known_engines.known_engines() == ()
    keep(tmp_path)
    keep(tmp_path, input=[384, 88, 160])
    keep(tmp_path, equal="random values")
    keep(tmp_path, cudnn=91100)
    keep(tmp_path, driver="no number")
    (tmp_path / ".cache/wanshim/convolutions/damaged.json").write_text("{")
    monkeypatch.setattr(gpus, "names", lambda: {"NVIDIA X", "NVIDIA Y"})
    monkeypatch.setattr(known_engines, "installed_cudnn", lambda: "9.10.2")
    first, second = known_engines.known_engines()
    assert str(first) == (
        "cuDNN's engines are known on NVIDIA X, cuDNN 9.10.2, driver 13000: 1 convolutions for strict operators, "
        "2 for fast ones, of 88x160, 704x1280 in bfloat16."
    )
    assert (first.usable, second.usable, second.fast) == (True, False, 1)
    assert "of no use here" in str(second)
    monkeypatch.setattr(known_engines, "has_frontend", lambda: True)
    assert known_engines.unlearned((first, second)) == ("NVIDIA Y",)


def test_many_sizes_are_not_all_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for height in range(10):
        keep(tmp_path, input=[96, height, 160])
    (known,) = known_engines.known_engines()
    assert "7x160 and 2 more in" in str(known)
