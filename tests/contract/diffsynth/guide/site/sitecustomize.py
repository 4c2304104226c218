"""Teaches each Python process of the guide the tiny model, as DiffSynth knows the published one.

`wanshim run` has a sitecustomize of its own and runs this one, the user's, behind it.
"""

from pathlib import Path


def _register_later() -> None:
    import wrapt

    def register(loader: object) -> None:
        from diffsynth.configs import model_configs

        from tests.contract.diffsynth.guide import tiny_ti2v

        tiny_ti2v.register(model_configs)

    wrapt.when_imported("diffsynth.pipelines.wan_video")(register)


if Path("models").is_dir():
    _register_later()
