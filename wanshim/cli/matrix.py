"""`wanshim matrix`: the verdicts of compat_matrix.yaml, in words or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from wanshim.cli.main import as_json
from wanshim.errors import WanshimError

if TYPE_CHECKING:
    from wanshim.select.matrix import Matrix


@click.command()
@click.argument("frameworks", nargs=-1)
@as_json
def matrix(frameworks: tuple[str, ...], as_json: bool) -> None:
    """List the releases of each feature by verdict: patched, native or refused. Frameworks: such as diffsynth;
    all of them by default."""
    from wanshim.cli import matrix_words
    from wanshim.select import matrix as matrices

    loaded = matrices.load()
    named = [_framework(name, loaded) for name in frameworks or loaded.declared]
    if as_json:
        records = [record for record in matrix_words.records(loaded) if record["framework"] in named]
        click.echo(json.dumps(records, indent=2))
    else:
        for line in matrix_words.lines(loaded, named):
            click.echo(line)


def _framework(name: str, loaded: Matrix) -> str:
    """As users write it: vllm-omni and DiffSynth-Studio too."""
    written = name.lower().replace("-", "_").removesuffix("_studio")
    if written not in loaded.declared:
        raise WanshimError(f"no framework {name!r} in the matrix", expected=f"one of {', '.join(loaded.declared)}")
    return written
