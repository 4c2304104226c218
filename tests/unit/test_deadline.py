"""Every deadline, timeout and interval that a caller can set goes through one check, before anything else happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.kit import Contract
from wanshim import settings
from wanshim.cli.main import app
from wanshim.core.decoding.call import VaeOptions
from wanshim.core.encoding import EncodingRequest, encode_once
from wanshim.core.ranks import agreement
from wanshim.errors import SettingInvalid
from wanshim.values import LONGEST_S, checked_seconds

NONE = [float("inf"), float("nan"), float("-inf"), 0, -1.0, 1e12, 10**400, LONGEST_S + 1, True, False, "60", None]


def encode(seconds: Any) -> None:
    request = EncodingRequest(prompt="", sources=())
    encode_once(lambda: {"embeds": torch.ones(1)}, request, device="cpu", timeout_s=seconds, mode="per_rank")


TAKERS: dict[str, Callable[[Any], object]] = {
    "encode_once": encode,
    "decode options": lambda seconds: VaeOptions(deadline=seconds),
    "agreement": lambda seconds: agreement.ensure(timeout_s=seconds),
    "contract kit": lambda seconds: Contract(feature="a.b", call="c:d", timeout_s=seconds),
}


@pytest.mark.parametrize("seconds", NONE, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
def test_deadline_that_cannot_be_waited_is_refused_by_whoever_takes_one(
    taker: Callable[[Any], object], seconds: object
) -> None:
    with pytest.raises(SettingInvalid, match="Expected seconds above zero, such as 1800, and at most 2592000"):
        taker(seconds)


@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "0.0", "-1", "1e12", "True", "a minute", "1e999"])
@pytest.mark.parametrize("name", ["WANSHIM_PG_TIMEOUT_S", "WANSHIM_ENCODE_TIMEOUT_S", "WANSHIM_VAE_TIMEOUT_S"])
def test_deadline_in_a_variable_is_refused_as_the_user_wrote_it(name: str, value: str) -> None:
    with pytest.raises(SettingInvalid, match=f"^{name}='{value}'"):
        settings.read({name: value})


@pytest.mark.parametrize("option", ["--stall-floor", "--stall-medians"])
@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1"])
def test_patience_of_the_monitor_is_refused(tmp_path: Path, option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["monitor", str(tmp_path), "--check", option, value])
    assert result.exit_code != 0
    assert option in result.output + str(result.exception)


@pytest.mark.parametrize("seconds", [5e-3, 1, 1800, 86400.0, LONGEST_S])
def test_deadline_that_can_be_waited_comes_back_as_a_float(seconds: float) -> None:
    found = checked_seconds(seconds, "deadline")
    assert (found, type(found)) == (seconds, float)
