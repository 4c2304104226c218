"""What pyproject.toml cannot say: the matrix is installed with the package."""

import shutil
from pathlib import Path

from setuptools import setup
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


setup(cmdclass={"build_py": BuildWithMatrix})
