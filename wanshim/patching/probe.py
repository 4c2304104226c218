"""Does the code found in a framework look like the code we know? Read from its files, never by importing it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Union

from wanshim.patching.verdict import Verdict

if TYPE_CHECKING:
    import zipfile

Folder = Union[Path, "zipfile.Path"]
SKIPPED = frozenset({"type_comment", "kind", "ctx", "type_params", "lineno", "col_offset"})


@dataclass(frozen=True)
class Finding:
    """The conclusion of a feature's judge from the source, with its evidence."""

    verdict: Verdict
    reason: str


def fingerprint(node: ast.AST) -> str:
    """Name a piece of code by its meaning: 16 hex digits that comments, layout and docstrings do not change.

    Built on the syntax tree and not on `ast.dump`, whose text differs between Python versions.
    """
    import hashlib  # OpenSSL: a tenth of `activate`, which reads no code

    return hashlib.sha256(_normal_form(node).encode()).hexdigest()[:16]


def _normal_form(value: object) -> str:
    if isinstance(value, list):
        return "[" + ",".join(_normal_form(item) for item in value) + "]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = []
    for name, child in ast.iter_fields(value):
        if name == "body" and isinstance(child, list):
            child = [item for i, item in enumerate(child) if i or not _is_docstring(item)]
        if isinstance(value, ast.JoinedStr):  # the first 3.12 releases end a format spec with an empty text
            child = [item for item in child if getattr(item, "value", None) != ""]
        if name not in SKIPPED and child is not None and child != []:
            fields.append(f"{name}={_normal_form(child)}")
    return f"{type(value).__name__}({','.join(fields)})"


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def find(tree: ast.AST, qualname: str) -> ast.AST | None:
    """The definition or assignment of `Class.method` or `NAME` in a module's tree; the last one wins."""
    node: ast.AST | None = tree
    for part in qualname.split("."):
        found = None
        for child in _statements(node):
            if part in _names(child):
                found = child
        if found is None:
            return None
        node = found
    return node


def _statements(node: ast.AST | None) -> list[ast.stmt]:
    """The statements of a body, those inside `if` and `try` included: imports are often guarded so."""
    result: list[ast.stmt] = []
    for name in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, name, []):
            result.append(child)
            if isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
                result.extend(_statements(child))
    return result


def _names(node: ast.stmt) -> list[str]:
    """The names a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@dataclass
class SourceTree:
    """The files of one package, read without importing it.

    Args:
        root: the package's folder, the one that holds its `__init__.py`, on disk or inside a wheel.
    """

    package: str
    root: Folder | None
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    @classmethod
    def of_installed(cls, package: str) -> SourceTree:
        """The folder from which Python would import `package`. A loose file or a bare folder of that name is not it."""
        module = sys.modules.get(package)
        try:
            spec = module.__spec__ if module is not None else importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None:  # not there, or a folder without __init__.py
            return cls(package, None)
        locations = list(spec.submodule_search_locations or [])
        return cls(package, Path(locations[0]) if locations else None)

    def file_of(self, module: str) -> Folder | None:
        """The source file of a module of this package, or None where there is no such module."""
        if self.root is None or module.split(".")[0] != self.package:
            return None
        inside = module.split(".")[1:]
        package = "/".join([*inside, "__init__.py"])
        candidates = (package, "/".join(inside) + ".py") if inside else (package,)
        files: list[Folder] = [self.root.joinpath(name) for name in candidates]
        return next((file for file in files if file.is_file()), None)

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = self.file_of(module)
            self._trees[module] = None if path is None else _parse(path.read_bytes())
        return self._trees[module]

    def node(self, target: str) -> ast.AST | None:
        """The syntax tree at `module:Qualified.name`, or None where module or name is gone."""
        module, qualname = target.split(":")
        tree = self.tree(module)
        return None if tree is None else find(tree, qualname)

    def fingerprint(self, target: str) -> str | None:
        node = self.node(target)
        return None if node is None else fingerprint(node)

    def fingerprints(self, targets: Iterable[str]) -> dict[str, str | None]:
        return {target: self.fingerprint(target) for target in targets}


def _parse(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None
