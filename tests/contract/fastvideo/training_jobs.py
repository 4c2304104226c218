"""FastVideo's own trainer loops on gloo, over a model of one layer: Wan's weights and its attention need a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.contract.fastvideo import encode_ranks
from tests.contract.fastvideo.encode_ranks import Job

STEP_S = 0.05  # a micro-batch takes this long, so that steps have a pace of their own


class Micro:
    """Micro-batches that take a moment; says how many were given and fails at one."""

    def __init__(self, fail_at: int) -> None:
        self.given, self.fail_at = 0, fail_at

    def __iter__(self) -> Any:
        import torch

        for _ in range(5):  # the trainer begins again at the end
            time.sleep(STEP_S)
            self.given += 1
            if self.given == self.fail_at:
                raise MemoryError("no room")
            yield {"x": torch.ones(1, 2)}

    def __len__(self) -> int:
        return 5


def train(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """`fastvideo.train.trainer.Trainer.run` with FastVideo's own checkpoints and callbacks."""
    return _report(job, rank, _trainer)


def pipeline(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    """`fastvideo.training`'s `TrainingPipeline.train`."""
    return _report(job, rank, _pipeline)


TASKS = {"train": train, "pipeline": pipeline}


def _report(job: Job, rank: int, run: Callable[[Job, Micro], list[float]]) -> dict[str, Any]:
    import wanshim

    micro, losses, began = Micro(job.get("fail_at", 0)), [], time.time()
    report = encode_ranks._activate(job, rank)
    encode_ranks._join(job)
    error = None
    try:
        losses = run(job, micro)
    except MemoryError as raised:
        error = str(raised)
    row = wanshim.report().row("fastvideo.progress") if report is not None else None
    return {
        "micro": micro.given,
        "losses": losses,
        "raised": error,
        "seconds": time.time() - began,
        "notes": list(row.notes) if row else [],
        "verdict": str(row.verdict) if row else None,
        "restored": _restored(),
        "asks_method": _asks_method(),
    }


def _restored() -> bool:
    """FastVideo's own bars are where they were."""
    from fastvideo.train import trainer
    from fastvideo.training import training_pipeline
    from tqdm.auto import tqdm

    return trainer.tqdm is tqdm and training_pipeline.tqdm is tqdm


def _asks_method() -> bool:
    from fastvideo.train.methods.base import TrainingMethod

    return hasattr(TrainingMethod, "on_validation_begin")


def _trainer(job: Job, micro: Micro) -> list[float]:
    import torch
    from fastvideo.train import trainer
    from fastvideo.train.callbacks.callback import Callback
    from fastvideo.train.methods.base import TrainingMethod
    from fastvideo.train.utils import checkpoint
    from fastvideo.train.utils.training_config import TrainingConfig

    losses: list[float] = []

    class Method(TrainingMethod):  # type: ignore[misc, unused-ignore]
        """FastVideo's base class with the least a method must bring."""

        _optimizer_dict = property(lambda self: {"critic": self.critic, "student": self.optimizer})
        _lr_scheduler_dict = property(lambda self: {"student": self.scheduler})
        cuda_generator = None

        def on_train_start(self) -> None: ...

        def get_optimizers(self, iteration: int) -> list[Any]:
            return [self.critic, self.optimizer]  # as distillation has them

        def get_lr_schedulers(self, iteration: int) -> list[Any]:
            return [self.scheduler]

        def single_train_step(self, batch: Any, iteration: int, **_: Any) -> Any:
            loss = self.student.transformer(batch["x"]).pow(2).mean()
            return {"total_loss": loss}, {}, {}

        def on_validation_begin(self, iteration: int = 0) -> dict[str, float]:
            """As DiffusionNFT has it: asked at each step, it validates at some."""
            if not self._validation_config.every_steps or iteration % self._validation_config.every_steps:
                return {}
            time.sleep(job.get("validate_seconds", 0.0))
            return {"reward": 1.0}

        def backward(self, loss_map: Any, outputs: Any, *, grad_accum_rounds: int = 1) -> None:
            (loss_map["total_loss"] / grad_accum_rounds).backward()

    class Validation(Callback):  # type: ignore[misc, unused-ignore]
        """FastVideo's own needs a pipeline with weights; this one keeps its interval in the same attribute."""

        def __init__(self, every_steps: int = 0, seconds: float = 0.0) -> None:
            self.every_steps, self.seconds = every_steps, seconds

        def on_validation_begin(self, method: Any, iteration: int = 0) -> None:
            if self.every_steps and iteration % self.every_steps == 0:
                time.sleep(self.seconds)

        def on_training_step_end(self, method: Any, metrics: dict[str, Any], iteration: int = 0) -> None:
            losses.append(metrics["total_loss"])

    class Manager(checkpoint.CheckpointManager):  # type: ignore[misc, unused-ignore]
        """FastVideo's own, without the state of a CUDA generator."""

        def _save_rng_snapshot(self, checkpoint_dir: Path) -> None:
            time.sleep(job.get("save_seconds", 0.0))

        def load_rng_snapshot(self, checkpoint_path: str) -> None: ...

    config = TrainingConfig()
    config.tracker.project_name = ""  # no account of a tracker
    config.loop.gradient_accumulation_steps = job.get("accumulation", 1)
    config.checkpoint.output_dir = job["output"]
    config.checkpoint.resume_from_checkpoint = job.get("resume", "")
    torch.manual_seed(0)
    layer = torch.nn.Linear(2, 1)
    student = SimpleNamespace(transformer=layer)
    method = Method(cfg=SimpleNamespace(training=config, method={}), role_models={"student": student})
    method.optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    method.critic = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.7)
    method._validation_config = SimpleNamespace(every_steps=job.get("method_validates_every", 0))
    method.scheduler = torch.optim.lr_scheduler.StepLR(method.optimizer, 1, gamma=0.5)
    options = {"every_steps": job.get("validate_every", 0), "seconds": job.get("validate_seconds", 0.0)}
    run = trainer.Trainer(config)
    run.callbacks._callbacks["validation"] = Validation(**options)
    keep = checkpoint.CheckpointConfig(save_steps=job.get("save_steps", 0), keep_last=0)
    manager = Manager(method=method, dataloader=micro, output_dir=job["output"], config=keep)
    run.run(method, dataloader=micro, max_steps=job["steps"], checkpoint_manager=manager)
    return losses


