"""States on disk: whole or not there, two of a run, and never another run's."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from wanshim.core.resume import state
from wanshim.core.resume.identity import contents_of, differences, digest_of, fingerprint, table
from wanshim.core.resume.state import (
    RunState,
    check_writable,
    forget_partial,
    latest_run,
    new_run,
    newest_facts,
    newest_state,
    read_state,
    write_state,
)
from wanshim.core.resume.tree import (
    attributes,
    check_restored,
    content,
    flatten,
    rebuild,
    restore_attributes,
    restore_optimizer,
)
from wanshim.core.resume.writer import StateWriter
from wanshim.errors import HostMemoryInvalid, ResumeInvalid


def state_of(step: int, elements: int = 64) -> RunState:
    return RunState({"step": step}, {"weight": torch.full((elements,), float(step)), "bits": torch.ones(3).bfloat16()})


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_state_comes_back_equal_and_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        write_state(tmp_path, step, state_of(step))
    assert names(tmp_path) == ["step-00000010.safetensors", "step-00000015.safetensors"]
    found = newest_state(tmp_path)
    assert found is not None
    assert found[1].facts == {"step": 15}
    assert torch.equal(found[1].tensors["weight"], torch.full((64,), 15.0))
    assert found[1].tensors["bits"].dtype == torch.bfloat16


@pytest.mark.parametrize("place", ["header", "facts", "tensor", "end"])
def test_damaged_state_is_passed_over_by_name_and_goes_when_its_step_comes_again(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_state(tmp_path, 1, state_of(1))
    path = write_state(tmp_path, 2, state_of(2))
    data = bytearray(path.read_bytes())
    at = {"header": 20, "facts": data.index(b"step"), "tensor": len(data) - 9, "end": len(data) - 1}[place]
    data[at] ^= 1
    path.write_bytes(data[:-1] if place == "end" else data)
    found = newest_state(tmp_path)
    assert found is not None
    assert found[1].facts == {"step": 1}
    assert str(path) in caplog.text
    write_state(tmp_path, 3, state_of(3))
    assert read_state(tmp_path / "step-00000003.safetensors").facts == {"step": 3}


def test_write_removes_what_a_passed_over_state_left_behind_it(tmp_path: Path) -> None:
    for step in (1, 9):
        write_state(tmp_path, step, state_of(step))
    write_state(tmp_path, 2, state_of(2))
    assert names(tmp_path) == ["step-00000001.safetensors", "step-00000002.safetensors"]


def test_new_run_is_numbered_past_all_others_and_leaves_them(tmp_path: Path) -> None:
    assert latest_run(tmp_path / "absent") is None
    for number in (1, 2, 10):
        write_state(tmp_path / f"run-{number}", 1, state_of(number))
    assert latest_run(tmp_path) == tmp_path / "run-10"
    (tmp_path / "run-30").mkdir()  # begun, and no state was saved
    (tmp_path / "not-run-40").mkdir()
    anew = new_run(tmp_path)
    assert anew == tmp_path / "run-11"
    assert new_run(tmp_path / "absent") == tmp_path / "absent" / "run-1"
    for step in (1, 2, 3):
        write_state(anew, step, state_of(step))
    assert names(tmp_path / "run-2") == ["step-00000001.safetensors"]


def test_link_in_place_of_a_state_or_a_run_is_not_followed(tmp_path: Path) -> None:
    path = write_state(tmp_path / "elsewhere", 1, state_of(1))
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / path.name).symlink_to(path)
    assert newest_state(tmp_path / "run-1") is None
    (tmp_path / "run-2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResumeInvalid, match="is a symbolic link"):
        write_state(tmp_path / "run-2", 2, state_of(2))


def test_place_that_no_state_can_be_written_to_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writable(tmp_path / "made" / "run-1")
    assert names(tmp_path / "made" / "run-1") == []
    file = tmp_path / "file"
    file.touch()
    for place in (latest_run, check_writable):
        with pytest.raises(ResumeInvalid, match=f"{file}.* directory. Expected a folder"):
            place(file)

    def refuse(**place: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(state, "TemporaryFile", refuse)  # root may write to any folder that can be made here
    with pytest.raises(ResumeInvalid, match="run-1: Read-only file system"):
        check_writable(tmp_path / "run-1")


@pytest.mark.slow
def test_killed_at_any_moment_leaves_whole_states_only(tmp_path: Path) -> None:
    """SIGKILL of a real writer, in the write, the flush and the rename; the next attempt goes on from what is there."""
    moments, before = random.Random(0), 0
    for _ in range(40):
        child = os.fork()
        if not child:
            try:
                for step in range(before + 1, before + 10_000):
                    write_state(tmp_path, step, state_of(step, 100_000))
            finally:
                os._exit(1)
        time.sleep(moments.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        steps = [path for path in tmp_path.iterdir() if path.name.startswith("step-")]
        for path in steps:
            found = read_state(path)
            assert torch.equal(found.tensors["weight"], torch.full((100_000,), float(found.facts["step"])))
            before = max(before, found.facts["step"])
        forget_partial(tmp_path)
        assert all(path.name.startswith("step-") for path in tmp_path.iterdir())
    assert before > 0
    write_state(tmp_path, before + 1, state_of(before + 1))
    assert len(names(tmp_path)) == 2  # what earlier writers did not come to remove is removed by the next


def test_full_disk_keeps_the_last_state_and_names_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import safetensors.torch

    writer = StateWriter(tmp_path)
    writer.write(1, {"step": 1}, {"weight": torch.ones(1000)})
    writer.finish()

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        writer.write(2, {"step": 2}, {"weight": torch.ones(1000)})
        writer.finish()
    assert names(tmp_path) == ["step-00000001.safetensors"]
    assert f"takes {4000 + len(json.dumps({'step': 2}))} bytes" in caplog.text
    assert "No space left" in caplog.text
    writer.write(3, {"step": 3}, {"weight": torch.ones(1000)})
    writer.finish()
    assert names(tmp_path) == ["step-00000001.safetensors", "step-00000003.safetensors"]


def test_state_whose_older_ones_cannot_all_be_removed_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-00000009.safetensors").mkdir()  # somebody else's, and no state
    unlink = Path.unlink

    def kept(path: Path, missing_ok: bool = False) -> None:
        if path.name == "step-00000002.safetensors":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", kept)
    writer = StateWriter(tmp_path)
    for step in (1, 2, 3, 4, 5):
        writer.write(step, {"step": step}, {"weight": torch.ones(10)})
    writer.finish()
    assert writer.written == 5
    assert "not saved" not in caplog.text
    assert "an older state stays: [Errno 1] Operation not permitted" in caplog.text
    assert names(tmp_path) == [f"step-{step:08d}.safetensors" for step in (2, 4, 5, 9)]


def test_writer_copies_before_it_returns(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    writer = StateWriter(tmp_path)
    assert (writer.written, writer.busy) == (0, False)
    writer.write(1, {}, {"weight": weight})
    weight.zero_()
    writer.finish()
    assert (writer.written, writer.busy) == (1, False)
    assert torch.equal(read_state(tmp_path / "step-00000001.safetensors").tensors["weight"], torch.ones(1000))


def test_state_that_host_memory_has_no_room_for_is_refused_before_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a full training of 14B; Linux would give the memory, and end the process when it is written to."""
    monkeypatch.setattr("wanshim.core.shared.host_memory.available_bytes", lambda: 64)
    with pytest.raises(HostMemoryInvalid, match=r"of host memory for a saved state of the run\. "):
        StateWriter(tmp_path).reserve({"weight": torch.zeros(32)})


