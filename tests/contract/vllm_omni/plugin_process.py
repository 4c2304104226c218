"""What the spawned process of test_plugins.py does. It imports no wanshim: a plugin has to be what brings it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from typing import Any

LOADERS = {
    "vllm.general_plugins": ("vllm.plugins", "load_general_plugins"),
    "vllm_omni.general_plugins": ("vllm_omni.plugins", "load_omni_general_plugins"),
}


def only(group: str) -> None:
    """Hide the other group's entry points, so that it is this group's that switches wanshim on."""
    everything = importlib.metadata.entry_points

    def entry_points(**selection: Any) -> Any:
        other = selection.get("group") in LOADERS and selection["group"] != group
        return everything(group="nothing of this name") if other else everything(**selection)

    importlib.metadata.entry_points = entry_points  # type: ignore[assignment]


def load(group: str, feature: str) -> dict[str, Any]:
    """In the spawned process: what the loader of the group does, twice, and what a pipeline's import finds then."""
    only(group)
    before = "wanshim" in sys.modules
    module, name = LOADERS[group]
    for _ in range(2):
        getattr(importlib.import_module(module), name)()
    after = "wanshim" in sys.modules
    import wanshim
    from wanshim.select import catalog

    targets = [seam.module for seam in catalog.discover().features[feature].seams]
    for target in dict.fromkeys(targets):
        with contextlib.suppress(ModuleNotFoundError):  # 0.14 has the registry alone
            importlib.import_module(target)
    row = wanshim.report().row(feature)
    return {"before": before, "after": after, "state": row.state, "reason": row.reason}
