"""The command line, and the names that users write into scripts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import wanshim
from tools import matrix as matrix_tool
from tools.drift import verification
from tools.drift.unavailable import ReleaseUnavailable
from wanshim import activation, settings
from wanshim.cli import main
from wanshim.core.shared import gpus
from wanshim.doctor import diagnosis, known_engines
from wanshim.select import catalog, decision, matrix

ROOT = Path(__file__).parents[2]
PUBLIC_NAMES = Path(__file__).with_name("public_names.json")


class Command:
    """`wanshim ...` in this process: exit status, standard output and standard error."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commands: click.Command = main.app
    ) -> None:
        self.monkeypatch, self.capsys, self.commands = monkeypatch, capsys, commands
        monkeypatch.setenv("COLUMNS", "200")

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["wanshim", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.entry(self.commands)
        out, err = self.capsys.readouterr()
        return int(ended.value.code or 0), out, err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`python tools/matrix.py ...`."""
    return Command(monkeypatch, capsys, matrix_tool.app)


def row_of(text: str, feature: str) -> dict[str, Any]:
    return next(row for row in json.loads(text)["rows"] if row["feature"] == feature)


@pytest.mark.parametrize("words", [("monitor", "", "--check"), ("demo", "--output", ""), ("demo", "--video", "")])
def test_empty_path_is_not_the_current_folder(command: Command, words: tuple[str, ...]) -> None:
    status, _, err = command(*words)
    assert (status, "''. Expected a path" in err) == (2, True)


def test_file_that_cannot_be_made_is_one_line_and_no_traceback(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    status, _, err = command("demo", "--output", str(file))
    assert (status, err) == (2, f"wanshim: [Errno 17] File exists: '{file}'\n")


@pytest.mark.parametrize(
    ("demo", "package"), [("", "torch"), ("resume", "peft"), ("decode", "torch"), ("generate", "torch")]
)
def test_demo_without_a_package_that_it_needs_names_it(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo: str, package: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    status, _, err = command("demo", *demo.split())
    assert (status, err) == (2, f"wanshim: {package} is not installed. pip install 'wanshim[demo]'.\n")


def test_ctrl_c_ends_a_command_by_the_status_of_the_signal_and_says_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnosis, "examine", interrupted)
    status, out, err = command("doctor")
    assert (status, out, err.strip()) == (130, "", "")


# -- doctor --------------------------------------------------------------------------------------------


def sentence(out: str, feature: str) -> str:
    (line,) = (line.strip() for line in out.splitlines() if line.strip().startswith(f"{feature}:"))
    return line


def test_doctor_lists_a_framework_whose_source_is_importable_without_a_distribution(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "installed_version", lambda _: None)
    status, out, _ = command("doctor")
    assert status == 0
    assert "diffsynth (not installed as a distribution)" in out.splitlines()
    assert "its code is that of" in sentence(out, "diffsynth.progress")
    assert "Not installed: fastvideo, vllm_omni." in out.splitlines()


def test_doctor_says_of_each_feature_of_an_installed_framework_what_to_type(command: Command) -> None:
    status, out, err = command("doctor")
    assert (status, err) == (0, "")
    assert f"diffsynth {installed_version()}" in out.splitlines()
    installed = {row["framework"] for row in json.loads(command("doctor", "--json")[1])["rows"] if row["version"]}
    for name, feature in catalog.discover().features.items():
        assert (f"  {name}: " in out) is (feature.framework in installed)
    assert sentence(out, "diffsynth.patchify") == "diffsynth.patchify: on by default."
    assert sentence(out, "diffsynth.model_split") == (
        "diffsynth.model_split: available, off. Turn on: WANSHIM_DEVICES=cuda:0,cuda:1 or WANSHIM_PLAN=sequence"
    )
    assert sentence(out, "torch.pg_timeout") == "torch.pg_timeout: available, off. Turn on: WANSHIM_PG_TIMEOUT_S=3600"
    assert "Not installed: fastvideo, vllm_omni." in out.splitlines()


def test_doctor_says_what_selected_a_feature_and_with_all_how_it_was_tested(command: Command) -> None:
    out = command("doctor", "-f", "diffsynth.progress")[1]
    assert sentence(out, "diffsynth.progress") == "diffsynth.progress: on, selected by diffsynth.progress."
    out = command("doctor", "--all")[1]
    assert sentence(out, "diffsynth.patchify") == "diffsynth.patchify: on by default. Tested: behaviour."
    for feature in catalog.discover().features:
        assert f"  {feature}: " in out
    assert "fastvideo (not installed)" in out.splitlines()


@pytest.mark.parametrize("columns", ["60", "80"])
def test_doctor_cuts_nothing_in_a_narrow_terminal(command: Command, columns: str) -> None:
    command.monkeypatch.setenv("COLUMNS", columns)
    narrow = command("doctor", "--all")[1]
    command.monkeypatch.setenv("COLUMNS", "400")
    assert narrow == command("doctor", "--all")[1]
    assert "…" not in narrow


def test_doctor_names_the_folder_of_encoded_prompts_if_there_is_one(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANSHIM_CACHE_DIR", str(tmp_path))
    assert f"Encoded prompts are kept in {tmp_path}." in command("doctor")[1].splitlines()
    monkeypatch.setenv("WANSHIM_CACHE_DIR", str(tmp_path / "none"))
    assert "Encoded prompts" not in command("doctor")[1]


FAST = ("diffsynth.compiled_blocks", "diffsynth.eight_bit_compute", "diffsynth.vae_decode", "diffsynth.vae_encode")


def test_fast_selects_as_auto_does_and_names_nothing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_FAST", "1")
    monkeypatch.setenv("WANSHIM_COMPUTE", "off")
    status, out, _ = command("doctor")
    assert status == 0
    for name in FAST:
        by = "available, off." if name.endswith("compute") else "on, selected by WANSHIM_FAST."
        assert sentence(out, name).startswith(f"{name}: {by}")
    assert not [line for line in out.splitlines() if "has no effect" in line]
    look = activation.Activation()
    assert not look.select(None, settings.read()).named & set(FAST)


def test_first_line_of_a_fast_run_says_what_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**variables: str) -> list[str]:
        read = settings.read({"WANSHIM_FAST": "1", **variables})
        return diagnosis.prepare(None, read)

    assert said() == [
        "WANSHIM_FAST turned on what changes bits, where it is available: WANSHIM_COMPILE=1 WANSHIM_COMPUTE=float8 "
        "WANSHIM_VAE_MODE=auto WANSHIM_VAE_ENCODE=auto WANSHIM_VAE_FAST=1"
    ]
    off = said(WANSHIM_COMPILE="0", WANSHIM_COMPUTE="off", WANSHIM_VAE_FAST="0")
    assert off == [
        "WANSHIM_FAST turned on what changes bits, where it is available: WANSHIM_VAE_MODE=auto WANSHIM_VAE_ENCODE=auto"
    ]
    assert diagnosis.prepare(None, settings.read({})) == []
    (none,) = diagnosis.prepare("none", settings.read({"WANSHIM_FAST": "1"}))
    assert none.startswith(
        "WANSHIM_FAST has no effect, since WANSHIM_FEATURES, -f or activate() leaves out diffsynth.compi"
    )


def test_a_fast_generation_that_no_selected_feature_has_is_refused_before_it_starts(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    started = tmp_path / "started"
    status, out, err = command("generate", "--gpus", "1", "--fast", "-f", "none,generate", "--", "touch", str(started))
    assert (status, out) == (2, "")
    assert "--fast, and no selected feature makes a forward of generation faster. Select it: wanshim" in err
    assert not started.exists()


def test_a_generation_alone_has_fast_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    look, fast = activation.Activation(), {"WANSHIM_FAST": "1"}
    assert "diffusers.fast_blocks" not in look.select(None, settings.read(fast))
    assert "diffusers.fast_blocks" in look.select(None, settings.read({**fast, "WANSHIM_GENERATE": "2"}))
    assert "diffusers.fast_blocks" not in look.select(None, settings.read({"WANSHIM_GENERATE": "2"}))


def test_doctor_says_what_is_known_of_this_cards_engines(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cuDNN" not in command("doctor")[1]  # no GPU here, and nothing kept
    known = known_engines.KnownEngines("NVIDIA X", 13000, "9.10.2", 3, 4, ("88x160",), ("bfloat16",), True)
    monkeypatch.setattr(diagnosis, "known_engines", lambda: (known,))
    monkeypatch.setattr(diagnosis, "unlearned", lambda known: ("NVIDIA Y",))
    lines = command("doctor")[1].splitlines()
    assert str(known) in lines
    assert "cuDNN's engines are not known yet on NVIDIA Y. Ahead of time: wanshim warm --size 704x1280x81" in lines
    assert json.loads(command("doctor", "--json")[1])["engines"][0]["fast"] == 4


def test_doctor_says_that_what_finds_the_engines_is_missing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_engines, "has_frontend", lambda: False)
    assert known_engines.FRONTEND not in command("doctor")[1]  # no GPU here
    monkeypatch.setattr(gpus, "names", lambda: {"NVIDIA X"})
    said = command("doctor")[1]
    assert "nvidia-cudnn-frontend is not installed, which finds the fastest engines of cuDNN on NVIDIA X." in said
    assert "On an H100 a decode or encode takes 0.5 to 0.8 of the time: pip install 'wanshim[cudnn]'" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--size", "704x1280x81"], "no GPU is in sight. Expected a machine with an NVIDIA GPU"),
        (["--size", "704x1280"], "--size 704x1280. Expected height x width x frames"),
        (["--size", "704x1280x80"], "multiples of 8, and 4n + 1 frames"),
        (["--size", "712x1280x81", "--vae", "2.2"], "multiples of 16"),
        (["--size", "704x1280x81", "--vae", "2.3"], "--vae 2.3. Expected one of 2.1, 2.2"),
        (["--size", "704x1280x81", "--mode", "auto"], "--mode auto. Expected one of strict, fast"),
        (["--size", "704x1280x81", "--dtype", "float32"], "--dtype float32. Expected one of bfloat16, float16"),
    ],
)
def test_warm_refuses_in_one_sentence_before_anything_is_loaded(
    command: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.setattr(gpus, "in_sight", lambda visible: 0)
    status, out, err = command("warm", *arguments)
    assert (status, out) == (2, "")
    assert expected in err
    assert len(err.splitlines()) == 1


def test_a_file_that_several_features_look_at_is_parsed_once(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from wanshim.patching import probe

    parsed, parse = [], probe._parse
    monkeypatch.setattr(probe, "_parse", lambda path: parsed.append(path) or parse(path))
    command("doctor")
    assert parsed
    assert len(parsed) == len(set(parsed))


def test_doctor_gives_the_same_as_json(command: Command) -> None:
    status, out, _ = command("doctor", "--json", "-f", "diffsynth.patchify")
    data = json.loads(out)
    row = row_of(out, "diffsynth.patchify")
    assert status == 0
    assert set(data) == {
        "rows",
        "missing",
        "note",
        "unreached",
        "unknown",
        "without_effect",
        "prompt_cache",
        "run_states",
        "run_outlooks",
        "not_counted",
        "engines",
        "unlearned",
        "without_frontend",
        "gpus",
        "disabled",
        "strict",
    }
    assert set(row) == {
        "framework",
        "version",
        "feature",
        "verdict",
        "state",
        "origin",
        "selected_by",
        "reason",
        "next_step",
        "turn_on",
        "known",
    }
    assert (row["verdict"], row["state"], row["selected_by"]) == ("patch", "selected", "diffsynth.patchify")
    off = row_of(out, "diffsynth.model_split")
    assert (off["state"], off["turn_on"][0]) == ("off", "WANSHIM_DEVICES=cuda:0,cuda:1")
    assert row["turn_on"] == []


def test_doctor_names_the_folders_that_have_the_state_of_a_run(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("out/training_state", "states/lora-1234"):
        (tmp_path / name / "run-1").mkdir(parents=True)
        (tmp_path / name / "run-1" / "step-00000012.safetensors").touch()
    (tmp_path / "states" / "empty").mkdir()
    monkeypatch.setenv("WANSHIM_RESUME", str(tmp_path / "states"))
    train = ("--", sys.executable, "train.py", "--output_path", str(tmp_path / "out"))
    _, out, _ = command("doctor", "--json", *train)
    assert json.loads(out)["run_states"] == [f"{tmp_path}/out/training_state", f"{tmp_path}/states/lora-1234"]
    _, out, _ = command("doctor", *train)
    assert "out/training_state has the state of a run: its newest, step-00000012" in out.replace("\n", "")


@pytest.mark.parametrize(
    ("ended", "resume", "said"),
    [
        (False, "auto", "goes on from step 12"),
        (True, "auto", "it has ended at step 12, and with WANSHIM_RESUME its command trains nothing"),
        (False, "auto", "is refused: learning_rate is 0.0001 in the state and 1e-3 in this command"),
        (False, "auto,+learning_rate", "goes on from step 12"),
    ],
)
def test_doctor_says_what_the_command_of_a_state_does(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: bool, resume: str, said: str
) -> None:
    run = tmp_path / "out" / "training_state" / "run-1"
    run.mkdir(parents=True)
    facts = {"position": {"steps": 12}, "ended": ended, "identity": {"learning_rate": 1e-4, "height": 32}}
    header = json.dumps({"__metadata__": {"wanshim.state": json.dumps(facts)}}).encode()
    (run / "step-00000012.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setenv("WANSHIM_RESUME", resume)
    rate = "1e-3" if "learning_rate" in said + resume else "1e-4"
    train = {"--height": "32", "--learning_rate": rate, "--output_path": str(run.parents[1])}
    for options in ([word for pair in train.items() for word in pair], map("=".join, train.items())):
        _, out, _ = command("doctor", "--", sys.executable, "train.py", *options)
        assert said in " ".join(out.split())


def test_doctor_ends_with_one_where_something_asked_for_cannot_be_had(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, out, _ = command("doctor", "-f", "model_split")
    assert status == 1
    assert "requested but unavailable: diffsynth.model_split" in out
    assert "it needs 2 GPUs and 0 are in sight" in " ".join(out.split())
    status, out, _ = command("doctor", "-f", "model_split", "--json")
    assert (status, json.loads(out)["missing"]) == (1, ["diffsynth.model_split"])
    assert command("doctor")[0] == 0


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"WANSHIM_DEVICES": "cuda:0,cuda:1"}, "WANSHIM_DEVICES names cuda:1, GPUs in sight: 1"),
        ({"DIFFSYNTH_DUAL_GPU": "1"}, "DIFFSYNTH_DUAL_GPU names cuda:1, GPUs in sight: 1"),
        ({"WANSHIM_DEVICES": "gpu0,gpu1"}, "WANSHIM_DEVICES names 'gpu0', which is no device of torch's"),
        ({"WANSHIM_DEVICES": "cuda:0,cpu"}, "WANSHIM_DEVICES names devices of several kinds: cuda:0, cpu"),
        ({"WANSHIM_DEVICES": "cpu"}, "WANSHIM_DEVICES names 1 device, and a split needs 2"),
        ({"WANSHIM_PLAN": "split"}, "it needs 2 GPUs and 1 are in sight"),
        (
            {"WANSHIM_DEVICES": "cpu,cpu", "LOCAL_WORLD_SIZE": "2"},
            "2 were started for 2 devices: add --num_processes 1",
        ),
        (
            {"WANSHIM_PLAN": "sequence", "ACCELERATE_USE_FSDP": "true", "LOCAL_RANK": "0"},
            "FSDP (--use_fsdp, ACCELERATE_USE_FSDP, or distributed_type in accelerate's configuration) and ",
        ),
        (
            {"WANSHIM_PLAN": "auto", "WANSHIM_BASE": "int8", "ACCELERATE_USE_DEEPSPEED": "true"},
            "distributed_type in accelerate's configuration) and WANSHIM_BASE each take over the parameters",
        ),
        (
            {"WANSHIM_DEVICES": "cpu,cpu", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "LOCAL_RANK=1 is outside LOCAL_WORLD_SIZE=1",
        ),
    ],
)
def test_doctor_refuses_devices_and_launcher_variables_that_run_would_refuse(
    command: Command, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str
) -> None:
    monkeypatch.setattr(gpus, "in_sight", lambda visible: 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status, out, _ = command("doctor", "--json")
    row = row_of(out, "diffsynth.model_split")
    assert (status, row["verdict"]) == (1, "refuse")
    assert reason in row["reason"]


def test_doctor_says_where_gpus_cannot_be_counted_without_torch(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "in_sight", lambda visible: None)
    monkeypatch.setenv("WANSHIM_DEVICES", "cuda:0,cuda:1")
    status, out, _ = command("doctor", "--json")
    row = row_of(out, "diffsynth.model_split")
    assert (status, row["verdict"]) == (0, "patch")
    assert "the GPUs of this machine cannot be counted without torch" in row["reason"]


@pytest.mark.parametrize(("count", "said"), [(2, "GPUs in sight: 2."), (None, "GPUs in sight: not counted")])
def test_doctor_counts_gpus(command: Command, monkeypatch: pytest.MonkeyPatch, count: int | None, said: str) -> None:
    monkeypatch.setattr(gpus, "in_sight", lambda visible: count)
    status, out, _ = command("doctor")
    assert status == 0
    assert said in out


def test_doctor_says_that_only_the_run_shows_how_many_processes_a_command_starts(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    status, out, _ = command("doctor", "--", sys.executable, "-m", "torch.distributed.run", "train.py")
    assert status == 0
    assert out.count(diagnosis.NOT_COUNTED) == 1
    assert diagnosis.NOT_COUNTED not in command("doctor")[1]
    assert diagnosis.NOT_COUNTED not in command("doctor", "--gpus", "2", "--", "train.py")[1]


@pytest.fixture
def changed_diffsynth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed DiffSynth with another line in `launch_training_task`; its version stays."""
    spec = importlib.util.find_spec("diffsynth")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, tmp_path / "diffsynth", ignore=shutil.ignore_patterns("*.pyc"))
    runner = tmp_path / "diffsynth" / "diffusion" / "runner.py"
    code = runner.read_text(encoding="utf-8")
    runner.write_text(code.replace("optimizer.zero_grad()", "optimizer.zero_grad(); print()"), encoding="utf-8")
    assert runner.read_text(encoding="utf-8") != code
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "diffsynth", raising=False)  # another test of this process may have imported it


