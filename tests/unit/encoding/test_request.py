from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanshim.core.encoding import EncodingRequest
from wanshim.core.encoding import request as request_module
from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.encoding.request import KeyMaker, numerics
from wanshim.errors import WanshimError

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
        {"prompt": "Blurry"},
        {"prompt": "blurry "},
        {"tokenizer_args": {"max_length": 226}},
        {"precision": "bf16"},
        {"process": (strip,)},
        {"output_dtype": torch.float32},
        {"settings": {"text_len": 226}},
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


def test_key_does_not_change_with_the_order_in_which_arguments_are_named(
    request_for: MakeRequest, directory: CacheDirectory
) -> None:
    arguments = {"max_length": 512, "truncation": True}
    one, other = (request_for(tokenizer_args=dict(items)) for items in (arguments.items(), reversed(arguments.items())))
    assert key(one, directory) == key(other, directory)


def test_key_changes_with_the_order_of_functions_and_of_folders(
    request_for: MakeRequest, directory: CacheDirectory
) -> None:
    source = request_for().sources[0]
    both = request_for(process=(strip, lower)), request_for(process=(lower, strip))
    turned = request_for(encoder=source.tokenizer, tokenizer=source.encoder)
    assert len({key(request, directory) for request in (request_for(), *both, turned)}) == 4


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_key_of_two_encoders_changes_with_the_arguments_and_files_of_each(
    request_for: MakeRequest, directory: CacheDirectory, tmp_path: Path, place: int
) -> None:
    def key_of_two(**changes: Any) -> str:
        sources = [request_for().sources[0]] * 2
        sources[place] = replace(sources[place], **changes)
        return key(replace(request_for(), sources=tuple(sources)), directory)

    other = tmp_path / "other"
    other.mkdir()
    (other / "weights.bin").write_bytes(b"other")
    changes = [{}, {"precision": "bf16"}, {"encoder": other}, {"tokenizer": other}]
    assert len({key_of_two(**change) for change in changes}) == len(changes)


def test_key_changes_with_the_format_of_the_cache(
    request_for: MakeRequest, directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(request_for(), directory)
    monkeypatch.setattr(request_module, "FORMAT", "wanshim.encoding/2")
    assert key(request_for(), directory) != before


def test_key_is_known_when_every_folder_was_read_and_each_is_read_once(
    request_for: MakeRequest, directory: CacheDirectory, count_opens: Callable[..., Any]
) -> None:
    source = request_for().sources[0]
    first = key(request_for(), directory)
    (source.tokenizer / "config.json").write_text('{"changed": true}')
    changed = KeyMaker(request_for(), numerics(torch.device("cpu")), request_for().folders())
    assert changed.known_key(directory) is None
    counter = count_opens(source.encoder)
    assert changed.key(directory) == changed.known_key(directory) != first
    assert counter.opened == []


@pytest.mark.parametrize("folder", ["encoder", "tokenizer"])
def test_turn_is_one_for_equal_requests_and_another_for_other_files(request_for: MakeRequest, folder: str) -> None:
    def turn() -> str:
        return KeyMaker(request_for(), numerics(torch.device("cpu")), request_for().folders()).turn

    before = turn()
    assert turn() == before
    (getattr(request_for().sources[0], folder) / "config.json").write_text('{"changed": true}')
    assert turn() != before


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


@pytest.fixture
def _restored_precision() -> Iterator[None]:
    """Precisions of matrix products as they were."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    yield
    for backend, precision in zip(backends, before, strict=True):
        backend.fp32_precision = precision


@pytest.mark.usefixtures("_restored_precision")
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_numerics_name_torchs_version_and_its_precision_of_matrix_products(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of torch's ways to choose the precision count; after the present one, the older one cannot be read."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    here = torch.device(device)
    backend = torch.backends.cuda.matmul if here.type == "cuda" else torch.backends.mkldnn.matmul
    plain = numerics(here)
    backend.fp32_precision = "tf32"
    reduced = numerics(here)
    torch.set_float32_matmul_precision("highest")
    full = numerics(here)
    assert (plain["torch"], reduced["matmul"]) == (torch.__version__, "tf32")
    assert reduced["matmul"] not in (plain["matmul"], full["matmul"])
    torch.set_float32_matmul_precision("high")
    assert numerics(here) == reduced
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert numerics(here)["torch"] == "9.9.9"


def test_numerics_under_autocast_name_its_dtype() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert numerics(torch.device("cpu"))["autocast"] == "torch.bfloat16"
    assert numerics(torch.device("cpu"))["autocast"] == "off"


def test_request_with_an_argument_that_has_no_exact_form_is_refused(request_for: MakeRequest) -> None:
    with pytest.raises(WanshimError, match=r"cannot be named in a cache key .*type object"):
        request_for(tokenizer_args={"callback": object()}).described()


def prefixing(prefix: str) -> Callable[[str], str]:
    return lambda text: prefix + text


def test_key_changes_with_what_a_function_closes_over(request_for: MakeRequest, directory: CacheDirectory) -> None:
    keys = [key(request_for(process=(prefixing(prefix),)), directory) for prefix in ("a", "b", "a")]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]
