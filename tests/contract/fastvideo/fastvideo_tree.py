"""A FastVideo that hangs: the installed one with the rank-0-only encoding that it had for seven weeks.

The affected commits were never released, so the tests put the fault back into the installed
release: all files are the installed ones, but in `WanModel.ensure_negative_conditioning` rank 0 alone builds
the real inference pipeline while the others wait for its broadcast.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import textwrap
from pathlib import Path

from wanshim.errors import WanshimError

WAN = Path("train", "models", "wan", "wan.py")
RANK_ZERO_ONLY = """
    def ensure_negative_conditioning(self) -> None:
        if self.negative_prompt_embeds is not None:
            return
        from fastvideo.pipelines.basic.wan.wan_pipeline import WanPipeline
        from fastvideo.pipelines.pipeline_batch_info import ForwardBatch
        from fastvideo.train.utils.moduleloader import make_inference_args

        config, group, dtype = self.training_config, self.world_group, self._get_training_dtype()
        found = None
        if group.rank_in_group == 0:
            arguments = make_inference_args(config, model_path=config.model_path)
            pipeline = WanPipeline.from_pretrained(
                config.model_path,
                args=arguments,
                inference_mode=True,
                loaded_modules={"transformer": self.transformer},
                sp_size=config.distributed.sp_size,
                num_gpus=config.distributed.num_gpus,
                text_encoder_cpu_offload=False,
            )
            prompt = SamplingParam.from_pretrained(config.model_path).negative_prompt
            batch = ForwardBatch(data_type="video", prompt=prompt, prompt_embeds=[], prompt_attention_mask=[])
            batch = pipeline.prompt_encoding_stage(batch, arguments)
            found = (batch.prompt_embeds[0].to(dtype), batch.prompt_attention_mask[0].to(dtype))
        shapes = torch.zeros(5, dtype=torch.int64, device=self.device)
        if found is not None:
            shapes = torch.tensor([*found[0].shape, *found[1].shape], device=self.device)
        group.broadcast(shapes, src=0)
        sizes = [int(size) for size in shapes]
        if found is None:
            found = tuple(torch.empty(part, dtype=dtype, device=self.device) for part in (sizes[:3],
            sizes[3:]))
        for tensor in found:
            group.broadcast(tensor, src=0)
        self.negative_prompt_embeds, self.negative_prompt_attention_mask = found
"""


def reproduce(folder: Path) -> Path:
    """Build the package below `folder`, which goes in front of the installed one on the path.

    Raises:
        WanshimError: no FastVideo with `fastvideo.train` is installed.
    """
    installed = find_installed()
    root = folder / "fastvideo"
    shutil.copytree(installed, root, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    source = (installed / WAN).read_text(encoding="utf-8")
    (root / WAN).unlink()
    (root / WAN).write_text(_replace_method(source, "ensure_negative_conditioning", RANK_ZERO_ONLY), encoding="utf-8")
    name_version(folder)
    return folder


def name_version(folder: Path) -> None:
    """What pip leaves beside the package; the affected commits call themselves 0.1.7."""
    information = folder / "fastvideo-0.1.7.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fastvideo\nVersion: 0.1.7\n")


def find_installed() -> Path:
    """The folder of the installed package, found without importing it."""
    spec = importlib.util.find_spec("fastvideo")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if places and (Path(places[0]) / WAN).is_file():
        return Path(places[0])
    raise WanshimError(
        "No FastVideo with fastvideo.train is installed",
        expected="fastvideo 0.2.0 or 0.2.1",
        hint="Run `pip install fastvideo==0.2.0`, then this command again",
    )


def _replace_method(source: str, name: str, code: str) -> str:
    method = next(
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    lines = source.splitlines()
    indented = textwrap.indent(textwrap.dedent(code).strip("\n"), "    ").splitlines()
    return "\n".join([*lines[: method.lineno - 1], *indented, *lines[method.end_lineno :]]) + "\n"
