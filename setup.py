"""What pyproject.toml cannot say: the matrix is installed with the package, and a release knows its repository."""

import json
import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# Where the project lives, as the workflow that releases it knows it. A build elsewhere names no address.
URL = os.environ.get("PROJECT_URL", "")
PAGES = {
    "Repository": "",
    "Issues": "/issues",
    "Documentation": "/blob/main/docs/index.md",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Support": "/blob/main/SUPPORT.md",
}
RELATIVE = re.compile(r'(\]\(|src="|srcset=")(?!https?:|#)')


class BuildWithMatrix(build_py):
    """Writes compat_matrix.yaml into the package as JSON, which every process reads in a hundredth of the time.

    The folder of an earlier build goes first: `pip install .` leaves it in the checkout, and whatever has been renamed
    since would be installed under both names.
    """

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "wanshim"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            import yaml

            target = Path(self.build_lib, "wanshim", "compat_matrix.json")
            target.parent.mkdir(parents=True, exist_ok=True)
            table = yaml.load((ROOT / "compat_matrix.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
            target.write_text(json.dumps(table, separators=(",", ":")), encoding="utf-8")


def readme() -> str:
    """README, whose links lead to the repository: the index shows it without the files beside it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return (
        RELATIVE.sub(lambda found: f"{found[1]}{URL}/{'raw' if 'src' in found[1] else 'blob'}/main/", text)
        if URL
        else text
    )


if not (ROOT / "wanshim" / "adapters" / "__init__.py").is_file():
    raise SystemExit(
        "wanshim/adapters is not a link to adapters/ in this checkout, so that what is built would hold no adapters. "
        "Run `git config core.symlinks true && git checkout -- wanshim/adapters`, on a file system that has links."
    )

setup(
    cmdclass={"build_py": BuildWithMatrix},
    project_urls={name: URL + page for name, page in PAGES.items()} if URL else {},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
