"""README's line for diffusers and the how-to's for decode, run as they stand: frames are those of diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.contract import readme
from tests.kit.pytest_tests import verdict_here
from wanshim.patching.verdict import Verdict

pytestmark = pytest.mark.skipif(
    verdict_here("diffusers.vae_decode") is not Verdict.PATCH, reason="this release's Wan VAE is not known"
)
SCRIPT = """
import torch
import torch.distributed as dist
from pathlib import Path
from tests.contract.diffusers.vae import LATENT_CHANNELS, make_vae

dist.init_process_group("gloo")
vae = make_vae("2.1", torch.float32)
latent = torch.randn(1, LATENT_CHANNELS["2.1"], 3, 8, 8, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    frames = vae.decode(latent).sample
    import wanshim
    state = wanshim.report().row("diffusers.vae_decode").state
    wanshim.deactivate()
    assert torch.equal(frames, vae.decode(latent).sample)
Path(f"state.{dist.get_rank()}").write_text(state)
"""


DECODE = "WANSHIM_VAE_MODE=auto wanshim run -- torchrun --nproc-per-node 2 generate.py"
GENERATE = """
import torch
from pathlib import Path
from tests.contract.diffusers import wan_pipelines

torch.set_num_threads(1)
torch.save(wan_pipelines.generate(wan_pipelines.wan(), "wan"), Path("frames.pt"))
"""


def test_command_generates_the_frames_of_the_script_alone(tmp_path: Path) -> None:
    frames = []
    for name, command in (("alone", "python generate.py"), ("shared", readme.commands()["diffusers"])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "generate.py").write_text(GENERATE)
        readme.run(folder, command, ACCELERATE_USE_CPU="true")
        frames.append(torch.load(folder / "frames.pt", weights_only=True))
    assert torch.equal(*frames)


def test_command_decodes_on_both_ranks_bit_for_bit_as_diffusers(tmp_path: Path) -> None:
    assert DECODE in (readme.ROOT / "docs/how-to/decode.md").read_text(encoding="utf-8")
    (tmp_path / "generate.py").write_text(SCRIPT)
    readme.run(tmp_path, DECODE)
    assert [path.read_text() for path in sorted(tmp_path.glob("state.*"))] == ["exercised", "exercised"]
