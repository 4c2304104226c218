"""What the strict operators do with the answers of their checks, without a GPU: the layout of windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wanshim.core.decoding.model.graph import Conv
from wanshim.core.decoding.operators import strict_kernels
from wanshim.core.decoding.operators.convolution import torch_convolve
from wanshim.core.decoding.operators.strict_checks import Checks
from wanshim.core.decoding.operators.strict_cuda import StrictCudaOperators

VIDEO = Conv(name="of videos", module=nn.Conv3d(3, 8, 3).to(memory_format=torch.channels_last_3d))
PICTURES = Conv(name="of pictures", module=nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last))
X = torch.randn(1, 3, 2, 4, 6, generator=torch.Generator().manual_seed(0))


@dataclass
class Answer:
    """A comparison that has ended (`is_known`), and what convolves channels last, if that was equal."""

    is_known: bool = True
    relaid: Any = None
    padded: bool = False
    biased: bool = False

    def known(self) -> bool:
        return self.is_known


def shape_read(conv: Conv) -> tuple[int, ...]:
    return (1, 3, 4, 4, 6) if conv is VIDEO else (2, 3, 4, 6)


def answered(conv: Conv, answer: Answer) -> Checks:
    checks = Checks()
    checks._trials[conv, shape_read(conv), X.dtype] = answer  # type: ignore[assignment]
    return checks


@pytest.mark.parametrize("conv", [VIDEO, PICTURES], ids=lambda conv: conv.name)
@pytest.mark.parametrize("equal", [False, True], ids=["as the framework", "channels last"])
def test_window_lies_as_its_convolution_is_known_to_read_it(conv: Conv, equal: bool) -> None:
    read: list[int] = []

    def relaid(x: torch.Tensor, *args: Any) -> torch.Tensor:
        read.append(x.stride(1))
        return torch_convolve(x, *args)

    checks = answered(conv, Answer(relaid=relaid if equal else None))
    ops = StrictCudaOperators(checks)
    window = ops.plain_window(conv, X)
    assert torch.equal(window.own(), X)
    assert (window.data.stride(1) == 1) is equal
    assert checks.channels_first() == ([] if equal else [conv.name])
    if conv.history:
        window.past().zero_()
    main, bias, skip = ops.conv(window).take()
    module = conv.module
    if conv is VIDEO:
        expected = module(F.pad(X, (1, 1, 1, 1, 2, 0)))
    else:
        expected = torch.stack([F.conv2d(x, module.weight, module.bias, padding=1) for x in X.unbind(2)], 2)
    assert bias is module.bias
    assert skip is None
    assert read == ([1] if equal else [])
    torch.testing.assert_close(main + bias.view(1, -1, 1, 1, 1), expected)


@pytest.mark.parametrize(
    "answer", [None, Answer(is_known=False, relaid=torch_convolve)], ids=["not compared", "not answered yet"]
)
def test_window_lies_as_the_framework_has_it_until_the_answer_is_there(answer: Answer | None) -> None:
    checks = Checks() if answer is None else answered(VIDEO, answer)
    assert StrictCudaOperators(checks).plain_window(VIDEO, X).data.is_contiguous()
    assert checks.channels_first() == (None if answer is None else [VIDEO.name])


def test_window_of_a_convolution_that_needs_its_bias_inside_lies_as_the_framework_has_it() -> None:
    checks = answered(VIDEO, Answer(relaid=torch_convolve))
    checks._biased.add(VIDEO)
    assert StrictCudaOperators(checks).plain_window(VIDEO, X).data.is_contiguous()
    assert checks.channels_first() == [VIDEO.name]


def test_window_laid_out_before_its_convolution_was_found_to_need_the_bias_is_convolved_as_the_framework_does() -> None:
    checks = answered(VIDEO, Answer(relaid=torch_convolve))
    ops = StrictCudaOperators(checks)
    window = ops.plain_window(VIDEO, X)
    window.past().zero_()
    checks._biased.add(VIDEO)
    main, bias, _ = ops.conv(window).take()
    assert bias is None
    assert torch.equal(main, VIDEO.module(F.pad(X, (1, 1, 1, 1, 2, 0))))


def test_prediction_knows_by_name_which_convolutions_stay_channels_first() -> None:
    checks = answered(VIDEO, Answer(relaid=torch_convolve))
    checks._trials[PICTURES, shape_read(PICTURES), X.dtype] = Answer()  # type: ignore[assignment]
    assert checks.channels_first() == [PICTURES.name]


def test_shortcut_is_computed_channels_last_where_that_is_known_to_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    shortcut = Conv(name="shortcut", module=nn.Conv3d(3, 8, 1).to(memory_format=torch.channels_last_3d))
    given = X.contiguous(memory_format=torch.channels_last_3d)
    read: list[torch.Tensor] = []

    def relaid(x: torch.Tensor, *args: Any) -> torch.Tensor:
        read.append(x)
        return torch_convolve(x, *args)

    def sum_into(main: torch.Tensor, bias: torch.Tensor, skip: None, out: torch.Tensor) -> None:
        out.copy_(main + bias.view(1, -1, 1, 1, 1))

    monkeypatch.setattr(strict_kernels, "sum_into", sum_into)
    checks = Checks()
    checks._trials[shortcut, tuple(X.shape), X.dtype] = Answer(relaid=relaid)  # type: ignore[assignment]
    torch.testing.assert_close(StrictCudaOperators(checks).pointwise(shortcut, given), shortcut.module(X))
    assert [x.data_ptr() for x in read] == [given.data_ptr()]
