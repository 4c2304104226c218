from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from wanshim.core.encoding import EncodingRequest
from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.encoding.request import KeyMaker, numerics
from wanshim.errors import EncodingInvalid

MakeRequest = Callable[..., EncodingRequest]


def strip(text: str) -> str:
    return text.strip()


def lower(text: str) -> str:
    return text.lower()


def key(request: EncodingRequest, directory: CacheDirectory, **changes: str) -> str:
    numbers = {**numerics(torch.device("cpu")), **changes}
    return KeyMaker(request, numbers, request.folders()).key(directory)


def test_key_of_equal_requests_is_equal(request_for: MakeRequest, directory: CacheDirectory) -> None:
    assert key(request_for(), directory) == key(request_for(), directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "sharp"},
        {"tokenizer_args": {"max_length": 226}},
        {"precision": "bf16"},
        {"process": (strip,)},
        {"output_dtype": torch.float32},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_key_changes_with_every_argument(
    request_for: MakeRequest, directory: CacheDirectory, changes: dict[str, object]
) -> None:
    assert key(request_for(**changes), directory) != key(request_for(), directory)


@pytest.mark.parametrize("name", ["device", "torch", "matmul", "autocast"])
def test_key_changes_with_what_decides_the_last_bits(
    request_for: MakeRequest, directory: CacheDirectory, name: str
) -> None:
    assert key(request_for(), directory, **{name: "other"}) != key(request_for(), directory)


def test_key_changes_with_the_framework_version(request_for: MakeRequest, directory: CacheDirectory) -> None:
    newer = replace(request_for(), implementation={"framework": "1.1"})
    assert key(newer, directory) != key(request_for(), directory)


@pytest.mark.parametrize("folder", ["encoder", "tokenizer"])
def test_key_changes_with_the_files(request_for: MakeRequest, directory: CacheDirectory, folder: str) -> None:
    before = key(request_for(), directory)
    (getattr(request_for().sources[0], folder) / "config.json").write_text('{"changed": true}')
    assert key(request_for(), directory) != before


def test_numerics_name_the_kind_of_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of GPU, or a GPU and a CPU, round differently: their embeddings are kept apart."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    found = [numerics(torch.device(name))["device"] for name in ("cuda:0", "cuda:1", "cpu")]
    assert found[:2] == ["cuda card 0", "cuda card 1"]
    assert found[2].startswith("cpu ")


def test_numerics_under_autocast_name_its_dtype() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert numerics(torch.device("cpu"))["autocast"] == "torch.bfloat16"
    assert numerics(torch.device("cpu"))["autocast"] == "off"


def test_request_with_an_argument_that_has_no_exact_form_is_refused(request_for: MakeRequest) -> None:
    with pytest.raises(EncodingInvalid, match="cannot be named in a cache key"):
        request_for(tokenizer_args={"callback": object()}).described()


def prefixing(prefix: str) -> Callable[[str], str]:
    return lambda text: prefix + text


def test_key_changes_with_what_a_function_closes_over(request_for: MakeRequest, directory: CacheDirectory) -> None:
    keys = [key(request_for(process=(prefixing(prefix),)), directory) for prefix in ("a", "b", "a")]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]
