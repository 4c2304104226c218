"""The training loop as a user has it, from video files: text encoder, VAE and the 14B Wan DiT, LoRA, three epochs.

    python benchmarks/training_end_to_end.py --gpus 1,2,4 --json benchmarks/results/training_end_to_end_4xH200.json
    ACCELERATE_USE_CPU=true python benchmarks/training_end_to_end.py --tiny --gpus 1,2

DiffSynth's own training module and loop on video files that this script writes; weights are random, of full size, or
small with `--tiny`, which the CPU trains. Four ways, each in processes of its own:

    DiffSynth             python, or accelerate launch with a process for each GPU: each video and prompt in each step
    DiffSynth, two tasks  its own --task sft:data_process, then --task sft:train on the files of that
    wanshim               WANSHIM_ENCODE_CACHE=FOLDER wanshim run --gpus N -- python ...
    wanshim, two tasks    both tasks under `wanshim run --gpus N`: the speed of cached latents

Records for each epoch the seconds of a step, from the end of its first step to that of its last, the seconds of the
whole loop with all that it encodes, and the peak of each GPU. A step of N processes of DiffSynth's own has N samples,
one of wanshim's has one: `seconds_a_sample` compares them. The GPU is waited for at those two steps alone: a loop
reads the next sample while the GPU computes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import model_split as base
import sequence_training
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffsynth.core import UnifiedDataset
from diffsynth.diffusion import DiffusionTrainingModule, FlowMatchSFTLoss, ModelLogger, runner
from diffsynth.models.wan_video_text_encoder import HuggingfaceTokenizer, WanTextEncoder
from diffsynth.models.wan_video_vae import VideoVAE_, WanVideoVAE
from diffsynth.pipelines.wan_video import WanVideoPipeline

from wanshim.core.shared.gpu_memory import indexed
from wanshim.demo.wan_checkpoint import write_tokenizer
from wanshim.launch.ranks import free_port

ROOT = Path(__file__).parent.parent
TINY = {
    "layers": 2, "dim": 96, "ffn_dim": 64, "heads": 2, "text_dim": 64, "rank": 4, "height": 32, "width": 32,
    "frames": 5, "videos": 4,
}  # fmt: skip
VOCABULARY = 256384  # of umT5
ONE_TASK, TWO_TASKS = ("sft",), ("sft:data_process", "sft:train")
WAYS = {
    "DiffSynth": ONE_TASK,
    "DiffSynth, two tasks": TWO_TASKS,
    "wanshim": ONE_TASK,
    "wanshim, two tasks": TWO_TASKS,
}


class Training(DiffusionTrainingModule):  # type: ignore[misc]
    """As examples/wanvideo/model_training/train.py has it."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        self.task, self.pipe = args.task, pipeline(args, device)
        self.pipe = self.split_pipeline_units(args.task, self.pipe, lora_base_model="dit")

    def forward(self, data: Any, inputs: Any = None) -> Any:
        if inputs is None:
            inputs = self._inputs(data)
        inputs = self.transfer_data_to_device(inputs, self.pipe.device, self.pipe.torch_dtype)
        for unit in self.pipe.units:
            inputs = self.pipe.unit_runner(unit, self.pipe, *inputs)
        if self.task.endswith(":data_process"):
            return inputs
        return FlowMatchSFTLoss(self.pipe, **inputs[0], **inputs[1])

    def _inputs(self, data: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        video = data["video"]
        shared = {
            "input_video": video, "height": video[0].size[1], "width": video[0].size[0], "num_frames": len(video),
            "cfg_scale": 1, "tiled": False, "rand_device": self.pipe.device, "use_gradient_checkpointing": True,
            "use_gradient_checkpointing_offload": False, "cfg_merge": False, "vace_scale": 1,
        }  # fmt: skip
        return shared, {"prompt": data["prompt"]}, {}


def pipeline(args: argparse.Namespace, device: torch.device) -> Any:
    """Random weights on a device; what the task does not call is left out, as a user leaves out its paths."""
    pipe = WanVideoPipeline(device=device, torch_dtype=torch.bfloat16)
    pipe.scheduler.set_timesteps(1000, training=True)
    pipe.requires_grad_(False).eval()
    if not args.task.endswith(":train"):
        size = {"dim": args.text_dim, "dim_attn": args.text_dim, "dim_ffn": 10240, "num_layers": 24, "num_heads": 64}
        if args.tiny:
            size |= {"dim_ffn": 128, "num_layers": 2, "num_heads": 4}
        with torch.device(device):
            pipe.text_encoder = _frozen(WanTextEncoder(vocab=VOCABULARY if not args.tiny else 128, **size))
            pipe.vae = WanVideoVAE()
            if args.tiny:
                pipe.vae.model = VideoVAE_(dim=4, z_dim=16)
        pipe.vae = _frozen(pipe.vae).to(device)
        pipe.tokenizer = HuggingfaceTokenizer(name=str(Path(args.folder, "tokenizer")), seq_len=512, clean="whitespace")
    if not args.task.endswith(":data_process"):
        pipe.dit = base.build(args, str(device))
    return pipe


def _frozen(model: torch.nn.Module) -> torch.nn.Module:
    """In bf16, with weights around the identity of each kind; the same in every process."""
    generator = None
    for name, parameter in model.to(torch.bfloat16).requires_grad_(False).eval().named_parameters():
        if generator is None:
            generator = torch.Generator(parameter.device).manual_seed(2)
        if parameter.dim() > 1 and "gamma" not in name:
            parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
    return model


class Clock(ModelLogger):  # type: ignore[misc]
    """Notes when an epoch begins, when its first step ends and when its last does, and saves nothing."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.epochs: list[dict[str, Any]] = []
        self.losses: list[torch.Tensor] = []
        self.begin, self.first, self.steps = time.perf_counter(), 0.0, 0

    def on_step_end(self, accelerator: Any, model: Any, save_steps: Any = None, **kwargs: Any) -> None:
        self.losses.append(kwargs["loss"].detach().clone())
        self.steps += 1
        if self.steps == 1:
            self.first = _now()

    def on_epoch_end(self, accelerator: Any, model: Any, epoch_id: int) -> None:
        end = _now()
        steady = (end - self.first) / (self.steps - 1) if self.steps > 1 else None
        epoch = {"steps": self.steps, "seconds_a_step": steady, "seconds": end - self.begin}
        if accelerator.is_main_process:
            print(f"epoch {epoch_id}: {epoch}", flush=True)
        self.epochs.append(epoch)
        self.begin, self.steps = end, 0


def _now() -> float:
    """When the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train(args: argparse.Namespace) -> None:
    """One process of one task; the first writes what was measured to `args.part`."""
    begin = time.perf_counter()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device = indexed(accelerator.device)
    cached = args.task.endswith(":train")
    dataset = UnifiedDataset(
        base_path=args.encoded if cached else args.folder,
        metadata_path=None if cached else str(Path(args.folder, "metadata.json")),
        data_file_keys=("video",),
        main_data_operator=UnifiedDataset.default_video_operator(
            base_path=args.folder, height=args.height, width=args.width, num_frames=args.frames
        ),
    )
    module = Training(args, device)
    options = sequence_training.options_of_script(args)
    options.num_epochs, options.save_steps, options.dataset_num_workers = args.epochs, None, args.workers
    clock = Clock(args.encoded if args.task.endswith(":data_process") else args.output)
    built = _now() - begin
    clock.begin = begin = time.perf_counter()
    if args.task.endswith(":data_process"):
        runner.launch_data_process_task(accelerator, dataset, module, clock, args=options)
    else:
        runner.launch_training_task(accelerator, dataset, module, clock, args=options)
    seconds = time.perf_counter() - begin
    peaks = gather_object([torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0])
    if accelerator.is_main_process:
        losses = [loss.item() for loss in clock.losses]
        found = {"seconds": seconds, "peaks_GiB": peaks, "epochs": clock.epochs, "losses": losses, "built": built}
        found["plan"] = sequence_training.planned() if "wanshim" in sys.modules else []
        args.part.write_text(json.dumps(found))


def write_files(args: argparse.Namespace) -> None:
    """The videos and prompts of the data set, and a tokenizer."""
    import imageio
    import numpy as np
    from PIL import Image

    folder = Path(args.folder)
    write_tokenizer(folder / "tokenizer")
    rows = []
    for number in range(args.videos):
        draw = np.random.default_rng(number)
        coarse = Image.fromarray(draw.integers(0, 256, (15, 26, 3), dtype=np.uint8))
        still = np.asarray(coarse.resize((args.width, args.height), Image.Resampling.BICUBIC))
        frames = [np.roll(still, 4 * shift, axis=1) for shift in range(args.frames)]
        imageio.mimwrite(folder / f"{number}.mp4", frames, fps=24, macro_block_size=1)
        rows.append({"video": f"{number}.mp4", "prompt": f"video {number} of a pattern that moves to the left"})
    (folder / "metadata.json").write_text(json.dumps(rows))


def start(args: argparse.Namespace, way: str, gpus: int) -> dict[str, Any]:
    """One way with so many GPUs."""
    by_wanshim = way.startswith("wanshim")
    found: dict[str, Any] = {"way": way, "gpus": gpus, "before": 0.0}
    with tempfile.TemporaryDirectory(dir=args.folder) as own:
        for task in WAYS[way]:
            part = Path(own, "part.json")
            command = _launched(
                by_wanshim, gpus, [*_options(args), "--task", task, "--encoded", own, "--part", str(part)]
            )
            variables = {"WANSHIM_ENCODE_CACHE": f"{own}/cache"} if way == "wanshim" else {}
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **variables}, check=True, cwd=own)
            measured = json.loads(part.read_text())
            if task.endswith(":data_process"):
                found["before"] = measured["seconds"]
        found |= measured
    in_a_step = 1 if by_wanshim else gpus
    for epoch in found["epochs"]:
        epoch["seconds_a_sample"] = (epoch["seconds_a_step"] or epoch["seconds"] / epoch["steps"]) / in_a_step
    found["seconds_with_all_encoding"] = found["before"] + found["seconds"]
    return found


