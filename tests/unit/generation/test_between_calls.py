"""A pipeline between two calls: what changes there, or ends, is noticed by the next one."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.generation import toy
from tests.unit.workers.forked import forked  # noqa: F401, a fixture
from wanshim.core.generation import PipelineBinding, Request, SharedPipeline, first_forward, shared_pipeline
from wanshim.core.generation.job import GenerationJob
from wanshim.core.shared.weight_bytes import num_bytes
from wanshim.core.workers import Workers, process
from wanshim.errors import WorkersFailed

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def wait_for_end(pid: int, seconds: float = 30.0) -> bool:
    """Whether the process has ended; its parent need not have asked for its status."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("way", [(1, 3), (2, 2)])
def test_worker_that_was_killed_between_two_calls_is_an_error_and_the_same_processes_work_again(
    way: tuple[int, int],
) -> None:
    model = toy.Model()
    expected = toy.generate(model, 11)
    shared = SharedPipeline(Request(gpus=way[0] * way[1], at_most=way), deadline=240.0)

    def call() -> torch.Tensor:
        return shared.run(partial(toy.bind, model), partial(toy.generate, model, tokens=11))

    try:
        for _ in range(2):
            for _ in range(2):
                assert (call() - expected).abs().max() <= 1e-5 * expected.abs().max()
                assert shared.plan is not None
                assert (shared.plan.guidance, shared.plan.sequence) == way
            worker = shared.pids[0]
            os.kill(worker, signal.SIGKILL)
            assert wait_for_end(worker)  # so that the next call finds it gone before it computes anything
            with pytest.raises(WorkersFailed):
                call()
        assert (call() - expected).abs().max() <= 1e-5 * expected.abs().max()
    finally:
        shared.close()


def no_memory(workers: Workers) -> None:
    """As where another program has taken a GPU's memory."""
    raise WorkersFailed("NCCL does not connect cuda:0 with its workers: CUDA error: out of memory")


def no_process(*args: object) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize(
    ("owner", "name", "fail", "reason"),
    [
        (Workers, "_wait_for_start", no_memory, "did not start: NCCL does not connect"),
        (process, "_start_process", no_process, "did not start: no process can be started for cpu: [Errno 11]"),
    ],
)
def test_workers_that_do_not_start_leave_the_call_to_one_process(
    owner: object, name: str, fail: Callable[..., None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy.Model()
    expected = toy.generate(model, 11)
    shared = SharedPipeline(Request(gpus=2), deadline=240.0)

    def call() -> torch.Tensor:
        return shared.run(partial(toy.bind, model), partial(toy.generate, model, tokens=11))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            assert torch.equal(call(), expected)
        assert shared.plan is not None
        assert shared.plan.gpus == 1
        assert reason in str(shared.plan.rejected)
        assert shared.pids == ()
        assert torch.equal(call(), expected)
        assert shared.plan.gpus == 2, "the next call tries again"
    finally:
        shared.close()


def test_copy_of_a_compiled_model_computes_first_behind_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the kernels that were the fastest there are on disk."""
    model = toy.Model()
    order: list[str] = []
    call, check = Workers.call, first_forward._check
    monkeypatch.setattr(
        first_forward, "_check", lambda *given: order.clear() or check(*given) or compared.extend(order)
    )
    monkeypatch.setattr(Workers, "call", lambda *args, **kwargs: order.append("there") or call(*args, **kwargs))
    compute = torch.nn.Module.__call__
    monkeypatch.setattr(toy.Model, "__call__", lambda *args, **kwargs: order.append("here") or compute(*args, **kwargs))
    for is_compiled, expected in ((True, ["here", "there"]), (False, ["there", "here"])):
        bound = toy.bind(model, compares=True)
        bound = replace(bound, forwards=(replace(bound.forwards[0], is_compiled=is_compiled),))
        shared = SharedPipeline(Request(gpus=2), deadline=240.0)
        compared: list[str] = []
        try:
            shared.run(lambda bound=bound: bound, partial(toy.generate, model, tokens=11))
        finally:
            shared.close()
        assert compared == expected


def test_estimate_of_what_a_worker_holds_has_the_vae(monkeypatch: pytest.MonkeyPatch) -> None:
    model, vae = toy.Model(), torch.nn.Linear(1000, 10)
    jobs = list[GenerationJob]()
    decide = shared_pipeline.decide

    def noted(job: GenerationJob, *rest: Any) -> Any:
        jobs.append(job)
        return decide(job, *rest)

    monkeypatch.setattr(shared_pipeline, "decide", noted)
    shared = SharedPipeline(Request(gpus=2), deadline=240.0)
    try:
        for one in (None, vae):

            def bind(vae: Any = one) -> PipelineBinding:
                return replace(toy.bind(model), vae=vae)

            shared.run(bind, partial(toy.generate, model, tokens=11))
    finally:
        shared.close()
    assert [job.weights for job in jobs] == [num_bytes(model), num_bytes(model) + num_bytes(vae)]


@pytest.mark.slow
def test_vae_whose_data_changes_between_two_calls_is_decoded_by_all_processes_as_it_is_now() -> None:
    """An assignment to `.data` changes neither address nor version of the weight."""
    diffusers = pytest.importorskip("diffusers")
    from tests.distributed.decoding.tiny import make_latent, tiny, vae_config

    model, vae, latent = toy.Model(), tiny(diffusers.AutoencoderKLWan, vae_config("2.1")), make_latent(3)
    shared = SharedPipeline(Request(gpus=2), deadline=240.0)

    def generate() -> torch.Tensor:
        toy.generate(model, 11)
        with torch.no_grad():
            return vae.decode(latent, return_dict=False)[0]

    try:
        for calls in (1, 2, 3):
            expected = generate()
            frames = shared.run(lambda: replace(toy.bind(model), vae=vae, decodes=False), generate)
            assert torch.equal(frames, expected)
            assert shared.shared_vae_calls == calls
            vae.decoder.conv_out.weight.data.mul_(0.5)
    finally:
        shared.close()


@pytest.mark.timeout(120)  # a child that takes the workers apart waits for threads that it does not have
def test_process_that_forks_after_a_pipeline_is_gone_takes_no_workers_along() -> None:
    """A reader of videos and a DataLoader fork."""
    model = toy.Model()
    request = Request(gpus=4, at_most=(2, 2))
    SharedPipeline(request, deadline=240.0).run(partial(toy.bind, model), partial(toy.generate, model, tokens=11))
    gc.collect()
    anew = SharedPipeline(request, deadline=240.0)
    try:
        done = subprocess.run([sys.executable, "-c", ""], preexec_fn=os.setpgrp, check=False)
        assert done.returncode == 0
        child = os.fork()
        if child == 0:
            os._exit(7 if SharedPipeline(request, deadline=240.0)._all is not anew._all else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        anew.close()
