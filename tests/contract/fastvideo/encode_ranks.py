"""Ranks of a FastVideo training job on the CPU, as far as the negative prompt.

Run as a script in the environment (and with the FastVideo) to be tested. It imports FastVideo once; then each
line of its input is a job in JSON, for which it forks the ranks, and each line of its output is that job's
result: for every rank what it reported, or where it stood when the time was up.

On a machine without CUDA, FastVideo takes "mps" for its device. The few lines in `_use_cpu` are all that
differs from a run on GPUs: the device of the rank, of the warm-up and of the offloading mesh, and the
attention class of a stage that is not run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wanshim.core.shared.files import written_whole
from wanshim.demo.meeting import served_store

sys.modules.setdefault("fastvideo_kernel", None)  # type: ignore[arg-type] # it needs a GPU driver to be imported

Job = dict[str, Any]


def main() -> None:
    """Serve jobs until the input ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # FastVideo prints; its words must not mix with the results
    import torch

    torch.set_num_threads(1)
    _import_fastvideo()
    print("ready", file=output, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), file=output, flush=True)


def run_job(job: Job) -> list[dict[str, Any]]:
    """Fork `job["world"]` ranks and wait for them `job["deadline"]` seconds.

    Returns:
        one entry a rank, by rank: its report, or {"hung": [function names on its stack, innermost first]}.
    """
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    with served_store() as variables:
        ranks = [_fork_rank(job, rank, variables, folder) for rank in range(job["world"])]
        deadline = time.monotonic() + job["deadline"]
        waiting = dict(enumerate(ranks))
        while waiting and time.monotonic() < deadline:
            waiting = {rank: pid for rank, pid in waiting.items() if os.waitpid(pid, os.WNOHANG) == (0, 0)}
            time.sleep(0.02)
        # faulthandler writes the stack, then the rank ends. All stand still first: one that ended would wake its peers.
        for number in (signal.SIGSTOP, signal.SIGABRT, signal.SIGCONT):
            for pid in waiting.values():
                os.kill(pid, number)
        for pid in waiting.values():
            os.waitpid(pid, 0)
    return [_result(folder, rank, rank in waiting) for rank in range(job["world"])]


def _result(folder: Path, rank: int, hung: bool) -> dict[str, Any]:
    if hung:
        lines = (folder / f"{rank}.stack").read_text().splitlines()
        main_thread = lines[max(i for i, line in enumerate(lines) if "most recent call first" in line) :]
        return {"rank": rank, "hung": [line.rsplit(" in ", 1)[1] for line in main_thread if " in " in line]}
    report = folder / f"{rank}.json"
    if report.is_file():
        found: dict[str, Any] = json.loads(report.read_text())
        return found
    return {"rank": rank, "error": "Died", "message": "the rank ended without a report"}


