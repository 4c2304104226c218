"""The function behind `vllm.general_plugins` and `vllm_omni.general_plugins`.

vLLM calls every plugin in every process, without a guard: one that raises takes the worker down.
"""

from __future__ import annotations

import logging


def activate_in_worker() -> None:
    """Activate wanshim in this process. Idempotent, never raises."""
    try:
        import wanshim

        wanshim.activate()
    except Exception:
        logging.getLogger("wanshim").exception("wanshim is not active in this worker")
