"""Workers on the CPU: copies, what is sent again, the context of a call, and every way in which one can fail."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.unit.workers import functions
from tests.unit.workers.forked import forked  # noqa: F401, a fixture
from wanshim.core.shared import gpus
from wanshim.core.streaming import HostCopy
from wanshim.core.streaming.host_copy import bytes_when_streamed
from wanshim.core.workers import Workers, numerics, process
from wanshim.core.workers import pool as pool_module
from wanshim.core.workers.mover import file_of_a_store
from wanshim.core.workers.packing import elements, pack, unpack
from wanshim.core.workers.process import Worker
from wanshim.errors import WanshimError, WorkersFailed, WorkersInvalid

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    workers = Workers(CPU, [CPU], deadline=120)
    yield workers
    workers.close()


@pytest.fixture
def model() -> functions.Scale:
    torch.manual_seed(0)
    return functions.Scale()


def result(pool: Workers, function, *args, **kwargs):
    return pool.call(0, function, *args, **kwargs).result()


def equal(pool: Workers, model: functions.Scale) -> bool:
    x = torch.randn(4, 5)
    with torch.no_grad():
        here = model(x, then=3.0)
    there = result(pool, model, x, then=3.0)
    return all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.slow
def test_a_copy_computes_the_same_bits(pool, model):
    assert pool.hold(model) > 0
    assert equal(pool, model)


@pytest.mark.slow
def test_workers_that_begin_ahead_import_meanwhile_and_are_those_that_hold(model):
    workers = Workers(CPU, [CPU, CPU], deadline=120)
    workers.begin(("colorsys", "there.is.no.such.module"))
    pids = workers.pids
    workers.begin()
    assert len(pids) == 2
    assert workers.hold_nothing
    workers.hold(model)
    assert workers.pids == pids
    once = {id(t): t for t in (*model.parameters(), *model.buffers(), *model.plain)}.values()
    assert workers.num_bytes(1) == sum(elements(t).numel() * t.element_size() for t in once)
    assert workers.num_bytes(2) == 0, "there is no third"
    assert result(workers, functions.is_imported, "colorsys")
    assert not result(workers, functions.is_imported, "chunk")
    assert equal(workers, model)
    workers.close()
    assert workers.hold_nothing
    workers.begin()
    workers.close()
    assert workers.pids == ()


@pytest.mark.usefixtures("forked")
def test_workers_that_have_not_started_can_be_fewer_and_on_other_devices(model):
    workers = Workers(CPU, [CPU, CPU], deadline=120)
    workers.begin()
    first, second = workers.pids
    workers.use([torch.device("cpu:0")])
    assert workers.pids == (first,)
    assert not alive(second)
    workers.start()
    with pytest.raises(AssertionError):
        workers.use([CPU])
    workers.hold(model)
    with pytest.raises(WorkersFailed, match=f"the worker on cpu:0 .process {first}. failed"):
        result(workers, functions.fail, "no such thing")


@pytest.mark.usefixtures("forked")
def test_workers_stream_from_one_copy_on_the_host_which_they_map_once():
    model = functions.Blocks().eval().requires_grad_(False)
    workers = Workers(CPU, [CPU], deadline=120)
    assert workers.num_bytes(0) == 0, "they have not begun"
    host = HostCopy.of(model, shared=True)
    host.wait()
    workers.share(host, 1)
    before = result(workers, functions.num_descriptors)
    workers.share(host, 1)
    assert result(workers, functions.num_descriptors) == before
    assert workers.hold(model, host=host) == 0, "nothing is sent"
    assert workers.num_bytes(0) == workers.num_bytes(0, [model]) == bytes_when_streamed(model) != 0
    x = torch.randn(3, 6)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(result(workers, model, x), expected)
        assert workers.hold(model, host=host, renew=True) == 0
        assert torch.equal(result(workers, model, x), expected)
        host.memory.zero_()
        assert torch.equal(result(workers, model, x), torch.zeros(3, 6))
    workers.close()


def test_a_copy_keeps_ties_and_strides(pool, model):
    pool.hold(model)
    assert result(pool, functions.addresses, model) == functions.addresses(model)


def test_tensors_of_the_host_among_those_of_a_device_arrive_in_their_places(pool):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].table = torch.arange(7.0)  # no buffer: it stays on the host wherever the module goes
    pool.hold(model, moved=True)
    assert torch.equal(pool.call(0, getattr, model[0], "table").result(), model[0].table)
    x = torch.ones(2, 3)
    assert torch.equal(pool.call(0, model, x).result(), model(x))


def test_what_did_not_change_is_not_sent_again(pool, model):
    pool.hold(model)
    assert pool.hold(model) == 0


def test_another_model_of_the_same_elements_shares_them_in_the_worker(pool, model):
    """As two pipelines that a program loads from one checkpoint; one of them may change later."""
    pool.hold(model)
    bytes_before = pool.num_bytes(0)
    torch.manual_seed(0)
    twin = functions.Scale()
    assert pool.hold(twin) == 0
    assert pool.num_bytes(0) == bytes_before
    assert equal(pool, twin)
    twin.turned.data.add_(1)
    assert pool.hold(twin) == 84
    assert pool.num_bytes(0) == bytes_before + 84
    assert equal(pool, twin)
    assert equal(pool, model)


def test_a_copy_goes_with_its_module_and_the_process_stays(pool):
    model = functions.Scale()
    model.cycle = [model]  # freed by the collector alone, in whatever line that is
    pool.hold(model)
    pids, held = pool.pids, pool.num_bytes(0)
    kept = functions.Scale()
    pool.hold(kept)
    assert pool.num_bytes(0) > held
    tensors = result(pool, functions.num_tensors)
    del model
    gc.collect()
    assert pool.num_bytes(0) == pool.num_bytes(0, [kept])
    assert result(pool, functions.num_tensors) < tensors
    assert equal(pool, kept)
    assert pool.pids == pids


def test_copies_of_modules_that_are_freed_in_an_exchange_go_behind_it(pool, model, monkeypatch):
    """The collector runs in any line: between a message and the tensors that follow it, too."""
    other = [functions.Scale()]
    pool.hold(other[0])
    send = pool._running.mover.send

    def collecting(*args):
        other.clear()
        gc.collect()
        send(*args)

    monkeypatch.setattr(pool._running.mover, "send", collecting)
    pool.hold(model)
    assert not other
    assert pool.num_bytes(0) == pool.num_bytes(0, [model])
    assert equal(pool, model)


@pytest.mark.slow
def test_first_workers_alone_hold_what_the_others_need_not(model):
    workers = Workers(CPU, [CPU, CPU], deadline=120)
    workers.hold(model, count=1)
    assert workers.holds(0, [model])
    assert not workers.holds(1, [model])
    assert workers.hold(model) > 0
    assert workers.holds(1, [model])
    other = functions.Scale()
    workers.hold(other)
    workers.keep_only([other])
    assert not workers.holds(0, [model])
    assert equal(workers, other)
    workers.close()


def test_a_copy_that_a_worker_cannot_set_up_is_refused_and_the_workers_stay(pool, model):
    with pytest.raises(WorkersInvalid, match="cannot prepare its copy: ValueError: no such kernel"):
        pool.hold(model, set_up=functions.lack_a_kernel)
    pids = pool.pids
    assert not pool.holds(0, [model])
    pool.hold(model)
    assert equal(pool, model)
    assert pool.pids == pids


def test_an_error_that_is_spared_leaves_the_workers(pool, model):
    pool.hold(model)
    pids = pool.pids
    with pytest.raises(WorkersFailed, match="no such thing"):
        pool.call(0, functions.fail, "no such thing").result(spare=True)
    assert pool.pids == pids
    assert equal(pool, model)


@pytest.mark.parametrize(
    ("change", "sent"),
    [
        (lambda m: m.turned.data.add_(1), 84),  # changes neither identity nor version: how peft merges an adapter
        (lambda m: setattr(m.turned, "data", torch.randn(7, 3)), 84),
        (lambda m: setattr(m, "factor", 2.0), 0),
        (lambda m: setattr(m, "tied", nn.Sequential(m.linear, nn.Linear(7, 7, bias=False))), 196),
        (lambda m: setattr(m, "offset", m.offset.clone()), 0),
    ],
    ids=["data in place", "data", "number", "structure", "another tensor with the same elements"],
)
def test_a_change_reaches_the_copy_and_nothing_else_is_sent(pool, model, change, sent):
    pool.hold(model)
    change(model)
    assert pool.hold(model) == sent
    assert equal(pool, model)


def test_two_models_are_held_side_by_side(pool, model):
    other = functions.Scale()
    pool.hold(model)
    pool.hold(other)
    assert equal(pool, model)
    assert equal(pool, other)


def test_a_copy_that_its_calls_have_changed_can_be_renewed(pool, model):
    pool.hold(model)
    result(pool, functions.double, model)
    assert not equal(pool, model)
    assert pool.hold(model, renew=True) == 0
    assert equal(pool, model)


def test_a_call_has_the_callers_context(pool, model):
    pool.hold(model)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert result(pool, functions.context) == (False, False, True, torch.float32, 2)
        torch.set_num_threads(1)
        with torch.inference_mode():
            assert result(pool, functions.context) == (False, True, False, torch.float32, 1)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "x",
    [torch.ones(1).expand(6), torch.ones(3, 4).t(), torch.ones(2, 3, 8)[..., ::2], torch.ones(0, 3), torch.tensor(1.0)],
    ids=["broadcast", "transposed", "every second", "empty", "scalar"],
)
def test_an_argument_has_its_strides(pool, model, x):
    pool.hold(model)
    assert result(pool, functions.strides, x) == x.stride()


@pytest.mark.usefixtures("forked")
def test_an_error_has_its_traceback_and_the_device_and_the_next_hold_starts_anew(pool, model):
    pool.hold(model)
    before = pool.pids
    with pytest.raises(WorkersFailed, match=r"worker on cpu .* failed: ValueError: no such thing") as caught:
        result(pool, functions.fail, "no such thing")
    assert "functions.py" in str(caught.value)
    assert pool.pids == ()
    assert not any(map(alive, before))
    assert pool.hold(model) > 0
    assert equal(pool, model)


@pytest.mark.usefixtures("forked")
def test_out_of_memory_is_named(pool, model):
    pool.hold(model)
    with pytest.raises(WorkersFailed, match="failed: OutOfMemoryError: tried to allocate"):
        result(pool, functions.run_out_of_memory)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM], ids=lambda n: n.name)
def test_a_worker_that_a_signal_ends_is_named(pool, model, number):
    pool.hold(model)
    with pytest.raises(WorkersFailed, match=f"was ended by {number.name}") as caught:
        result(pool, functions.end_by, number)
    assert ("which the system sends when host memory runs out" in str(caught.value)) is (number is signal.SIGKILL)
    assert pool.pids == ()


def test_a_worker_that_is_about_to_end_is_waited_for():
    file = file_of_a_store()
    worker = Worker(file)
    try:
        assert worker.how_it_ended(0.01) == ""
        worker.process.terminate()
        assert worker.how_it_ended() == "was ended by SIGTERM"
    finally:
        worker.end()
        os.close(file)


@pytest.mark.parametrize(("strange", "status"), [(False, 0), (True, 1)], ids=["closed", "a frame that it awaits not"])
@pytest.mark.usefixtures("forked")
def test_a_worker_ends_with_its_link_and_has_an_error_only_where_there_was_one(strange, status):
    file = file_of_a_store()
    worker = Worker(file)
    try:
        if strange:
            worker.link.send_bytes(memoryview(b"1"))
        else:
            worker.link.close()
        assert worker.how_it_ended(60.0) == f"ended with status {status}"
    finally:
        worker.end()
        os.close(file)


def test_a_worker_knows_that_it_is_one_and_leaves_an_interrupt_to_the_program(pool, model):
    pool.hold(model)
    assert result(pool, process.is_worker)
    assert not process.is_worker()
    os.kill(pool.pids[0], signal.SIGINT)
    assert equal(pool, model)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "other"), [(1, 3), (3, 1)])
def test_a_worker_sees_its_gpu_by_the_number_of_the_program_s_own(own, other, monkeypatch):
    monkeypatch.setattr(gpus, "in_sight", lambda visible: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    file = file_of_a_store()
    worker = Worker(file, own, other)
    try:
        for device, there in (("cuda:3", "cuda:1"), ("cuda:1", "cuda:3"), ("cuda:2", "cuda:2"), ("cpu", "cpu")):
            worker.assign(torch.device(device), 60.0)
            assert worker.device_there == there
            assert str(worker) == f"the worker on {device} (process {worker.process.pid}{there_if(device, there)})"
        monkeypatch.setenv("WANSHIM_TEST_VARIABLE", "changed since it started")
        worker.load("", ())
        worker.link.send(("start", "cpu"))
        assert worker.link.receive(60.0)[0] == "ready"
        for name, value in (("CUDA_VISIBLE_DEVICES", "0,3,2,1"), ("WANSHIM_TEST_VARIABLE", "changed since it started")):
            packed, _ = pack((functions.variable, (name,), {}), CPU)
            worker.link.send(("call", numerics.read(CPU), packed))
            assert unpack(worker.link.receive(60.0)[1], []) == value
    finally:
        worker.end()
        os.close(file)


def there_if(device, there):
    return "" if device == there else f", {there} there"


@pytest.mark.usefixtures("forked")
def test_a_worker_without_memory_for_a_copy_leaves_the_call_to_the_program(model):
    workers = Workers(CPU, [CPU], deadline=60)
    workers.hold(model)
    workers.call(0, functions.limit_memory, 2**26).result()
    with pytest.raises(WorkersInvalid, match=r"the worker on cpu .* cannot take its copy: .*allocate"):
        workers.hold(nn.Linear(2**14, 2**13))
    assert workers.pids == ()
    workers.hold(model)
    assert equal(workers, model)
    workers.close()


@pytest.mark.slow
def test_a_worker_that_died_between_calls_is_named_at_the_next(pool, model):
    pool.hold(model)
    os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(WorkersFailed, match="was ended by SIGKILL"):
        result(pool, functions.sleep, 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_stopped_worker_counts_as_hung_and_is_ended(monkeypatch, model):
    monkeypatch.setattr(pool_module, "_SILENCE_SECONDS", 5.0)
    workers = Workers(CPU, [CPU], deadline=120)
    workers.hold(model)
    (pid,) = workers.pids
    with pytest.raises(WorkersFailed, match="gave no sign of life for 5 s"):
        workers.call(0, functions.block_beats, 1.0).result()
    assert not alive(pid)


@pytest.mark.usefixtures("forked")
def test_a_reply_after_the_deadline_is_an_error(model):
    workers = Workers(CPU, [CPU], deadline=60)
    workers.hold(model)
    workers.deadline = 1.0
    with pytest.raises(WorkersFailed, match="did not reply within 1 s"):
        workers.call(0, functions.sleep, 600.0).result()
    assert workers.pids == ()


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_a_slow_call_is_no_hung_one(monkeypatch, model):
    monkeypatch.setattr(pool_module, "_SILENCE_SECONDS", 3.0)
    workers = Workers(CPU, [CPU], deadline=120)
    workers.hold(model)
    assert workers.call(0, functions.sleep, 5.0).result() == "awake"
    workers.close()


class OfTheProgram(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.slow
def test_a_quantized_weight_is_copied_as_it_is_stored(pool, model):
    codes = torch.randint(-9, 9, (7, 5), dtype=torch.int8)
    model.linear.weight = nn.Parameter(functions.Coded(codes, torch.rand(7, 1)), requires_grad=False)
    model.linear.extra_repr = MethodType(partial(functions.described, name="coded"), model.linear)  # as torchao does
    assert pool.hold(model) > 0
    assert equal(pool, model)
    assert pool.hold(model) == 0
    assert result(pool, functions.class_of_weight, model) == ("Coded", True)
    codes[0] += 1
    assert pool.hold(model) == 35, "the codes alone"
    assert equal(pool, model)


def test_a_weight_whose_class_adds_attributes_is_copied_with_them(pool, model):
    model.linear.weight = functions.Kind(model.linear.weight.detach())
    model.linear.weight.kind = "q8"
    pool.hold(model)
    assert equal(pool, model)
    assert pool.hold(model) == 0
    assert result(pool, functions.kind_of_weight, model) == ("Kind", "q8", True)
    model.linear.weight.kind = "q4"
    assert pool.hold(model) == 0, "no element is another"
    assert result(pool, functions.kind_of_weight, model) == ("Kind", "q4", True)


def test_parts_of_weights_that_are_moved_are_for_the_device_of_the_worker(model):
    codes = functions.Coded(torch.ones(7, 5, dtype=torch.int8), torch.rand(7, 1))
    model.linear.weight = nn.Parameter(codes, requires_grad=False)
    model.linear.bias = functions.Kind(model.linear.bias.detach())
    packed, tensors = pack(model, CPU, moved=True)
    on_host = [spec.on_host for spec, tensor in zip(packed.specs, tensors, strict=True) if spec.is_weight]
    assert on_host == [False] * 5, "codes, scales, bias, turned, offset"


def test_a_copy_that_is_made_again_has_nothing_that_its_forward_has_written(pool):
    written, other, x = functions.Written(), functions.Written(), torch.ones(2)
    for module in (written, written, other):
        pool.hold(module, renew=True)
        assert torch.equal(result(pool, module, x), module(x))


@pytest.mark.slow
def test_what_a_decode_has_left_in_a_vae_is_no_change_and_stays_there(pool):
    vae = functions.Cached()
    pool.hold(vae)
    held = pool._running.copies[0]._modules[pool.key(vae)]
    vae.cache = [torch.ones(3)]
    assert pool.hold(vae) == 0
    assert pool._running.copies[0]._modules[pool.key(vae)] is held
    assert torch.equal(vae.cache[0], torch.ones(3))
    vae.scale = 2.0
    pool.hold(vae)
    assert pool._running.copies[0]._modules[pool.key(vae)] is not held


def test_a_method_that_an_object_alone_has_is_copied_as_it_is(pool, model, monkeypatch):
    """Not as the one of its class that has the same name."""
    model.printed = MethodType(functions.Other.extra_repr, model.linear)
    pool.hold(model)
    assert result(pool, functions.call_attribute, model, "printed") == "of another class"
    model.printed = MethodType(OfTheProgram.forward, model.linear)
    monkeypatch.setattr(OfTheProgram.forward, "__module__", "__main__")
    with pytest.raises(WorkersInvalid, match="forward is defined in the program itself"):
        pool.hold(model)


def test_a_function_made_in_another_one_is_copied_with_the_module_that_it_reads(pool, model):
    model.part = functions.Read(model)
    pool.hold(model)
    assert pool.hold(model) == 0
    assert result(pool, functions.read, model, "factor") == (1.5, 7.0)
    model.factor = 2.5
    pool.hold(model)
    assert result(pool, functions.read, model, "factor") == (2.5, 7.0)


def test_what_no_other_process_can_import_is_refused_and_the_workers_stay(pool, model, monkeypatch):
    pool.hold(model)
    before = pool.pids
    monkeypatch.setattr(OfTheProgram, "__module__", "__main__")
    with pytest.raises(WorkersInvalid, match="OfTheProgram is defined in the program itself"):
        pool.hold(OfTheProgram())
    with pytest.raises(WorkersInvalid, match="cannot be copied"):
        result(pool, model, lambda: before.append(0))  # whose list is this process's
    assert pool.pids == before


def test_a_tensor_of_a_strange_class_or_device_is_refused(pool, model):
    model.extra = torch.ones(2).to_sparse()
    with pytest.raises(WorkersInvalid, match=r"a tensor of class torch\.Tensor"):
        pool.hold(model)
    model.extra = TwoTensor(torch.ones(2), torch.ones(2))  # of torch's own: another one is DTensor
    with pytest.raises(WorkersInvalid, match=r"a tensor of class torch\.testing"):
        pool.hold(model)
    model.extra = torch.ones(2, device="meta")
    with pytest.raises(WorkersInvalid, match="a tensor on meta"):
        pool.hold(model)


def test_a_forked_process_is_refused(pool, model):
    pool.hold(model)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            pool.hold(model)
        except WanshimError:
            os.write(write, b"refused")
        finally:
            pool.close()
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 20) == b"refused"
    assert equal(pool, model), "what the child closed is its own"


@pytest.mark.usefixtures("forked")
def test_workers_that_nobody_refers_to_end(model):
    workers = Workers(CPU, [CPU], deadline=120)
    workers.hold(model)
    pids = workers.pids
    del workers
    assert not any(map(alive, pids))


OUTPUT_IS_CLOSED = """
import os
os.close(2)
from torch import device
from wanshim.core.streaming import HostCopy
from wanshim.core.streaming.host_copy import bytes_when_streamed
from wanshim.core.workers import Workers
workers = Workers(device("cpu"), [device("cpu")])
workers.begin()
at = [os.readlink(f"/proc/{pid}/fd/2") for pid in (os.getpid(), *workers.pids)]
print(workers.file > 2, at)
workers.close()
"""


@pytest.mark.slow
def test_workers_of_a_program_that_closed_its_output_print_into_no_file_of_theirs():
    """The store would be the next file, number 2, and what a worker prints would be in it."""
    done = subprocess.run([sys.executable, "-c", OUTPUT_IS_CLOSED], capture_output=True, text=True, check=True)
    assert done.stdout == "True ['/dev/null', '/dev/null']\n"


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and that nobody waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_link_of_workers_that_another_thread_has_ended_is_said():
    class Lost:
        link = object()

    error = Workers(CPU, [CPU])._cause(Lost())
    assert str(error).startswith("the workers were ended within a call")
