"""Every variable: what it accepts, what it says of anything else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from wanshim import activation, hand_over, settings
from wanshim.errors import SettingInvalid
from wanshim.settings import Settings

PLANS = (
    "one of auto, stream, pipeline, split, sequence, or with a number: stream:20 for 20 streamed blocks, "
    "sequence:2 for groups of 2 processes"
)
SECONDS = "seconds above zero, such as 1800, and at most 2592000 (30 days)"


def message(environ: dict[str, str]) -> str:
    with pytest.raises(SettingInvalid) as caught:
        settings.read(environ)
    return str(caught.value)


def test_empty_environment_gives_the_defaults() -> None:
    assert settings.read({}) == Settings()


def test_every_variable_is_read_and_its_source_named() -> None:
    found = settings.read(
        {
            "WANSHIM_FEATURES": "diffsynth,-diffsynth.progress",
            "WANSHIM_STRICT": "Yes",
            "WANSHIM_DEVICES": "cuda:0, cuda:1",
            "WANSHIM_SPLIT_AT": "10,20",
            "WANSHIM_VAE_MODE": "Temporal",
            "WANSHIM_PG_TIMEOUT_S": "0.5",
            "LOCAL_WORLD_SIZE": "4",
        }
    )
    assert found.features == "diffsynth,-diffsynth.progress"
    assert found.strict is True
    assert found.devices == ("cuda:0", "cuda:1")
    assert found.split_at == (10, 20)
    assert found.vae_mode == "temporal"
    assert found.pg_timeout_s == 0.5
    assert found.local_world_size == 4
    assert found.sources["devices"] == "WANSHIM_DEVICES"
    assert set(found.sources) == {
        "features",
        "strict",
        "devices",
        "split_at",
        "vae_mode",
        "pg_timeout_s",
        "local_world_size",
    }


def test_variable_that_nothing_reads_is_named_with_the_nearest_known_one() -> None:
    own = ["WANSHIM_RUN_PREFIX", "WANSHIM_INHERITED", "WANSHIM_RUN_RANK", "WANSHIM_RUN_FAILURE", "WANSHIM_COMMIT"]
    environ = dict.fromkeys([*own, "WANSHIM_SPLITAT", "WANSHIM_DEVICE", "WANSHIM_GPUS", "DEVICES"], "1")
    assert settings.unknown(environ | {"WANSHIM_DEVICES": "cpu"}) == [
        "nothing reads WANSHIM_DEVICE; did you mean WANSHIM_DEVICES?",
        "nothing reads WANSHIM_GPUS. `wanshim features` names what there is",
        "nothing reads WANSHIM_SPLITAT; did you mean WANSHIM_SPLIT_AT?",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("WANSHIM_PROGRESS_DIR", "logs"), ("WANSHIM_RESUME", "./logs"), ("WANSHIM_ENCODE_CACHE", "./logs")],
)
def test_folder_is_relative_to_where_the_process_began(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not to where a script has gone before it trains."""
    monkeypatch.chdir(tmp_path)
    read = settings.read({name: value})
    found = (read.progress_dir, read.resume and read.resume.folder, read.encode_cache)
    assert str(tmp_path / "logs") in found
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SettingInvalid, match="the current folder is gone"):
        settings.read({name: value})


@pytest.mark.parametrize("field", [field for field, row in settings.VARIABLES.items() if row.example == "auto"])
def test_word_of_a_grammar_is_no_folder(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) not in repr(settings.read({settings.names_of(field)[0]: "auto"}))


def test_folder_in_a_home_that_nobody_knows_is_refused_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a container's user who has no entry in its passwd."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert message({"WANSHIM_ENCODE_CACHE": "auto"}) == (
        "WANSHIM_ENCODE_CACHE='auto'. Expected a path; no home directory is known for this one."
    )


@pytest.mark.parametrize("name", ["WANSHIM_CACHE_DIR", "WANSHIM_PROGRESS_DIR"])
def test_home_in_a_path_is_expanded_where_no_shell_does_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    read = settings.read({name: "~/logs"})
    assert "/home/me/logs" in (read.cache_dir, read.progress_dir)
    assert message({name: "~no-such-user/logs"}) == (
        f"{name}='~no-such-user/logs'. Expected a path; no home directory is known for this one."
    )


def test_plan_of_a_process_for_each_gpu_contradicts_devices_of_one_process() -> None:
    assert message({"WANSHIM_PLAN": "sequence", "WANSHIM_DEVICES": "cuda:0,cuda:1"}) == (
        "WANSHIM_PLAN=sequence and WANSHIM_DEVICES. Expected one of the two: a process for each GPU, or one process "
        "over all devices."
    )