def _pipeline(job: Job, micro: Micro) -> list[float]:
    import torch
    from fastvideo.distributed import get_sp_group, get_world_group
    from fastvideo.training import training_pipeline

    losses: list[float] = []

    class Pipeline(training_pipeline.TrainingPipeline):  # type: ignore[misc, unused-ignore]
        """FastVideo's own `train`; its `__init__` loads a checkpoint and `train_one_step` runs Wan's kernels."""

        def __init__(self) -> None:
            world = get_world_group()
            self.world_size, self.global_rank, self.local_rank = world.world_size, world.rank, world.local_rank
            self.sp_group, self.sp_world_size = get_sp_group(), get_sp_group().world_size
            self.init_steps = job.get("init_steps", 0)
            self.seed, self.post_init_called, self.tracker = 1, True, training_pipeline.DummyTracker()
            self.transformer, self.transformer_2 = torch.nn.Linear(2, 1), None
            self.optimizer = torch.optim.SGD(self.transformer.parameters(), lr=0.1)
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
            self.train_dataloader = micro
            self.modules = {"transformer": self.transformer}
            self.profiler_controller = SimpleNamespace(region=_nothing, has_profiler=False)
            self.training_args = SimpleNamespace(
                seed=1, resume_from_checkpoint="", max_train_steps=job["steps"], output_dir=job["output"],
                sp_size=job.get("sp", 1), gradient_accumulation_steps=job.get("accumulation", 1),
                train_batch_size=1, training_state_checkpointing_steps=job.get("save_steps", 100), VSA_sparsity=0.0,
                VSA_decay_rate=0.0, VSA_decay_interval_steps=1, log_validation=bool(job.get("validate_every")),
                validation_steps=job.get("validate_every", 0), log_visualization=False,
            )  # fmt: skip

        def initialize_validation_pipeline(self, training_args: Any) -> None: ...

        def _log_training_info(self) -> None: ...

        def _log_validation(self, transformer: Any, training_args: Any, global_step: int) -> None:
            time.sleep(job.get("validate_seconds", 0.0))

        def train_one_step(self, training_batch: Any) -> Any:
            total = torch.zeros(())
            for _ in range(self.training_args.gradient_accumulation_steps):
                batch = next(self.train_loader_iter, None)
                if batch is None:
                    self.train_loader_iter = iter(self.train_dataloader)
                    batch = next(self.train_loader_iter)
                loss = self.transformer(batch["x"]).pow(2).mean() / self.training_args.gradient_accumulation_steps
                loss.backward()
                total += loss.detach()
            self.optimizer.step()
            self.lr_scheduler.step()
            self.optimizer.zero_grad()
            training_batch.total_loss, training_batch.grad_norm = total, 0.0
            losses.append(float(total))
            return training_batch

    # It writes a sharded DiT; its place in the loop is what counts here. The loop ends the process group, too.
    training_pipeline.save_checkpoint = lambda *_: time.sleep(job.get("save_seconds", 0.0))
    training_pipeline.cleanup_dist_env_and_memory = lambda: None
    memory = SimpleNamespace(memory_allocated=lambda: 0)  # FastVideo calls a machine without CUDA "CPU", torch does not
    training_pipeline.current_platform = SimpleNamespace(device_name="cpu", get_torch_device=lambda: memory)
    Pipeline().train()
    return losses


class _nothing:
    def __init__(self, name: str) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
