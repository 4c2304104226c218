"""A source tree on PYTHONPATH, with nothing of wanshim installed, has its features and its decoder graphs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

PROGRAM = """
from importlib.metadata import PackageNotFoundError, version

try:
    raise AssertionError(f"wanshim {version('wanshim')} is installed here")
except PackageNotFoundError:
    pass
import wanshim

wanshim.activate("none")
print(wanshim.report().row("diffusers.vae_decode").verdict)
from tests.contract.diffusers.vae import make_vae
from wanshim.core.decoding.model.binding import find_binding

print(*find_binding(make_vae("2.1")).methods)
"""


def test_source_tree_that_is_not_installed_has_its_features_and_its_decoder_graphs(tmp_path: Path) -> None:
    root, site, tree = Path(__file__).parents[3], tmp_path / "site", tmp_path / "tree"
    site.mkdir()
    tree.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "wanshim" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    for name in ("wanshim", "adapters", "tests", "compat_matrix.yaml"):  # without the metadata of an editable install
        (tree / name).symlink_to(root / name)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tree, site)))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["patch", "_decode"]
