"""What wanshim patches in the installed vLLM-Omni, as the table says: a release has the one feature or the other."""

from __future__ import annotations

from tests.kit.pytest_tests import verdict_here
from wanshim.patching.verdict import Verdict

PATCHED = [f for f in ("vllm_omni.vae_decode", "vllm_omni.vae_allowlist") if verdict_here(f) is Verdict.PATCH]
FEATURE = PATCHED[0] if PATCHED else "vllm_omni.vae_allowlist"
