"""`diffsynth.fp8_lora`: LoRA on a base of `--fp8_models` trains.

DiffSynth's wrapper of a module casts its weights by working on a deep copy of it, made anew in every forward. Where
the module is a whole block, the LoRA layers in it are copied too: the gradients reach the copies, the optimizer and
the saved file have the others. Nothing is trained, and nothing says so. Blocks of S2V and VACE are wrapped whole in
every release; those of the other Wan DiTs have been copied since 2.1.12. Here the copy shares what trains, and its
frozen weights are cast as before; it shares what has nothing to cast, too, with the hooks on it. A pipeline that
generates has all its weights set to be trained, as `from_pretrained` loads them: there all is cast.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Finding, Seam, SeamState, SourceTree
from wanshim.patching.verdict import Verdict

if TYPE_CHECKING:
    import torch

LAYERS = "diffsynth.core.vram.layers"
CAST = f"{LAYERS}:AutoWrappedModule.cast_to"
CAST_BLOCK = f"{LAYERS}:AutoWrappedNonRecurseModule.cast_to"
COPY_BLOCK = f"{LAYERS}:AutoWrappedNonRecurseModule._copy_with_shared_children"


def training_in(module: torch.nn.Module) -> list[Any]:
    """The modules within `module` that hold parameters set to be trained."""
    return [] if _generates(module) else [m for m in module.modules() if m is not module and _trains(m)]


def _trains(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _generates(module: torch.nn.Module) -> bool:
    """Whether nothing trains, though all is set to: a reentrant checkpoint, too, computes without gradients, of LoRA
    beside frozen weights."""
    import torch

    return not torch.is_grad_enabled() and all(parameter.requires_grad for parameter in module.parameters())


def cast_sharing_what_trains(module: torch.nn.Module, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A copy of `module` in another dtype, on another device, with what trains shared and left as it is."""
    shared = training_in(module)
    copied = copy.deepcopy(module, {id(m): m for m in shared})
    with _without(copied, {id(m) for m in shared}):
        copied.to(dtype=dtype, device=device)
    return copied


@contextmanager
def _without(module: torch.nn.Module, children: set[int]) -> Iterator[None]:
    """`module` with these modules below it taken out."""
    taken = [(parent, dict(parent._modules)) for parent in module.modules() if id(parent) not in children]
    for parent, modules in taken:
        parent._modules = {name: child for name, child in modules.items() if id(child) not in children}
    try:
        yield
    finally:
        for parent, modules in taken:
            parent._modules = modules


def copy_of_what_is_cast(module: torch.nn.Module) -> tuple[Any, set[int]]:
    """A copy of a block with all modules shared that have nothing to cast, and the ids of the outermost of these:
    DiffSynth's own shares the wrappers alone, and copies what trains and the hooks of the others."""
    shared = {id(m): m for m in shared_in_copy(module, generates=_generates(module))}
    return copy.deepcopy(module, dict(shared)), set(shared)


def shared_in_copy(module: torch.nn.Module, *, generates: bool = False) -> Iterator[torch.nn.Module]:
    """The outermost modules below `module` that have nothing to cast, as what trains has unless all of it `generates`.
    Those within them are in no copy: who takes them out of their parents for the length of a cast takes them out of the
    original, which another thread may run."""
    for child in module.children():
        if _has_nothing_to_cast(child, generates):
            yield child
        else:
            yield from shared_in_copy(child, generates=generates)


def _has_nothing_to_cast(module: torch.nn.Module, generates: bool) -> bool:
    from wanshim.adapters.diffsynth.vram import is_wrapper

    if is_wrapper(module) or (_trains(module) and not generates):
        return True  # it casts its own weights, or trains
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return not own and all(_has_nothing_to_cast(child, generates) for child in module.children())


def _cast(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    def cast_to(self: object, module: torch.nn.Module, dtype: torch.dtype, device: torch.device | str) -> Any:
        if not seam.enter_graph() or not training_in(module):
            return original(self, module, dtype, device)
        return cast_sharing_what_trains(module, dtype, device)

    return cast_to


def _copy_block(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    def _copy_with_shared_children(self: object, module: torch.nn.Module) -> Any:
        return copy_of_what_is_cast(module) if seam.enter_graph() else original(self, module)

    return _copy_with_shared_children


def _judge(source: SourceTree) -> Finding | None:
    """Whether the wrapper of a module still copies all of it to cast its weights."""
    cast = source.node(CAST)
    if cast is None:
        return Finding(Verdict.ABSENT, "there is no diffsynth.core.vram.layers.AutoWrappedModule with a cast_to")
    if any("requires_grad" in ast.unparse(node) for node in (cast, source.node(COPY_BLOCK)) if node is not None):
        return Finding(Verdict.NATIVE, "the copies of wrapped modules mind what trains")
    if not any(ast.unparse(node) == "copy.deepcopy(module)" for node in ast.walk(cast) if isinstance(node, ast.Call)):
        return None
    return Finding(Verdict.PATCH, "AutoWrappedModule.cast_to copies a block with its LoRA layers")


FEATURE = Feature(
    name="diffsynth.fp8_lora",
    summary="LoRA on a base of --fp8_models gets its gradients",
    auto=True,
    judge=_judge,
    relies_on=(
        f"{LAYERS}:AutoWrappedModule.computation",
        CAST_BLOCK,
        f"{LAYERS}:AutoWrappedNonRecurseModule._detach_shared_children",
    ),
    seams=tuple(
        Seam(
            target,
            replace,
            in_graph=True,
            required=target == CAST,
            why="copies a block with its LoRA layers in every forward: no gradient reaches those that the optimizer "
            "has",
            upstream="https://github.com/modelscope/DiffSynth-Studio: no issue is open; found by running it",
            remove_when="DiffSynth shares trainable parameters with the copies it casts",
        )
        for target, replace in ((CAST, _cast), (COPY_BLOCK, _copy_block))
    ),
)