def test_empty_value_counts_as_unset() -> None:
    names = [name for field in settings.VARIABLES for name in settings.names_of(field)]
    assert settings.read(dict.fromkeys(names, "")) == Settings()


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_boolean_that_says_yes_is_true(value: str) -> None:
    assert settings.read({"WANSHIM_STRICT": value}).strict is True


def test_plan_may_say_how_many_blocks_are_streamed() -> None:
    assert settings.read({"WANSHIM_PLAN": " Stream:20"}).plan == settings.WantedPlan("stream", 20)
    assert settings.read({"WANSHIM_PLAN": "pipeline"}).plan == settings.WantedPlan("pipeline")


@pytest.mark.parametrize(("value", "expected"), [("expandable_segments:True", True), ("max_split_size_mb:64", False)])
def test_allocator_of_torch_is_read_for_expandable_segments(value: str, expected: bool) -> None:
    assert settings.read({"PYTORCH_CUDA_ALLOC_CONF": value}).expandable_segments is expected


OFF_WORDS = ["0", "False", "no", "OFF", " off "]
OWN = [field for field, variable in settings.VARIABLES.items() if not variable.foreign]


@pytest.mark.parametrize("word", OFF_WORDS)
@pytest.mark.parametrize("field", OWN)
def test_word_that_switches_off_selects_nothing_in_any_variable(field: str, word: str) -> None:
    for name in settings.names_of(field):
        found = settings.read({name: word})
        assert getattr(found, field) == settings.VARIABLES[field].off
        assert not found.is_on(field)
        assert activation.Activation().switched(found) == {}


@pytest.mark.parametrize("field", OWN)
def test_empty_variable_is_an_unset_one(field: str) -> None:
    assert settings.read(dict.fromkeys(settings.names_of(field), "")) == Settings()


@pytest.mark.parametrize("field", [field for field in OWN if field != "disable"])
def test_example_of_a_variable_is_on_unless_it_switches_off(field: str) -> None:
    variable = settings.VARIABLES[field]
    found = settings.read({settings.names_of(field)[0]: variable.example})
    assert found.is_on(field) is (variable.example != "0")


@pytest.mark.parametrize("value", ["0", "False", "no", "OFF", " "])
def test_boolean_that_says_no_is_false(value: str) -> None:
    assert settings.read({"WANSHIM_STRICT": value}).strict is False


def test_upstream_names_stand_for_two_gpus_and_the_split_point() -> None:
    found = settings.read({"DIFFSYNTH_DUAL_GPU": "true", "DIFFSYNTH_DUAL_GPU_SPLIT_AT": "20"})
    assert (found.devices, found.split_at) == (("cuda:0", "cuda:1"), (20,))
    assert found.sources == {"devices": "DIFFSYNTH_DUAL_GPU", "split_at": "DIFFSYNTH_DUAL_GPU_SPLIT_AT"}


def test_upstream_name_that_says_no_changes_nothing() -> None:
    found = settings.read({"DIFFSYNTH_DUAL_GPU": "false"})
    assert replace(found, sources={}) == Settings()
    assert not found.is_on("devices")


def test_own_names_beat_the_upstream_names() -> None:
    found = settings.read(
        {
            "DIFFSYNTH_DUAL_GPU": "true",
            "DIFFSYNTH_DUAL_GPU_SPLIT_AT": "20",
            "WANSHIM_DEVICES": "cuda:2,cuda:3,cuda:4",
            "WANSHIM_SPLIT_AT": "7,9",
        }
    )
    assert (found.devices, found.split_at) == (("cuda:2", "cuda:3", "cuda:4"), (7, 9))
    assert found.sources == {"devices": "WANSHIM_DEVICES", "split_at": "WANSHIM_SPLIT_AT"}