@pytest.mark.usefixtures("changed_diffsynth")
def test_strict_doctor_ends_with_one_for_code_that_is_not_known_also_where_no_feature_is_on(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What deploy/Dockerfile promises."""
    assert command("doctor")[0] == 0
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    status, out, _ = command("doctor")
    assert status == 1
    last = out.splitlines()[-1]
    assert last.startswith("WANSHIM_STRICT: code that wanshim does not know: diffsynth.")
    assert "diffsynth.model_split" in last
    assert command("doctor", "-f", "none,diffusers.vae_decode")[0] == 0  # the framework that the image is for


def test_strict_doctor_is_well_where_all_code_is_known(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    assert command("doctor")[0] == 0


@pytest.mark.parametrize("program", ["no-such-program", ""])
def test_doctor_refuses_a_program_that_run_would_not_start(command: Command, program: str) -> None:
    refused = command("run", "--", program)
    assert (refused[0], command("doctor", "--", program)) == (2, refused)


def test_doctor_names_a_misspelt_variable_with_the_nearest_and_ends_with_one(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_DEVICE", "cuda:0,cuda:1")
    status, out, _ = command("doctor")
    assert (status, out.splitlines()[-1]) == (1, "nothing reads WANSHIM_DEVICE; did you mean WANSHIM_DEVICES?")


def test_doctor_names_variables_without_effect(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_VAE_FAST", "1")
    monkeypatch.setenv("WANSHIM_ENCODE_ON", "cpu")
    status, out, _ = command("doctor")
    decode, encode = "diffsynth.vae_decode", "diffusers.vae_encode"
    assert status == 0
    *_, first, second = out.splitlines()
    assert first == "WANSHIM_ENCODE_ON has no effect, since no package fastvideo is installed here"
    assert second.startswith(f"WANSHIM_VAE_FAST has no effect, since {decode} and ")
    assert second.endswith(
        f"{encode} is off. Turn on: WANSHIM_VAE_MODE=auto or WANSHIM_GENERATE=2 or WANSHIM_VAE_ENCODE=auto"
    )
    monkeypatch.setenv("WANSHIM_VAE_MODE", "auto")
    assert "WANSHIM_VAE_FAST" not in command("doctor")[1]


@pytest.mark.parametrize(
    ("words", "number"),
    [(("run",), "0"), (("run",), "2,3"), (("doctor",), "two"), (("generate",), "0"), (("run",), "")],
)
def test_gpus_that_are_no_number_are_refused_with_how_to_name_them(
    command: Command, words: tuple[str, ...], number: str
) -> None:
    status, out, err = command(*words, "--gpus", number, "--", "true")
    said = " ".join(err.replace("│", " ").split())
    assert (status, out) == (2, "")
    assert f"{number!r}. Expected a number, 1 or more; which GPUs, as in CUDA_VISIBLE_DEVICES=2,3 " in said


@pytest.mark.parametrize("option", ["--jsno", "--gups", "-x"])
def test_doctor_takes_no_unknown_option_for_a_command(command: Command, option: str) -> None:
    status, out, err = command("doctor", option)
    assert (status, out) == (2, "")
    assert re.search(f"No such option:? '?{option}", err)  # click's releases write it in two ways


def test_doctor_answers_for_a_command_on_several_gpus(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "in_sight", lambda visible: 2)
    status, out, _ = command("doctor", "--gpus", "2", "--", "python", "train.py")
    assert (status, sentence(out, "diffsynth.model_split")) == (
        0,
        "diffsynth.model_split: on, selected by --gpus 2.",
    )
    monkeypatch.setattr(gpus, "in_sight", lambda visible: 0)
    status, out, err = command("doctor", "--gpus", "2", "--", "python", "train.py")
    assert (status, out) == (2, "")
    assert err.startswith("wanshim: --gpus 2 with 0 GPUs in sight.")


def test_doctor_changes_nothing(command: Command) -> None:
    before = list(sys.meta_path)
    command("doctor", "-f", "all")
    assert sys.meta_path == before
    assert not wanshim.report().active


def test_doctor_says_when_wanshim_is_switched_off(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_DISABLE", "1")
    status, out, _ = command("doctor", "-f", "all")
    assert (status, out.splitlines()[-1]) == (0, "wanshim is switched off by WANSHIM_DISABLE")
    assert "selected by" not in out


@pytest.mark.slow
def test_doctor_imports_neither_torch_nor_a_framework() -> None:
    """Not even where a selected feature needs GPUs: the driver counts them."""
    program = (
        "import sys; sys.argv = ['wanshim', 'doctor']\n"
        "from wanshim.cli import main\n"
        "try:\n    main.entry()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules, "
        "'diffsynth' in sys.modules, 'click' in sys.modules)"
    )
    devices = {**os.environ, "WANSHIM_DEVICES": "cuda:0,cuda:1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=devices)
    assert done.stdout.splitlines()[-1].split()[1:] == ["False", "False", "True"], done.stderr


# -- the rest ------------------------------------------------------------------------------------------


def test_unknown_feature_is_one_message_that_says_where_it_was_named_and_status_two(command: Command) -> None:
    command.monkeypatch.setenv("COLUMNS", "40")
    expected = "which is no feature, framework or ability. Did you mean 'diffsynth.patchify'?\n"
    given = command("doctor", "-f", "diffsynth.patchfy")
    assert given == (2, "", f"wanshim: the list of features names 'diffsynth.patchfy', {expected}")
    command.monkeypatch.setenv("WANSHIM_FEATURES", "diffsynth.patchfy")
    assert command("doctor") == (2, "", f"wanshim: WANSHIM_FEATURES names 'diffsynth.patchfy', {expected}")


def test_bad_variable_is_one_message_and_status_two(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_SPLIT_AT", "half")
    assert command("doctor") == (
        2,
        "",
        "wanshim: WANSHIM_SPLIT_AT='half'. Expected block numbers at which a new stage begins, such as 20 or "
        "10,20,30.\n",
    )


@pytest.mark.parametrize("name", ["doctor", "matrix"])
def test_broken_matrix_is_one_message_and_status_two(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    broken = tmp_path / "compat_matrix.yaml"
    broken.write_text("schema: 1\nframeworks: {diffsynth: 3}\n")
    monkeypatch.setattr(matrix, "path_of_own_matrix", lambda: broken)
    status, out, err = command(name)
    assert (status, out) == (2, "")
    assert err.splitlines()[0] == f"wanshim: {broken} has faults:"
    assert err.splitlines()[1] == "  frameworks.diffsynth: expected a mapping, found 3"


def test_features_lists_every_name_with_its_switch(command: Command) -> None:
    status, out, _ = command("features")
    assert status == 0
    lines = out.splitlines()
    for feature in catalog.discover().features.values():
        where = lines.index(f"{feature.name}: {feature.summary}")
        assert (lines[where + 1] == "  on by default") is feature.auto
    assert "WANSHIM_DEVICES=cuda:0,cuda:1" in lines[lines.index(next(x for x in lines if "model_split:" in x)) + 1]


def test_features_as_json_have_their_switches_with_a_value_to_type(command: Command) -> None:
    listed = {item["feature"]: item for item in json.loads(command("features", "--json")[1])}
    assert list(listed) == list(catalog.discover().features)
    assert {frozenset(item) for item in listed.values()} == {frozenset({"feature", "summary", "auto", "switches"})}
    (switch,) = listed["diffsynth.vae_decode"]["switches"]
    assert (switch["variables"], switch["example"]) == (["WANSHIM_VAE_MODE"], "WANSHIM_VAE_MODE=auto")
    assert "temporal" in switch["meaning"]
    assert listed["diffsynth.patchify"]["switches"] == []


def test_verify_counts_rows_it_could_not_read_apart_and_names_the_cause_once(
    tool: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_installer(*arguments: object) -> None:
        raise ReleaseUnavailable("neither pip nor uv is installed")

    monkeypatch.setattr("tools.drift.library.fetch", no_installer)
    status, out, _ = tool("verify", "diffsynth", "diffusers")
    lines = out.splitlines()
    assert status == 3
    assert sum("neither pip nor uv is installed" in line for line in lines) == 1
    count = int(re.search(r"^0 rows read, 0 differences, (\d+) rows not read$", lines[-1])[1])
    assert f"({count - 1} more rows likewise)" in out


def test_verify_names_a_cause_once_a_framework_when_downloads_are_off(tool: Command) -> None:
    status, out, _ = tool("verify", "diffsynth", "diffusers", "--offline")
    assert status == 3
    assert [line.split()[2] for line in out.splitlines()[:-1]] == ["diffsynth", "diffusers"]


def test_difference_outweighs_what_could_not_be_read(tool: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_or_out_of_reach(*arguments: object) -> list[object]:
        row = matrix.load().rows[0]
        wrong = verification.Difference(row.framework, row.version, "x:y: the table says a, the release b")
        return [wrong, verification.Unread(row, ReleaseUnavailable("out of reach"))]

    monkeypatch.setattr(verification, "verify", wrong_or_out_of_reach)
    status, out, _ = tool("verify")
    assert (status, out.splitlines()[-1]) == (1, "0 rows read, 1 differences, 1 rows not read")


def test_matrix_lists_every_cell(command: Command) -> None:
    cells = [(row.framework, row.version, ability) for row in matrix.load().rows for ability in row.cells]
    status, out, _ = command("matrix", "--json")
    found = [(r["framework"], r["version"], r["feature"].split(".")[1]) for r in json.loads(out)]
    assert status == 0
    assert sorted(found) == sorted(cells)


def test_matrix_groups_releases_of_one_verdict(command: Command) -> None:
    status, out, _ = command("matrix")
    lines = out.splitlines()
    assert status == 0
    assert len(lines) < 150
    own = matrix.load()
    for framework in own.declared:
        rows = list(own.of(framework))
        for ability in {ability for row in rows for ability in row.cells}:
            begin = lines.index(f"  {framework}.{ability}")
            spans = own.spans(framework, ability)
            assert sum(map(len, spans)) == len([row for row in rows if ability in row.cells])
            for line, members in zip(lines[begin + 1 :], spans):
                assert line.startswith(f"    {members[0].version}")
                assert f": {members[0].cells[ability].verdict.value}" in line


@pytest.mark.parametrize("name", ["vllm-omni", "vllm_omni"])
def test_matrix_of_one_framework_by_the_name_that_people_know(command: Command, name: str) -> None:
    status, out, _ = command("matrix", name)
    assert (status, {line.split(".")[0].strip() for line in out.splitlines() if line.startswith("  v")}) == (
        0,
        {"vllm_omni"},
    )
    records = json.loads(command("matrix", name, "--json")[1])
    assert {record["framework"] for record in records} == {"vllm_omni"}


def test_matrix_of_an_unknown_framework_is_refused_with_the_known_ones(command: Command) -> None:
    status, out, err = command("matrix", "sana")
    assert (status, out) == (2, "")
    assert "no framework 'sana' in the matrix. Expected one of diffsynth, " in err


def test_folder_of_the_installed_release_is_held_against_a_row_with_its_code(tool: Command) -> None:
    from importlib.util import find_spec

    spec = find_spec("diffsynth")
    assert spec is not None
    assert spec.origin is not None
    status, out, _ = tool("scan", "--folder", str(Path(spec.origin).parent), "--offline", "--json")
    row = matrix.load().row("diffsynth", installed_version())
    assert status == 0
    assert row is not None
    changes = {change["feature"].split(".")[1]: change for change in json.loads(out)}
    for ability, cell in row.cells.items():
        seams = changes[ability]["seams"]
        assert {seam["target"]: seam["found"] for seam in seams}.items() >= dict(cell.seams).items()
        assert {seam["change"] for seam in seams} <= {"unchanged", "absent", "new"}, ability


def installed_version() -> str:
    from importlib.metadata import version

    return version("diffsynth")


def test_version_is_printed_by_command_and_module(command: Command) -> None:
    assert command("--version") == (0, f"wanshim {wanshim.__version__}\n", "")
    program = [sys.executable, "-m", "wanshim", "--version"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"wanshim {wanshim.__version__}\n")


# -- frozen names --------------------------------------------------------------------------------------


def options_of(group: Any, name: str = "wanshim") -> list[str]:
    own = [f"{name} {option}" for p in group.params for option in p.opts if option != "--help"]
    context = click.Context(group)
    below = group.list_commands(context) if isinstance(group, click.Group) else []
    return own + [line for key in below for line in options_of(group.get_command(context, key), f"{name} {key}")]


def test_public_names_are_those_written_down() -> None:
    """A name that users write into scripts never changes by accident: change it in public_names.json too."""
    variables = {name for field in settings.VARIABLES for name in settings.names_of(field)}
    assert json.loads(PUBLIC_NAMES.read_text()) == {
        "python": sorted(wanshim.__all__),
        "variables": sorted(variables),
        "features": sorted(catalog.discover().features),
        "options": sorted(options_of(main.app)),
    }
