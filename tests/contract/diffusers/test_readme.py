"""README's line for diffusers, run as it stands: two ranks share a decode, whose frames are those of diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import readme
from wanshim.testing.pytest_tests import verdict_here
from wanshim.verdict import Verdict

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


def test_command_decodes_on_both_ranks_bit_for_bit_as_diffusers(tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_text(SCRIPT)
    readme.run(tmp_path, readme.commands()["diffusers"])
    assert [path.read_text() for path in sorted(tmp_path.glob("state.*"))] == ["exercised", "exercised"]