# what was expected -> variables with values outside the grammar
INVALID = {
    "1 or 0 (true/false, yes/no, on/off)": [
        ("WANSHIM_DISABLE", "maybe"),
        ("WANSHIM_STRICT", "2"),
        ("DIFFSYNTH_DUAL_GPU", "both"),
    ],
    "devices, such as cuda:0,cuda:1": [("WANSHIM_DEVICES", " , ")],
    "block numbers at which a new stage begins, such as 20 or 10,20,30": [
        ("WANSHIM_SPLIT_AT", "20,"),
        ("WANSHIM_SPLIT_AT", "half"),
        ("WANSHIM_SPLIT_AT", "-3"),
        ("WANSHIM_SPLIT_AT", "1_0"),
        ("DIFFSYNTH_DUAL_GPU_SPLIT_AT", "x"),
    ],
    "one of auto, temporal, spatial, tile, off": [("WANSHIM_VAE_MODE", "fast")],
    "one of auto, on, off": [("WANSHIM_OFFLOAD", "1")],
    PLANS: [
        ("WANSHIM_PLAN", "ddp"),
        ("WANSHIM_PLAN", "pipeline:2"),
        ("WANSHIM_PLAN", "stream:0"),
        ("WANSHIM_PLAN", "sequence:1"),
        ("WANSHIM_PLAN", "sequence:"),  # of `sequence:$N` where N is not set
        ("WANSHIM_PLAN", "auto:"),
        ("WANSHIM_PLAN", "stream:²"),  # a digit that is no number
    ],
    SECONDS: [
        ("WANSHIM_PG_TIMEOUT_S", "inf"),
        ("WANSHIM_PG_TIMEOUT_S", "nan"),
        ("WANSHIM_PG_TIMEOUT_S", "soon"),
        ("WANSHIM_PG_TIMEOUT_S", "1e12"),
        ("WANSHIM_ENCODE_TIMEOUT_S", "-5"),
        ("WANSHIM_ENCODE_TIMEOUT_S", "1e12"),
    ],
    "a whole number above zero": [("LOCAL_WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "-1"), ("LOCAL_WORLD_SIZE", "²")],
    "a rank: a whole number from zero": [("LOCAL_RANK", "²")],
    "auto, off, or tokens a chunk, such as 2048": [("WANSHIM_CHUNK", "²")],
    "optimizer steps, such as 500, or a time, such as 90s, 10m or 2h": [("WANSHIM_SAVE_EVERY", "²s")],
    "a path, or nothing at all": [("WANSHIM_PROGRESS_DIR", " ")],  # else a folder of that name
}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [(*given, expected) for expected, all_given in INVALID.items() for given in all_given],
)
def test_value_outside_the_grammar_is_named_with_what_was_expected(name: str, value: str, expected: str) -> None:
    assert message({name: value}) == f"{name}={value!r}. Expected {expected}."


def test_disabled_reads_nothing_else() -> None:
    found = settings.read({"WANSHIM_DISABLE": "1", "WANSHIM_DEVICES": ",", "LOCAL_WORLD_SIZE": "none"})
    assert found == Settings(disable=True, sources={"disable": "WANSHIM_DISABLE"})


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_SPLIT_AT", "3")
    assert settings.read().split_at == (3,)


@pytest.mark.parametrize(
    ("value", "gpus", "at_most"),
    [
        ("2", 2, None),
        (" 4 ", 4, None),
        ("CFG:2", 2, (2, 1)),
        ("sequence:3", 3, (1, 3)),
        ("cfg:2, sequence:2", 4, (2, 2)),
        ("sequence:3,cfg:1", 3, (1, 3)),
    ],
)
def test_generate_is_a_number_of_gpus_or_what_goes_over_them(
    value: str, gpus: int, at_most: tuple[int, int] | None
) -> None:
    assert settings.read({"WANSHIM_GENERATE": value}).generate == settings.WantedGeneration(gpus, at_most)


@pytest.mark.parametrize(
    "value",
    [
        "-1",
        "two",
        "cfg:3",
        "cfg",
        "sequence",
        "sequence:0",
        "cfg:2 sequence:2",
        "cfg:2,cfg:2",
        "tokens:2",
        "2.",
        ",",
    ],
)
def test_generate_refuses_what_no_pipeline_can_have(value: str) -> None:
    with pytest.raises(SettingInvalid, match=r"WANSHIM_GENERATE=.* Expected a number of GPUs, such as 4, or what"):
        settings.read({"WANSHIM_GENERATE": value})


@pytest.mark.parametrize(
    ("text", "folder", "anew", "accepted"),
    [
        ("auto", None, False, set()),
        ("new", None, True, set()),
        ("/s,+a,+b", "/s", False, {"a", "b"}),
        ("/s,+new", "/s", True, {"new"}),
    ],
)
def test_resume_names_a_folder_and_what_may_differ(
    text: str, folder: str | None, anew: bool, accepted: set[str]
) -> None:
    found = settings.read({"WANSHIM_RESUME": text}).resume
    assert found == settings.WantedResume(folder, anew, frozenset(accepted))


@pytest.mark.parametrize("text", ["1", "auot", "AUTO", "auto,learning_rate", "states", "auto,+", ","])
def test_resume_takes_no_word_for_a_folder(text: str) -> None:
    with pytest.raises(SettingInvalid, match="WANSHIM_RESUME"):
        settings.read({"WANSHIM_RESUME": text})


@pytest.mark.parametrize(("text", "steps", "seconds"), [("500", 500, None), ("90s", None, 90.0), ("2h", None, 7200.0)])
def test_state_is_saved_after_steps_or_seconds(text: str, steps: int | None, seconds: float | None) -> None:
    assert settings.read({"WANSHIM_SAVE_EVERY": text}).save_every == settings.SaveEvery(steps, seconds)


@pytest.mark.parametrize("text", ["m", "-5", "10d", "1.5m"])
def test_state_is_not_saved_after_what_is_no_interval(text: str) -> None:
    with pytest.raises(SettingInvalid, match="WANSHIM_SAVE_EVERY"):
        settings.read({"WANSHIM_SAVE_EVERY": text})


@pytest.mark.parametrize(
    ("own", "value"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"},
            {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8,expandable_segments:True"},
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, {}),
    ],
)
def test_allocator_is_set_up_beside_what_the_user_says_and_put_back(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str], value: dict[str, str]
) -> None:
    for name in settings.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, text in own.items():
        monkeypatch.setenv(name, text)
    found = hand_over.expand_segments(Settings(), torch_started=False)
    assert found.expandable_segments is bool(value)
    assert {name: os.environ[name] for name in settings.ALLOCATOR if name in os.environ} == own | value
    hand_over.hand_down_nothing()
    assert {name: os.environ[name] for name in settings.ALLOCATOR if name in os.environ} == own


