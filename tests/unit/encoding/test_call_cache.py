"""Results of calls by content: what is read again, what is computed anew, and why."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from wanshim.core.encoding import call_cache
from wanshim.core.encoding.call_cache import CallCache
from wanshim.core.encoding.contents import Withheld, WithheldRead, content
from wanshim.core.shared.fallback import Fallback
from wanshim.errors import WanshimError

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CallCache]:
    made = CallCache(tmp_path / "cache")
    yield made
    made.close()


def test_folder_that_cannot_be_used_is_refused_with_the_variable_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WanshimError, match=r"is not a directory.*name another directory.*WANSHIM_ENCODE_CACHE"):
        CallCache(tmp_path / "file")


class Encoder:
    """Counts its calls."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self.compute, self.calls = compute, 0

    def __call__(self, **inputs: Any) -> Any:
        self.calls += 1
        return self.compute(**inputs)


def ask(cache: CallCache, encoder: Encoder, identity: str = "code", **inputs: Any) -> Any:
    return cache.result("encoder", lambda: identity, encoder, inputs, CPU)


def test_equal_inputs_are_computed_once_and_read_bit_for_bit(cache: CallCache) -> None:
    encoder = Encoder(lambda image, size: {"out": torch.tensor([float("nan"), -0.0, size]), "size": (size, None, "a")})
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    first, second = (ask(cache, encoder, image=image.copy(), size=3) for _ in range(2))
    assert encoder.calls == 1
    assert torch.equal(first["out"].view(torch.int32), second["out"].view(torch.int32))
    assert first["size"] == second["size"] == (3, None, "a")
    other = image.copy()
    other.putpixel((0, 0), (1, 1, 1))
    ask(cache, encoder, image=other, size=3)
    ask(cache, encoder, image=image, size=4)
    ask(cache, encoder, "other code", image=image, size=3)
    assert encoder.calls == 4


def test_strides_of_a_result_are_kept(cache: CallCache) -> None:
    """A draw like it fills memory in its order."""
    encoder = Encoder(lambda seed: {"out": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)})
    first, second = (ask(cache, encoder, seed=1)["out"] for _ in range(2))
    assert encoder.calls == 1
    assert first.stride() == second.stride() == (1, 12, 4)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "draw", [torch.rand, lambda _: random.random(), lambda _: np.random.rand()], ids=["torch", "Python", "NumPy"]
)
def test_call_that_draws_is_not_kept(cache: CallCache, draw: Callable[[int], Any]) -> None:
    encoder = Encoder(lambda text: {"out": torch.ones(1) * draw(1)})
    found = [ask(cache, encoder, text="a")["out"] for _ in range(2)]
    assert encoder.calls == 2
    assert not torch.equal(*found)
    assert cache.reasons == {"encoder": "it draws at random"}


def test_drawn_tensor_that_is_handed_on_is_that_of_each_call(cache: CallCache) -> None:
    encoder = Encoder(lambda text, noise: {"latents": noise, "out": torch.full((noise.shape[0],), 2.0)})
    for _ in range(2):
        noise = cache.watched("noise", lambda: torch.rand(3), CPU, ())
        found = ask(cache, encoder, text="a", noise=noise)
        assert found["latents"] is noise
        assert torch.equal(found["out"], torch.full((3,), 2.0))
    assert encoder.calls == 1
    noise = cache.watched("noise", lambda: torch.rand(4), CPU, ())
    assert ask(cache, encoder, text="a", noise=noise)["out"].shape == (4,)


def test_call_that_reads_a_drawn_tensor_is_computed_in_each_step(cache: CallCache) -> None:
    encoder = Encoder(lambda noise: {"out": noise * 2})
    for calls in (2, 3):  # the first is computed again with the tensor itself
        noise = cache.watched("draws", lambda: torch.rand(3), CPU, ())
        assert torch.equal(ask(cache, encoder, noise=noise)["out"], noise * 2)
        assert encoder.calls == calls
    assert cache.reasons == {"encoder": "it reads noise, which draws draws"}