def _launched(by_wanshim: bool, gpus: int, options: list[str]) -> list[str]:
    script = [str(Path(__file__).resolve()), *options]
    if by_wanshim:
        return [sys.executable, "-m", "wanshim", "run", "--gpus", str(gpus), "--", sys.executable, *script]
    if gpus == 1:
        return [sys.executable, *script]
    several = ["--num_processes", str(gpus), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    several += ["--main_process_port", str(free_port()), "--multi_gpu" if torch.cuda.is_available() else "--cpu"]
    return [sys.executable, "-m", "accelerate.commands.launch", *several, *script]


def _options(args: argparse.Namespace) -> list[str]:
    skipped = ("json", "gpus", "part", "task", "encoded", "tiny", "ways")
    pairs = [(name, value) for name, value in vars(args).items() if name not in skipped]
    named = [text for name, value in pairs for text in (f"--{name.replace('_', '-')}", str(value))]
    return [*named, *(["--tiny"] if args.tiny else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1", help="numbers of GPUs, such as 1,2,4")
    parser.add_argument("--ways", default="all", help="numbers of the ways, such as 0,2")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", default="")
    parser.add_argument("--output", default="training-end-to-end-output")
    for name in ("--task", "--encoded"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    base.add_sizes(parser, videos=12, epochs=3, workers=4)
    args = parser.parse_args()
    if args.tiny and not args.part:
        vars(args).update(TINY)
    if args.part:
        train(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = folder
        write_files(args)
        ways = [*WAYS] if args.ways == "all" else [[*WAYS][int(number)] for number in args.ways.split(",")]
        rows: list[dict[str, Any]] = []
        for gpus, way in itertools.product(args.gpus.split(","), ways):
            rows.append(start(args, way, int(gpus)))
            if args.json:
                args.json.write_text(json.dumps(base.environment(args) | {"rows": rows}, indent=1))
    for row in rows:
        steps = ", ".join(f"{epoch['seconds_a_sample']:.3f}" for epoch in row["epochs"])
        print(f"{row['gpus']} GPUs, {row['way']}: {steps} s a sample, {row['seconds_with_all_encoding']:.1f} s in all")


if __name__ == "__main__":
    main()
