"""The function behind `vllm.general_plugins` and `vllm_omni.general_plugins`.

vLLM calls every plugin of the environment in every process, whether or not anybody wants wanshim there, and without a
guard: one that raises takes the worker down.
"""

from __future__ import annotations

import logging


def activate_in_worker() -> None:
    """Activate wanshim in this process as in its parent, if the parent was activated or a variable asks for it.

    WANSHIM_FEATURES asks for it, a variable that switches a feature on, and `wanshim run`. Idempotent. Raises, and so
    ends the worker, only where the user demanded more than is available.

    Raises:
        FeatureUnavailable: the launch contradicts what the user named, or, under WANSHIM_STRICT, a selected feature
            is unavailable.
    """
    from wanshim.errors import FeatureUnavailable

    try:
        from wanshim import activation

        activation.activate_as_parent()
    except FeatureUnavailable:
        raise
    except Exception:
        logging.getLogger("wanshim").exception("wanshim is not active in this worker")