def test_allocator_that_has_started_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert not hand_over.expand_segments(Settings(), torch_started=True).expandable_segments
    assert not set(settings.ALLOCATOR) & set(os.environ)


def test_fast_sets_what_no_variable_of_its_own_does() -> None:
    found = settings.read({"WANSHIM_FAST": "1"})
    values = (found.compile, found.compute, found.vae_mode, found.vae_encode, found.vae_fast)
    assert values == (True, "float8", "auto", "auto", True)
    assert {found.sources[field] for field in settings.FAST_FIELDS} == {"WANSHIM_FAST"}
    assert settings.read({}, fast=True) == found
    assert settings.read({"WANSHIM_FAST": "0"}, fast=True) == found


@pytest.mark.parametrize(
    ("own", "value"),
    [
        ({"WANSHIM_COMPILE": "0"}, {"compile": False}),
        ({"WANSHIM_COMPUTE": "off"}, {"compute": None}),
        ({"WANSHIM_COMPUTE": "int8"}, {"compute": "int8"}),
        ({"WANSHIM_VAE_MODE": "off"}, {"vae_mode": "off"}),
        ({"WANSHIM_VAE_ENCODE": "spatial"}, {"vae_encode": "spatial"}),
        ({"WANSHIM_VAE_FAST": "0"}, {"vae_fast": False}),
        ({"WANSHIM_BASE": "int8"}, {"compute": "int8"}),  # a base is multiplied as it is stored
    ],
)
def test_each_variable_wins_over_fast(own: dict[str, str], value: dict[str, object]) -> None:
    found = settings.read({"WANSHIM_FAST": "1", **own})
    (field,) = value
    for name, other in (settings.FAST_FIELDS | value).items():
        assert getattr(found, name) == other
        assert (found.sources[name] == "WANSHIM_FAST") is (name != field or "WANSHIM_BASE" in own)


def test_without_the_word_nothing_is_fast() -> None:
    assert settings.read({"WANSHIM_FAST": "0"}) == Settings(sources={"fast": "WANSHIM_FAST"})


def test_a_command_is_one_process_and_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANSHIM_RUN_FAILURE", str(tmp_path / "0"))
    monkeypatch.setattr(hand_over, "_claimed", [])
    monkeypatch.delenv("WANSHIM_INHERITED", raising=False)
    (tmp_path / "0.reached").write_text(str(os.getppid()))
    assert (hand_over.is_program(), hand_over.claim_program()) == (False, False)
    hand_over.mark_reached()
    monkeypatch.setattr(hand_over, "_claimed", [])
    assert (hand_over.is_program(), hand_over.claim_program(), hand_over.claim_program()) == (True, True, False)
    hand_over.leave_rank()
    assert hand_over.is_program()
    monkeypatch.setenv("WANSHIM_RUN_RANK", "0/2")
    hand_over.leave_rank()
    assert hand_over.program_pid() is None
    monkeypatch.setenv("WANSHIM_INHERITED", "auto")
    hand_over.mark_reached()
    assert not hand_over.is_program()


@pytest.mark.parametrize(
    ("given", "engine"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, None),
        ({"ACCELERATE_USE_FSDP": "true", "LOCAL_RANK": "0"}, "FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
    ],
)
def test_fsdp_takes_effect_in_processes_of_a_launcher_alone(given: dict[str, str], engine: str | None) -> None:
    assert settings.read(given).engine == engine


@pytest.mark.parametrize("path", ["dev/dxg", "proc/driver/nvidia/capabilities/gpu0/mig/gi3/access"])
def test_segments_are_not_expanded_where_the_driver_s_virtual_memory_may_be_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in settings.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    assert not hand_over.expand_segments(Settings(), torch_started=False, root=tmp_path).expandable_segments
    assert not any(name in os.environ for name in settings.ALLOCATOR)
