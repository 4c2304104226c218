"""Two things pyproject.toml cannot say: `adapters/` installs as `wanshim.adapters`, and the matrix goes along."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithMatrix(build_py):
    """Copies compat_matrix.yaml into the package, so that an installed wheel finds it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "wanshim")
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "compat_matrix.yaml", target)


own = find_packages(include=["wanshim", "wanshim.*"])
adapters = ["wanshim." + name for name in find_packages(include=["adapters", "adapters.*"])]

setup(
    packages=own + adapters,
    package_dir={"wanshim": "wanshim", "wanshim.adapters": "adapters"},
    package_data={"wanshim": ["py.typed"], "wanshim.boot": ["path/*.py"]},
    cmdclass={"build_py": BuildWithMatrix},
)
