"""`diffsynth.patchify`: a direct `WanModel.forward` works.

Since commit a36f2f60 (2025-09-30) `WanModel.patchify` returns the embedded video as a 5-D tensor, which
`model_fn_wan_video`, S2V and VAP expect, while `WanModel.forward` and `usp_dit_forward` still unpack a pair
of tokens and grid from it. The upstream pull request made `patchify` return the pair, which breaks those
that were right; here no return value changes: the two forwards that expect a pair see the model through a
view that gives them one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from wanshim.patching import Feature, Finding, Seam, SeamState, SourceTree
from wanshim.patching.verdict import Verdict

FORWARD = "diffsynth.models.wan_video_dit:WanModel.forward"
PATCHIFY = "diffsynth.models.wan_video_dit:WanModel.patchify"
USP_FORWARD = "diffsynth.utils.xfuser.xdit_context_parallel:usp_dit_forward"


class _TokenView:
    """A model as `forward` expects it: everything is the model's own, but `patchify` gives tokens and grid."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def patchify(self, *args: object, **kwargs: object) -> Any:
        """Embed a video (b, c, f, h, w) and return tokens (b, f*h*w, c) with the grid (f, h, w).

        A subclass that returns the pair itself is passed through.
        """
        embedded = self._model.patchify(*args, **kwargs)
        if isinstance(embedded, tuple):
            return embedded
        grid = tuple(embedded.shape[2:])
        return embedded.flatten(2).transpose(1, 2).contiguous(), grid


def _through_view(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    def forward(self: object, *args: object, **kwargs: object) -> Any:
        if not seam.enter_graph():
            return original(self, *args, **kwargs)
        return original(_TokenView(self), *args, **kwargs)

    return forward


def _judge(source: SourceTree) -> Finding | None:
    """Whether `forward` still unpacks a pair from `patchify`, and whether `patchify` gives one."""
    forward, patchify = source.node(FORWARD), source.node(PATCHIFY)
    if forward is None or patchify is None:
        return Finding(Verdict.ABSENT, "there is no diffsynth.models.wan_video_dit.WanModel with a patchify of its own")
    if not any(map(_calls_patchify, ast.walk(forward))):
        return Finding(Verdict.NATIVE, "WanModel.forward no longer calls patchify")
    result = _patchify_result(forward)
    if result is None:
        return None
    if isinstance(result, ast.Name):
        return Finding(Verdict.NATIVE, "WanModel.forward no longer unpacks a pair from patchify")
    if any(isinstance(node.value, ast.Tuple) for node in ast.walk(patchify) if isinstance(node, ast.Return)):
        return Finding(Verdict.NATIVE, "WanModel.patchify returns the pair that forward unpacks")
    return Finding(Verdict.PATCH, "WanModel.forward unpacks a pair from patchify, which returns one tensor")


def _patchify_result(forward: ast.AST) -> ast.Name | ast.Tuple | None:
    """The target to which `forward` assigns the result of patchify: a name whose shape it reads, or a pair. None where
    it does neither, so that the source alone does not show it."""
    for node in ast.walk(forward):
        if isinstance(node, ast.Assign) and _calls_patchify(node.value):
            target = node.targets[0]
            if isinstance(target, ast.Tuple) or (isinstance(target, ast.Name) and _reads_shape(forward, target.id)):
                return target
    return None


def _calls_patchify(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "patchify"


def _reads_shape(forward: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == "shape" and ast.unparse(node.value) == name
        for node in ast.walk(forward)
    )


FEATURE = Feature(
    name="diffsynth.patchify",
    summary="WanModel.forward works when called directly",
    auto=True,
    judge=_judge,
    relies_on=(PATCHIFY,),
    seams=tuple(
        Seam(
            target,
            _through_view,
            in_graph=True,
            required=target == FORWARD,  # the other's module loads only where xfuser is importable; its seam waits
            why="unpacks (tokens, (f, h, w)) from patchify, which returns one 5-D tensor: any direct call fails",
            upstream="https://github.com/modelscope/DiffSynth-Studio/issues/1063 (closed attempt: pull 1435)",
            remove_when="WanModel.forward flattens the result of patchify itself",
        )
        for target in (FORWARD, USP_FORWARD)
    ),
)
