"""docs/how-to/first_lora.md, its commands run line by line: two processes, DiffSynth's own code, a tiny TI2V-5B."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.contract.diffsynth.guide import commands
from tests.contract.diffsynth.guide.commands import Reader
from wanshim.demo import clip

SAMPLES = 5  # which two processes do not divide
SCRIPT = "examples/wanvideo/model_training/train.py"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    checkout = os.environ.get("DIFFSYNTH_CHECKOUT")
    script = Path(checkout) / SCRIPT if checkout else commands.HERE / "train.py"
    reads = Reader(tmp_path, script)
    _write_data(tmp_path / "data")
    (tmp_path / "wanshim").mkdir()  # the checkout that the guide installs
    yield reads
    reads.close()


def _write_data(folder: Path) -> None:
    """Five clips and a metadata.csv that begins as the guide's does."""
    folder.mkdir()
    columns, *_ = commands.blocks("csv")[0].splitlines()
    lines = [columns]
    for sample in range(SAMPLES):
        shutil.copy(clip.find(), folder / f"clip_{sample:05d}.mp4")
        lines.append(f'clip_{sample:05d}.mp4,"a cyclist, {sample}"')
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_commands_of_the_guide_lead_to_a_lora_and_a_video(reader: Reader, tmp_path: Path) -> None:
    said = {command: reader.run(language, command) for language, command in commands.commands()}

    def output(begin: str) -> str:
        (found,) = (text for command, text in said.items() if command.startswith(begin))
        return found

    for feature in ("diffsynth.progress", "torch.pg_timeout"):
        assert f"selected by {feature}" in said[f"wanshim doctor -f {feature}"]
    written = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
    promised = yaml.safe_load(commands.blocks("yaml")[0])
    assert {name: written[name] for name in promised} == promised

    trained = output("wanshim run")
    assert "step 3/3 (100.0 %)" in trained
    assert "wanshim: torch.pg_timeout exercised" in trained
    assert (tmp_path / "ti2v-5b-lora" / "epoch-0.safetensors").stat().st_size > 10_000

    status = json.loads(output("curl"))
    assert (status["state"], status["processes"], len(status["gpus"])) == ("finished", 2, 2)
    assert (status["current_step"], status["total_steps"], status["progress_percent"]) == (3, 3, 100)
    assert (status["optimizer_step"], status["total_optimizer_steps"]) == (2, 2)
    assert "finished  step 3/3 (100.0 %)" in said["wanshim monitor training_logs"]

    assert len(list((tmp_path / "tensorboard").glob("*/*/events.out.tfevents.*"))) == 2
    for path in (tmp_path / "csv").glob("*/*.csv"):
        with path.open(newline="") as file:
            assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3"]
    assert output("from wanshim.core").split() == ["2500", "425450", "141820"]
    assert (tmp_path / "cyclist.mp4").stat().st_size > 1000


def test_guide_says_what_its_numbers_are() -> None:
    """The comments of the block that prints, which nobody prints."""
    (block,) = (code for code in commands.blocks("python") if "StepAccounting" in code)
    from wanshim.core.training import StepAccounting

    for call, result in re.findall(r"print\((.*)\)  # (\d+)", block):
        assert eval(call, {"StepAccounting": StepAccounting}) == int(result)


def test_every_word_that_is_made_smaller_is_in_the_guide() -> None:
    text = commands.GUIDE.read_text(encoding="utf-8")
    assert [word for word in commands.SMALLER if word not in text] == []
