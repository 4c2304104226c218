"""What a patched decode or encode does with the user's settings, without any rank."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers a group whose other ranks are not there
from torch._dynamo.testing import CompileCounter

from tests.distributed.decoding.tiny import make_latent, make_vae
from wanshim import settings
from wanshim.core.decoding import VaeCache, VaeOptions, read_graph
from wanshim.errors import RankAbsent
from wanshim.patching import Seam, SeamState
from wanshim.patching.vae_method import COMPILED, replace_method

VARIABLES = {"decode": "WANSHIM_VAE_MODE", "encode": "WANSHIM_VAE_ENCODE"}
FLAGS = {"WANSHIM_VAE_FAST": "1", "WANSHIM_VAE_ENGINES": "0", "WANSHIM_VAE_TIMEOUT_S": "7"}
both_verbs = pytest.mark.parametrize("verb", VARIABLES)


def patched(verb: str, call: Any, **ranks: Any) -> tuple[Any, SeamState]:
    """A method that adds one, replaced by `call`, and its seam."""
    seam = SeamState(
        Seam(
            "a:B.method",
            replace_method(call, partial(read_graph, verb=verb), ranks=lambda vae: ranks, verb=verb),
            "why",
            "",
            "",
        )
    )
    seam.off, seam.settings = False, settings.read()
    return seam.seam.replace(lambda self, given, scale=1: given + 1, seam), seam


@both_verbs
def test_mode_off_leaves_a_call_to_the_framework_and_is_reported_once(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES[verb], "off")
    method, seam = patched(verb, lambda *_: pytest.fail("the ranks share it"))
    assert [method(object(), 1), method(object(), 2)] == [2, 3]
    assert list(seam.notes) == [f"left to the framework: the {verb} mode is off"]
    assert (seam.calls, seam.effects, seam.fallbacks) == (2, 0, {f"the {verb} mode is off": 2})


@both_verbs
def test_call_runs_with_the_settings_of_its_own_verb(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"decode": "encode", "encode": "decode"}[verb]
    for name, value in {VARIABLES[verb]: "spatial", VARIABLES[other]: "off", **FLAGS}.items():
        monkeypatch.setenv(name, value)
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(VaeCache, "run", lambda self, vae, given, **options: seen.append(options))
    method, _ = patched(verb, lambda call, vae, given: call(given), active=2)
    method(object(), 1)
    options = VaeOptions(mode="spatial", strict=False, engines=False, deadline=7.0)
    assert seen == [{"options": options, "lean": False, "active": 2}]


def test_latent_may_be_given_by_the_name_that_the_framework_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VaeCache, "run", lambda self, vae, latent, **options: latent + 10)
    method, _ = patched("decode", lambda call, vae, z, scale=1: call(z) * scale)
    assert method(object(), given=1) == 11
    assert method(object(), scale=2, given=1) == 22


@both_verbs
def test_rank_that_alone_has_a_prompt_more_waits_as_long_as_the_variable_says_and_is_told_of_it(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_VAE_TIMEOUT_S", "0.2")
    method, seam = patched(verb, lambda call, vae, given: call(given))
    given = make_latent(2) if verb == "decode" else torch.randn(1, 3, 5, 32, 32)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=20))
    try:
        with torch.no_grad():
            assert torch.equal(method(make_vae("2.1"), given), given + 1)
            seam.settings = replace(seam.settings, strict=True)
            with pytest.raises(RankAbsent, match=f"rank 1 did not call {verb} within 0.2 s"):
                method(make_vae("2.1"), given)
    finally:
        dist.destroy_process_group()
    (reason,) = seam.fallbacks
    assert reason.startswith(f"rank 1 did not call {verb} within 0.2 s")
    assert all(name in reason for name in ("WANSHIM_VAE_TIMEOUT_S", f"{VARIABLES[verb]}=off"))
    assert (seam.calls, seam.effects, seam.failed) == (2, 0, 1)  # a feature whose calls all fail is not exercised


@both_verbs
def test_compiled_method_is_the_frameworks_in_one_graph_and_the_report_says_so(verb: str) -> None:
    torch._dynamo.reset()
    method, seam = patched(verb, lambda *_: pytest.fail("the ranks share it"))
    counter = CompileCounter()
    compiled = torch.compile(method, backend=counter, fullgraph=True)
    for _ in range(3):
        assert compiled(None, torch.ones(2)).tolist() == [2, 2]
    assert counter.frame_count == 1
    assert seam.fallbacks == {COMPILED: 1}
    assert seam.effects == 0
    torch._dynamo.reset()


def test_compiled_method_that_does_not_apply_is_not_counted() -> None:
    torch._dynamo.reset()
    _, seam = patched("decode", lambda *_: pytest.fail("the ranks share it"))
    make = replace_method(lambda *_: pytest.fail("the ranks share it"), read_graph, applies=lambda *_: False)
    method = make(lambda self, given: given + 1, seam)
    assert torch.compile(method, backend="eager", fullgraph=True)(None, torch.ones(1)).tolist() == [2]
    assert (seam.calls, seam.fallbacks) == (0, {})
    torch._dynamo.reset()