def test_what_is_made_of_a_drawn_tensor_is_drawn(cache: CallCache) -> None:
    noise = cache.watched("draws", lambda: torch.rand(3), CPU, ())
    half = cache.watched("halves", lambda: noise / 2, CPU, (noise,))
    encoder = Encoder(lambda half: {"out": half * 2})
    ask(cache, encoder, half=half)
    assert cache.reasons == {"encoder": "it reads half, which halves draws"}


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda frames: {"out": frames[0].put(1)}, "it changes its inputs"),
        (lambda frames: [torch.ones(1)], "its result is no dict of names"),
        (lambda frames: {"out": {torch.ones(1)}}, "its result out is a set"),
        (lambda frames: {"out": torch.ones(1).expand(3)}, "its result out overlaps itself in memory"),
        (lambda frames: {"out": torch.ones(1, requires_grad=True)}, "its result out has a gradient"),
    ],
)
def test_result_that_cannot_be_made_again_is_not_kept(
    cache: CallCache, compute: Callable[..., Any], reason: str
) -> None:
    class Frame:
        value = 0

        def __init__(self) -> None:
            self.seen = 0

        def put(self, number: int) -> torch.Tensor:
            self.seen += number
            return torch.ones(number)

    encoder = Encoder(compute)
    for _ in range(2):
        ask(cache, encoder, frames=[Frame()])
    assert encoder.calls == 2
    assert reason in cache.reasons["encoder"]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "I;16", "P"])
def test_images_of_a_result_are_made_again(cache: CallCache, mode: str) -> None:
    """As a unit that encodes an image to edit returns it in the size in which it was encoded."""
    drawn = np.random.default_rng(0).integers(0, 256, (8, 5, 3), dtype=np.uint8)
    image = Image.fromarray(drawn).convert("L" if mode == "I;16" else mode).convert(mode)
    encoder = Encoder(lambda image: {"latents": torch.ones(2), "edit": image.rotate(180), "all": [image.copy()] * 2})
    found = [ask(cache, encoder, image=image) for _ in range(2)]
    assert {n: content(v) for n, v in found[1].items()} == {n: content(v) for n, v in found[0].items()}
    assert type(found[1]["edit"]) is Image.Image
    assert encoder.calls == (2 if mode == "P" else 1)  # whose colours are beside its pixels
    assert bool(cache.reasons) == (mode == "P")


def test_tensor_with_two_names_is_one_again(cache: CallCache) -> None:
    """As a pipeline's latents are, of which a loop changes one in place."""

    def encode() -> dict[str, torch.Tensor]:
        latents = torch.arange(3.0)
        return {"latents": latents, "input_latents": latents}

    for _ in range(2):
        found = ask(cache, Encoder(encode))
        assert found["latents"] is found["input_latents"]
    assert not cache.reasons


def test_results_that_share_memory_are_not_kept(cache: CallCache) -> None:
    both = torch.ones(2)
    ask(cache, Encoder(lambda: {"a": both[:1], "b": both[1:]}))
    assert cache.reasons == {"encoder": "its results share memory"}


def test_input_without_an_exact_form_is_a_reason(cache: CallCache) -> None:
    encoder = Encoder(lambda stream: {"out": torch.ones(1)})
    ask(cache, encoder, stream=iter([1]))
    with Path(__file__).open() as file:
        ask(cache, encoder, stream=file)
    assert "has no exact form" in cache.reasons["encoder"]


def test_result_without_a_tensor_takes_no_file(cache: CallCache, tmp_path: Path) -> None:
    encoder = Encoder(lambda image: {})
    assert ask(cache, encoder, image=None) == ask(cache, encoder, image=None) == {}
    assert encoder.calls == 2
    assert not list((tmp_path / "cache").iterdir())


def test_another_process_is_waited_for_no_longer_than_its_turn(
    cache: CallCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_cache, "TURN_S", 0.1)
    other = CallCache(tmp_path / "cache")
    encoder = Encoder(lambda text: {"out": torch.ones(1)})

    def slow(text: str) -> dict[str, Any]:
        return ask(cache, encoder, text=text)  # type: ignore[no-any-return]

    ask(other, Encoder(slow), text="a")  # it holds the turn while the first one waits for it
    assert encoder.calls == 1