def test_states_use_the_host_memory_that_was_reserved_and_other_tensors_get_new(tmp_path: Path) -> None:
    tensors = {"weight": torch.rand(7, 3).t(), "half": torch.rand(5).bfloat16(), "step": torch.tensor(1.0)}
    writer = StateWriter(tmp_path)
    assert writer.reserve(tensors) == 128 + 64 + 64  # each tensor begins with a cache line
    reserved = writer._memory.data_ptr()
    for step in (1, 2):
        tensors["step"].fill_(step)
        writer.write(step, {}, tensors)
    writer.finish()
    assert writer._memory.data_ptr() == reserved
    for step in (1, 2):
        found = read_state(tmp_path / f"step-{step:08d}.safetensors").tensors
        assert found.keys() == tensors.keys()
        assert found["step"] == step
        assert all(torch.equal(found[name], tensors[name]) for name in ("weight", "half"))
    writer.write(3, {}, tensors | {"more": torch.ones(100)})
    writer.finish()
    assert torch.equal(read_state(tmp_path / "step-00000003.safetensors").tensors["more"], torch.ones(100))


def test_tree_keeps_types_keys_and_shapes() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {0: {"step": torch.tensor(3.0), "x": (1, 2.5)}, "a": [None, True, "t", {}], "nan": float("inf")}
    found = rebuild(flatten(value, "v", tensors), tensors)
    assert found.pop(0)["x"] == (1, 2.5)
    assert found == {"a": [None, True, "t", {}], "nan": float("inf")}
    with pytest.raises(ResumeInvalid, match=r"v\.hook is a function"):
        flatten({"hook": flatten}, "v", tensors)