def _fork_rank(job: Job, rank: int, variables: dict[str, str], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a rank that hangs is aborted
    faulthandler.enable(file=(folder / f"{rank}.stack").open("w"), all_threads=True)
    names = {**variables, "WORLD_SIZE": job["world"], "RANK": rank, "LOCAL_RANK": rank, **job.get("environment", {})}
    os.environ.update({n: str(value) for n, value in names.items()})
    try:
        report = {"rank": rank, **TASKS[job["task"]](job, rank, folder)}
    except BaseException as error:
        import traceback

        traceback.print_exc()
        report = {"rank": rank, "error": type(error).__name__, "message": str(error)}
    with written_whole(folder / f"{rank}.json") as part:
        part.write_text(json.dumps(report))
    _wait_for_reports(folder, job["world"])
    sys.stderr.flush()
    os._exit(0)


def _wait_for_reports(folder: Path, world: int) -> None:
    """A rank's connections end with it, so each stays until nobody needs them any more."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.json"))) < world and time.monotonic() < deadline:
        time.sleep(0.02)


# -- what a rank does ------------------------------------------------------------------------------------


def train_start(
    job: Job, rank: int, folder: Path, trainer_of: Callable[[Any], Any] = lambda model: model
) -> dict[str, Any]:
    """Start training as far as the negative prompt; the embeddings go to `<rank>.safetensors`.

    Args:
        trainer_of: returns what is started, of the model that has the prompt.
    """
    report = _activate(job, rank)
    _join(job)
    model = _wan_model(job)
    started = time.monotonic()
    trainer_of(model).on_train_start()
    seconds = time.monotonic() - started
    _save(folder / f"{rank}.safetensors", model)
    encoded = model.negative_prompt_embeds is not None
    return {"seconds": seconds, "encoded": encoded, "features": _features(report)}


TASKS: dict[str, Callable[[Job, int, Path], dict[str, Any]]] = {"train_start": train_start}


def _activate(job: Job, rank: int) -> Any:
    """Switch on what the job says, for all ranks or, in a list, for each."""
    features = job.get("features")
    if not features:
        return None
    import wanshim

    return wanshim.activate(features if isinstance(features, str) else features[rank])


def _features(report: Any) -> list[dict[str, Any]]:
    """The rows of the report that were selected."""
    if report is None:
        return []
    return [
        {
            "feature": row.feature,
            "state": row.state,
            "verdict": row.verdict,
            "notes": list(row.notes),
            "seams": {seam.target.rpartition(".")[2]: seam.outcome for seam in row.seams if seam.calls},
        }
        for row in report.selected
    ]


def _join(job: Job) -> None:
    from fastvideo.distributed.parallel_state import maybe_init_distributed_environment_and_model_parallel

    maybe_init_distributed_environment_and_model_parallel(job.get("tp", 1), job.get("sp", 1))


def _wan_model(job: Job) -> Any:
    """FastVideo's `WanModel` with a DiT of one weight: the negative prompt does not depend on the DiT."""
    import torch
    from fastvideo.configs.models.dits import WanVideoConfig
    from fastvideo.configs.pipelines.wan import WanT2V480PConfig
    from fastvideo.distributed import get_sp_group, get_world_group
    from fastvideo.train.models.wan.wan import WanModel
    from fastvideo.train.utils.training_config import TrainingConfig

    class TinyWanModel(WanModel):  # type: ignore[misc, unused-ignore]
        def _load_transformer(self, **arguments: Any) -> Any:
            transformer: Any = torch.nn.Linear(1, 1)
            transformer.config, transformer.num_attention_heads, transformer.hidden_size = WanVideoConfig(), 4, 64
            return transformer

    config = TrainingConfig(pipeline_config=WanT2V480PConfig(), model_path=job["model"])
    sizes = config.distributed
    sizes.num_gpus, sizes.hsdp_shard_dim = job["world"], 1
    sizes.tp_size, sizes.sp_size = job.get("tp", 1), job.get("sp", 1)
    model = TinyWanModel(init_from=job["model"], training_config=config)
    model.world_group, model.sp_group = get_world_group(), get_sp_group()
    return model


def _save(path: Path, model: Any) -> None:
    from safetensors.torch import save_file

    if model.negative_prompt_embeds is not None:
        tensors = {"embeds": model.negative_prompt_embeds, "mask": model.negative_prompt_attention_mask}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


# -- FastVideo on a machine without CUDA ------------------------------------------------------------------


def _import_fastvideo() -> None:
    import fastvideo.distributed.parallel_state as parallel_state
    import fastvideo.pipelines.composed_pipeline_base
    import fastvideo.train.methods.fine_tuning.finetune
    import fastvideo.train.models.wan.wan  # noqa: F401
    import torch._dynamo

    if not torch.cuda.is_available():
        _use_cpu(parallel_state)


def _use_cpu(parallel_state: Any) -> None:
    import fastvideo.models.loader.component_loader as loader
    import fastvideo.pipelines.composed_pipeline_base as pipeline
    import fastvideo.platforms
    import torch

    cpu = torch.device("cpu")
    _rebind(parallel_state.get_local_torch_device, lambda: cpu)
    attention = "fastvideo.attention.backends.sdpa.SDPABackend"
    platform = type(fastvideo.platforms.current_platform)
    platform.get_attn_backend_cls = classmethod(lambda *_, **__: attention)
    platform.device_type, platform.get_torch_device = "cpu", classmethod(lambda _: torch.cpu)  # 0.1.7 has no CPU
    if warm_up := getattr(pipeline, "warmup_sequence_parallel_communication", None):  # from 0.2.0
        pipeline.warmup_sequence_parallel_communication = lambda: warm_up(cpu)
    make_mesh = loader.init_device_mesh
    loader.init_device_mesh = lambda device, *args, **kwargs: make_mesh("cpu", *args, **kwargs)


def _rebind(original: Any, replacement: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("fastvideo") and module is not None:
            for key in [key for key, value in vars(module).items() if value is original]:
                setattr(module, key, replacement)


@contextmanager
def serving(
    tree: Path | None, log: Path, module: str = "tests.contract.fastvideo.encode_ranks"
) -> Iterator[Callable[[Job], list[dict[str, Any]]]]:
    """Start this script and yield the function that runs a job in it.

    Args:
        tree: folder in front of the installed packages, with another FastVideo in it.
        log: file for what FastVideo prints.
        module: the script; another one may add to `TASKS` and call `main`.
    """
    import subprocess

    inherited = dict(os.environ)
    path = os.pathsep.join(filter(None, [str(tree) if tree else "", inherited.get("PYTHONPATH", "")]))
    quiet = {"FASTVIDEO_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", module],
            env={**inherited, **quiet, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as server,
    ):
        stdin, stdout = server.stdin, server.stdout
        assert stdin is not None
        assert stdout is not None
        if stdout.readline().strip() != "ready":
            raise RuntimeError(f"FastVideo could not be imported: {log.read_text()[-2000:]}")

        def ask(job: Job) -> list[dict[str, Any]]:
            print(json.dumps(job), file=stdin, flush=True)
            found: list[dict[str, Any]] = json.loads(stdout.readline())
            return found

        yield ask
        stdin.close()


if __name__ == "__main__":
    main()
