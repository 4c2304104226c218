"""The releases at hand by framework and version: those a user gave, then what the index or git has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from tools.drift.checkout import check_out
from tools.drift.download import fetch
from tools.drift.release import Release, framework_of, open_folder, open_wheel
from tools.drift.unavailable import ReleaseUnavailable
from wanshim.errors import WanshimError
from wanshim.patching.feature import Framework
from wanshim.select.matrix import Row


class Library:
    """Opens releases and keeps them open.

    Args:
        frameworks: those the adapters patch, by name.
        folder: where downloads go.
        online: whether anything may be downloaded at all.
    """

    def __init__(self, frameworks: Mapping[str, Framework], folder: Path, *, online: bool) -> None:
        self.frameworks = frameworks
        self.folder = folder
        self.online = online
        self.releases: dict[tuple[str, str], Release] = {}

    def add_wheels(self, paths: Iterable[Path]) -> list[Release]:
        """Wheels, and folders in which those of known frameworks are taken."""
        wheels = [wheel for path in paths for wheel in (self._wheels_in(path) if path.is_dir() else [path])]
        return [self._keep(open_wheel(wheel, self.frameworks.values())) for wheel in wheels]

    def _wheels_in(self, folder: Path) -> list[Path]:
        names = {canonicalize_name(framework.distribution) for framework in self.frameworks.values()}
        return [path for path in sorted(folder.glob("*.whl")) if canonicalize_name(path.name.split("-")[0]) in names]

    def add_folder(self, path: Path, version: str | None = None) -> Release:
        return self._keep(open_folder(path, version, self.frameworks.values()))

    def find(self, requirement: str) -> Release:
        """The release that fits `package` (its newest) or `package==version`.

        Raises:
            ReleaseUnavailable: the release cannot be downloaded, or downloads are off.
            WanshimError: no adapter patches such a package.
        """
        try:
            wanted = Requirement(requirement)
        except InvalidRequirement as error:
            raise WanshimError(f"{requirement!r} is no requirement", expected="package or package==version") from error
        framework = framework_of(wanted.name, self.frameworks.values())
        for (name, version), release in self.releases.items():
            if name == framework.name and wanted.specifier and wanted.specifier.contains(version, prereleases=True):
                return release
        if not self.online:
            raise ReleaseUnavailable(f"{requirement} is not among the wheels given", hint="Give it with --wheel FILE")
        wheel = fetch(f"{framework.distribution}{wanted.specifier}", self.folder)
        return self._keep(open_wheel(wheel, self.frameworks.values()))

    def of_row(self, row: Row) -> Release:
        """The source that a row speaks of: its release, or the commit it names."""
        known = self.releases.get((row.framework, row.version))
        if known is not None:
            return known
        if row.framework not in self.frameworks:
            raise WanshimError(f"no adapter gives a framework {row.framework!r}")
        if not row.source:
            return self.find(f"{self.frameworks[row.framework].distribution}=={row.version}")
        if not row.commit:
            raise WanshimError(
                "its source has no release and the row names no commit", hint="Name repository@commit in it"
            )
        if not self.online:
            raise ReleaseUnavailable(f"{row.commit} is not at hand", hint="Leave --offline out")
        folder = check_out(row.commit, row.framework, self.folder / f"{row.framework}-{row.commit.rsplit('@', 1)[1]}")
        return self._keep(open_folder(folder, row.version, self.frameworks.values()))

    def _keep(self, release: Release) -> Release:
        self.releases[release.framework, release.version] = release
        return release