def test_optimizer_state_keeps_its_dtype_beside_half_precision_weights() -> None:
    """`load_state_dict` alone would cast it to the weight's."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((4,), 1.0 + 2**-20)
    tensors: dict[str, torch.Tensor] = {}
    described = flatten(optimizer.state_dict(), "optimizer", tensors)
    again = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    restore_optimizer(again, described, tensors)
    assert again.state[weight]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(again.state[weight]["momentum_buffer"], torch.full((4,), 1.0 + 2**-20))


class Kept(torch.optim.SGD):
    """Keeps tensors below the first level, one of them in two places, and a count of its own."""

    def __init__(self, weights: list[torch.nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(weights, lr)
        self.lr, self.count, self.mean, self.weights = lr, 0, torch.zeros(3), weights

    def fill(self) -> None:
        self.count, self.mean = 7, torch.full((3,), 1 / 3)
        table = torch.linspace(-1, 1, 16)
        for weight in self.weights:
            nested = {
                "average": torch.full((4,), 1 + 2**-20),
                "deeper": [{"quant": torch.arange(4, dtype=torch.uint8)}],
            }
            self.state[weight].update(step=3, decay=0.1, nested=nested, pair=(table, table), nan=float("nan"))


def test_optimizer_state_comes_back_at_any_depth() -> None:
    weights = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer, again = Kept(weights), Kept(weights, lr=0.2)
    made_with = {name: content(value) for name, value in attributes(optimizer).items()}
    assert made_with.keys() == {"lr", "count", "mean"}  # the weights are the model's
    optimizer.fill()
    tensors: dict[str, torch.Tensor] = {}
    described = flatten(optimizer.state_dict(), "optimizer", tensors)
    changed = {name: value for name, value in attributes(optimizer).items() if content(value) != made_with[name]}
    own = flatten(changed, "attributes", tensors)
    restore_optimizer(again, json.loads(json.dumps(described)), tensors)
    restore_attributes(again, json.loads(json.dumps(own)), tensors)
    for weight in weights:
        assert content(again.state[weight]) == content(optimizer.state[weight])
        assert again.state[weight]["nested"]["average"].dtype == torch.float32
        assert again.state[weight]["pair"][0] is again.state[weight]["pair"][1]
    assert again.state[weights[0]]["pair"][0] is again.state[weights[1]]["pair"][0]
    assert (again.lr, again.count) == (0.2, 7)  # what training did not change is this run's
    assert torch.equal(again.mean, optimizer.mean)


class Forgets(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": super().state_dict()["param_groups"], "seen": random.random()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})


def test_optimizer_that_does_not_give_its_state_back_is_refused() -> None:
    optimizer = Forgets([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    tensors: dict[str, torch.Tensor] = {}
    described = flatten(optimizer.state_dict(), "optimizer", tensors)
    with pytest.raises(ResumeInvalid, match="After it was loaded, the optimizer has other entries"):
        restore_optimizer(optimizer, described, tensors)


class Packed(torch.Tensor):
    """As torchao's eight-bit optimizers keep their state."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"exp_avg": torch.ones(2).as_subclass(Packed)}, r"v\.exp_avg is a Packed"),
        ({"of": {(1, 2): 3}}, r"v\.of is a dict"),  # JSON has no such keys
        ({"of": defaultdict(list)}, r"v\.of is a defaultdict"),
        ({"of": {1, 2}}, r"v\.of is a set"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(ResumeInvalid, match=named):
        flatten(value, "v", {})


def test_differences_are_a_table_of_names() -> None:
    found = differences({"rate": 1, "same": 2, "gone": 3}, {"rate": 4, "same": 2})
    assert found == {"rate": (1, 4), "gone": (3, None)}
    assert "rate  1          4" in table(found)


def test_contents_of_a_file_are_the_checksums_of_an_archive_or_a_size(tmp_path: Path) -> None:
    file = tmp_path / "0.pth"
    assert contents_of(file) == []
    file.write_bytes(b"no archive")
    assert contents_of(file) == [10]
    torch.save({"w": torch.zeros(2)}, file)
    zeros, size = contents_of(file), file.stat().st_size
    torch.save({"w": torch.ones(2)}, file)
    assert file.stat().st_size == size
    assert [name for name, _ in contents_of(file)] == [name for name, _ in zeros]
    assert contents_of(file) != zeros


def test_fingerprint_sees_values_where_asked() -> None:
    one, other = torch.zeros(4), torch.ones(4)
    assert fingerprint([("w", one)], values=False) == fingerprint([("w", other)], values=False)
    assert fingerprint([("w", one)], values=True) != fingerprint([("w", other)], values=True)
    assert fingerprint([("w", one)], values=False) != fingerprint([("w", one.double())], values=False)


def test_long_values_of_a_table_are_cut() -> None:
    whole, cut = "x" * 48, "y" * 49
    said = table({"whole": (whole, None), "cut": (cut, None)})
    assert whole in said
    assert f"{'y' * 45}..." in said
    assert "y" * 46 not in said


def test_tensor_on_the_other_kind_of_device_is_a_difference_where_devices_count() -> None:
    tensors: dict[str, torch.Tensor] = {}
    described = flatten({"a": torch.ones(2)}, "optimizer", tensors)
    elsewhere = json.loads(json.dumps(described).replace('"cpu": true', '"cpu": false'))
    check_restored({"a": torch.ones(2)}, elsewhere, tensors, "optimizer")
    check_restored({"a": torch.ones(2)}, described, tensors, "optimizer", devices=True)
    with pytest.raises(ResumeInvalid, match="the optimizer has other entries"):
        check_restored({"a": torch.ones(2)}, elsewhere, tensors, "optimizer", devices=True)


def test_saved_tensor_comes_to_the_optimizer_s_device_or_to_the_host_if_it_was_there() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, device="meta"))], lr=0.1)
    tensors: dict[str, torch.Tensor] = {}
    described = flatten({"host": torch.ones(2), "device": torch.ones(2, device="meta")}, "attributes", tensors)
    restore_attributes(optimizer, described, {name: torch.ones(2) for name in tensors})
    assert (vars(optimizer)["host"].device.type, vars(optimizer)["device"].device.type) == ("cpu", "meta")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_disk_that_is_full_when_a_run_begins_refuses_nothing(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**place: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(state, "TemporaryFile", refuse)
    if number != errno.EIO:
        check_writable(tmp_path)
        return
    with pytest.raises(ResumeInvalid, match="Input/output error"):
        check_writable(tmp_path)


def test_what_a_killed_process_was_writing_goes_and_nothing_else(tmp_path: Path) -> None:
    forget_partial(tmp_path / "absent")
    kept = [".step-3", ".other.partial", "step-4.partial"]
    for name in (*kept, ".step-00000002.abc.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    forget_partial(tmp_path)
    assert names(tmp_path) == sorted(kept)


def test_facts_are_those_of_the_newest_state_of_the_newest_run(tmp_path: Path) -> None:
    assert newest_facts(tmp_path) is None
    for run, step in ((1, 9), (2, 3), (2, 4)):
        facts = {"position": {"step": step}, "identity": {"run": run}, "more": 1}
        path = write_state(tmp_path / f"run-{run}", step, RunState(facts, {"w": torch.ones(1)}))
    assert newest_facts(tmp_path) == (path, {"position": {"step": 4}, "identity": {"run": 2}, "more": 1})
    for damaged in (b"", b"\x02" + bytes(7) + b"[]", path.read_bytes()[:30]):
        path.write_bytes(damaged)
        assert newest_facts(tmp_path) == (path, None)
    write_state(tmp_path / "run-2", 5, RunState({"position": 5, "identity": {}}, {"w": torch.ones(1)}))
    assert newest_facts(tmp_path) == (tmp_path / "run-2" / "step-00000005.safetensors", None)


def test_file_that_is_no_state_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "step-00000001.safetensors"
    for metadata in (None, {"wanshim.state": "{}"}):
        save_file({"w": torch.ones(1)}, path, metadata)
        with pytest.raises(ResumeInvalid, match=rf"^{path} is damaged or no state: KeyError"):
            read_state(path)
    save_file({"w": torch.ones(1)}, path, {"wanshim.state": "{}", "wanshim.checksum": "0"})
    with pytest.raises(ResumeInvalid, match=rf"^{path} is damaged: its checksum is another"):
        read_state(path)


def test_bytes_of_a_state_are_those_of_its_tensors_and_facts() -> None:
    assert RunState({"a": 1}, {"x": torch.ones(3), "y": torch.ones(2, 2).bfloat16()}).bytes == 8 + 12 + 8


def test_digest_is_that_of_the_value_whatever_the_order_of_its_keys() -> None:
    assert digest_of({"a": 1, "b": [2, None]}) == digest_of({"b": [2, None], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
    assert digest_of({"a": object()}) == digest_of({"a": object()}) == digest_of({"a": "object"})
    assert digest_of({"a": object()}) != digest_of({"a": threading.Event()})
    assert len(digest_of(1)) == len(fingerprint([], values=True)) == 16


def test_fingerprint_sees_names_shapes_order_and_some_elements_of_each_tensor() -> None:
    def of(*tensors: tuple[str, torch.Tensor]) -> str:
        return fingerprint(tensors, values=True)

    long = torch.zeros(2, 5000)
    assert of(("w", long)) != of(("v", long))
    assert of(("w", long)) != of(("w", long.view(5000, 2)))
    assert of(("w", long), ("v", long)) != of(("v", long), ("w", long))
    first, last = long.clone(), long.clone()
    first[0, 0], last[-1, -1] = 1, 1
    assert of(("w", long)) == of(("w", last)) != of(("w", first)), "a large weight is not read whole"
    assert of(("w", long.t())) == of(("w", long.t().contiguous()))
    assert of(("w", torch.nn.Parameter(torch.ones(3).bfloat16()))) != of(("w", torch.zeros(3).bfloat16()))


def test_archive_that_is_damaged_counts_by_its_size(tmp_path: Path) -> None:
    file = tmp_path / "0.pth"
    torch.save({"w": torch.zeros(2)}, file)
    file.write_bytes(file.read_bytes()[:-10])
    assert contents_of(file) == [file.stat().st_size]
    assert contents_of(tmp_path) == [], "a folder is no file"


def test_next_state_waits_for_one_that_is_still_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, order = threading.Event(), []

    def slow(run: Path, step: int, _: RunState) -> None:
        assert go.wait(60)
        order.append(step)

    monkeypatch.setattr("wanshim.core.resume.writer.write_state", slow)
    writer = StateWriter(tmp_path)
    writer.finish()
    writer.write(1, {}, {"w": torch.ones(1)})
    assert (writer.busy, writer.written) == (True, 0)
    threading.Timer(0.05, go.set).start()
    writer.write(2, {}, {"w": torch.ones(1)})
    assert order[0] == 1
    writer.finish()
    assert (order, writer.busy, writer.written) == ([1, 2], False, 2)


def test_state_is_not_saved_where_the_folder_is_gone_and_the_free_bytes_are_said_to_be_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    writer = StateWriter(tmp_path / "file" / "run")
    writer.write(3, {}, {"w": torch.ones(1)})
    writer.finish()
    assert writer.written == 0
    assert "the state of step 3 is not saved" in caplog.text
    assert "has an unknown number (Not a directory) free" in caplog.text


def test_state_of_another_dtype_shape_or_value_is_named_by_its_place() -> None:
    tensors: dict[str, torch.Tensor] = {}
    described = flatten({"a": torch.ones(2), "b": torch.ones(1)}, "v", tensors)
    for value, said in (
        (torch.ones(2).double(), r"v\.a is torch.float64 \(2,\), not torch.float32 \(2,\)"),
        (torch.ones(2, 1), r"v\.a is torch.float32 \(2, 1\), not torch.float32 \(2,\)"),
        (torch.zeros(2), r"v\.a has other values"),
    ):
        with pytest.raises(ResumeInvalid, match=f"^After it was loaded, {said}"):
            check_restored({"a": value, "b": torch.ones(1)}, described, tensors, "v")