def test_withheld_tensor_tells_its_shape_alone() -> None:
    stand_in = Withheld.of(torch.rand(2, 3).bfloat16())
    assert (stand_in.shape, stand_in.dtype, stand_in.device, stand_in.dim(), stand_in.size(1)) == (
        torch.Size([2, 3]), torch.bfloat16, CPU, 2, 3,
    )  # fmt: skip
    assert not stand_in.is_read
    for read in (lambda: stand_in + 1, lambda: stand_in.numpy(), lambda: stand_in[0], stand_in.tolist):
        with pytest.raises(WithheldRead):
            read()
    assert stand_in.is_read


def test_contents_differ_with_any_bit_type_or_place() -> None:
    one = torch.tensor([1.0, 2.0])
    values = [
        None, True, 1, 1.0, "1", b"1", [1], (1,), {"a": 1}, {"a": 1, "b": None}, [[1], [2]], [[1, 2]], one, one.half(),
        one.view(1, 2), -one, np.array([1.0, 2.0]), np.array([1, 2]), Image.new("L", (1, 2)), Image.new("RGB", (1, 2)),
        [Image.new("L", (1, 2)), Image.new("L", (1, 2), 1)], [Image.new("L", (1, 2), 1), Image.new("L", (1, 2))],
    ]  # fmt: skip
    assert len({content(value) for value in values}) == len(values)
    with pytest.raises(Fallback, match="no exact form"):
        content(one.to_sparse())


# A dataset whose results are all kept


def double(value: float) -> Encoder:
    return Encoder(lambda number: {"out": torch.tensor([2 * value])})


def encode_share(cache: CallCache, index: int, number: int, of: int = 5) -> None:
    for sample in range(index, of, number):
        ask(cache, double(sample), number=float(sample))
    cache.note_complete("dataset", index, number)


def asked_by(folder: Path, number: int, dataset: str = "dataset") -> list[bool]:
    """Whether each of so many processes finds its part."""
    found = []
    for index in range(number):
        cache = CallCache(folder)
        found.append(cache.is_complete(dataset, index, number))
        cache.close()
    return found


def written_by(folder: Path, number: int) -> list[Path]:
    """The files of so many processes that have encoded all samples: entries and notes."""
    for index in range(number):
        cache = CallCache(folder)
        encode_share(cache, index, number)
        cache.close()
    return sorted(folder.glob("*.safetensors"))


def test_part_of_a_dataset_is_not_all_of_it(tmp_path: Path) -> None:
    cache = CallCache(tmp_path / "cache")
    encode_share(cache, 0, 2)
    cache.close()
    assert asked_by(tmp_path / "cache", 2) == [True, False]
    assert asked_by(tmp_path / "cache", 1) == [False]
    written_by(tmp_path / "cache", 2)
    for number in (1, 2, 3):  # of three, one has no part
        assert asked_by(tmp_path / "cache", number) == [True] * number
    assert asked_by(tmp_path / "cache", 2, "another dataset") == [False, False]


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_every_entry_counts_for_the_note_of_its_dataset(how: str, tmp_path: Path) -> None:
    for number in range(len(written_by(tmp_path / "0", 2))):
        folder = tmp_path / str(number + 1)
        entry = written_by(folder, 2)[number]
        entry.unlink() if how == "gone" else os.truncate(entry, entry.stat().st_size - 1)
        assert not all(asked_by(folder, 2))
        written_by(folder, 2)
        assert all(asked_by(folder, 2))


def test_note_tells_the_calls_that_are_not_kept(tmp_path: Path) -> None:
    draws = Encoder(lambda: {"out": torch.rand(1)})
    for first in (True, False):
        cache = CallCache(tmp_path / "cache")
        assert cache.is_complete("dataset", 0, 1) is not first
        if first:
            ask(cache, draws)
            cache.note_complete("dataset", 0, 1)
        assert cache.reasons == cache.left == {"encoder": "it draws at random"}
        cache.close()


def test_nothing_is_noted_if_a_result_could_not_be_kept(cache: CallCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    ask(cache, double(1.0), number=1.0)
    monkeypatch.undo()
    cache.note_complete("dataset", 0, 1)
    assert cache.unkept
    assert not cache.is_complete("dataset", 0, 1)
