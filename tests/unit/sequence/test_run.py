"""What one rank does with tensors and gradients, beside a rank that has the same."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from wanshim.core.sequence.gradients import GradientAverage, refuse_hooks
from wanshim.core.sequence.inputs import InputCheck
from wanshim.core.sequence.plan import SequencePlan
from wanshim.core.sequence.run import ShardedModel
from wanshim.errors import ModelInvalid, RankDisagreement

PLAN = SequencePlan(ranks=(4, 7), blocks=1, heads=(1, 1), tokens=(3, 2))


class Watch:
    """Nothing stops this group."""

    failed = False

    def __init__(self) -> None:
        self.steps, self.checked, self.failures = list[str](), 0, list[tuple[str, str]]()

    def at(self, step: str) -> None:
        self.steps.append(step)

    def called(self, number: int, inputs: str) -> None: ...

    def check(self) -> None:
        self.checked += 1

    def fail(self, kind: str, text: str) -> None:
        self.failures.append((kind, text))


class Pair:
    """The second of ranks 4 and 7, where the first has the same: sums double, what is received is `other`'s."""

    def __init__(self, other: float = 9) -> None:
        self.rank, self.size, self.ranks, self.watch = 1, 2, (4, 7), Watch()
        self.other = other
        self.sums: list[torch.dtype] = []
        self.in_flight = self.most_in_flight = 0

    def start_gather(self, mine: torch.Tensor, counts: Any, out: torch.Tensor) -> Any:
        self.gather(mine, counts, out)
        return self._pending(lambda: None)

    def sum(self, tensor: torch.Tensor) -> Any:
        assert tensor.is_contiguous()
        self.sums.append(tensor.dtype)
        return self._pending(lambda: tensor.mul_(2))

    def gather(self, mine: torch.Tensor, counts: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        out = mine.new_empty((sum(counts), *mine.shape[1:])) if out is None else out
        out[: counts[0]], out[counts[0] :] = self.other, mine
        return out

    def close(self) -> None: ...

    def check_open(self) -> None: ...

    def _pending(self, arrive: Any) -> Any:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

        def wait() -> None:
            self.in_flight -= 1
            arrive()

        return SimpleNamespace(wait=wait)


def run_of(pair: Any, **options: Any) -> ShardedModel:
    return ShardedModel(pair, PLAN, **{"sum_gradients": True, "check_finite": False, **options})


def test_shared_tensor_that_changed_in_place_is_taken_anew() -> None:
    run, leaf = run_of(Pair()), torch.ones(2, requires_grad=True)
    x = leaf * 1
    first = run.shared(x)
    assert run.shared(x) is first
    x.mul_(5)
    run.shared(x).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [5.0, 5.0]  # the average of both ranks


def test_gradient_that_others_use_too_is_not_summed_in_place() -> None:
    run, x, gradient = run_of(Pair()), torch.ones(2, requires_grad=True), torch.ones(2)
    run.shared(x).backward(gradient)
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]
    assert gradient.tolist() == [1.0, 1.0]


def test_gradient_in_bf16_is_summed_in_fp32() -> None:
    pair, x = Pair(), torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    run_of(pair).shared(x).sum().backward()
    assert pair.sums == [torch.float32]
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_nothing_of_a_call_is_kept_behind_its_last_block() -> None:
    run = run_of(Pair())
    x = torch.ones(1, 5, 2, requires_grad=True) * 1
    local = run.local(x, 1, PLAN)
    kept = weakref.ref(x)
    run.gathered(local, PLAN)
    del x, local
    assert kept() is None


def test_tensors_without_a_gradient_are_passed_on_as_they_are() -> None:
    run, x = run_of(Pair()), torch.arange(10.0).view(1, 5, 2)
    assert run.shared(x) is x
    assert torch.equal(run.local(x, 1, PLAN), x[:, 3:])


def test_gradient_of_the_last_block_holds_no_memory_of_other_tokens() -> None:
    """This rank's part counts twice, for two ranks are averaged."""
    run, x, seen = run_of(Pair()), torch.ones(1, 2, 2, requires_grad=True), []
    x.register_hook(seen.append)
    run.gathered(x, PLAN).sum().backward()
    (gradient,) = seen
    assert gradient.tolist() == torch.full((1, 2, 2), 2.0).tolist()
    assert gradient.untyped_storage().nbytes() == gradient.nbytes


@pytest.mark.parametrize("way", ["without gradients", "at the end of backward", "before weights are saved"])
def test_what_a_call_leaves_to_check_is_checked(way: str) -> None:
    run, verified = run_of(Pair()), []
    x = torch.ones(1, 2, 2, requires_grad=way != "without gradients")
    run.add_check(SimpleNamespace(verify=lambda: verified.append(True)))  # type: ignore[arg-type]
    if way == "without gradients":
        with torch.no_grad():
            run.gathered(x, PLAN)
    else:
        whole = run.gathered(x, PLAN)
        assert not verified
        run.check() if way == "before weights are saved" else whole.sum().backward()
    assert verified == [True]
    assert run.group.watch.checked == 1
    run.check()
    assert verified == [True]  # once


def test_rank_that_calls_without_gradients_or_with_frozen_inputs_is_found() -> None:
    """The texts that ranks compare before their first exchange name what decides whether gradients will travel."""
    run, texts = run_of(Pair(), check_finite=True), []
    run.group.watch.called = lambda number, text: texts.append((number, text))  # type: ignore[method-assign]
    run._arriving = SimpleNamespace(append=lambda check: None)  # type: ignore[assignment]
    run.arrive = lambda: run._checks.append(SimpleNamespace(verify=lambda: None))  # type: ignore
    x, context = torch.ones(1, 5, 2, requires_grad=True), torch.ones(1, 6, dtype=torch.bfloat16)
    run.enter({"x": x, "context": context}, PLAN)
    with torch.no_grad():
        run.enter({"x": x, "context": context}, PLAN)
    expected = "x float32 [1, 5, 2] with a gradient, context bfloat16 [1, 6]"
    assert texts == [(1, expected), (2, f"{expected}, without gradients")]


def test_different_values_are_shown_beside_the_ranks_numbers() -> None:
    pair: Any = Pair(other=2**33 + 0xAB)
    check = InputCheck(pair, 3, {"x": torch.ones(2), "context": torch.zeros(2)}, "x, context")
    check._table[0, 0] = check._table[1, 0]  # described alike
    check._table[0, 2] = check._table[1, 2]  # and the same context
    check.arrive()
    with pytest.raises(RankDisagreement) as caught:
        check.verify()
    assert "with different x in call 3:\n  rank 4: x 000000ab\n  rank 7: x " in str(caught.value)
    assert [kind for kind, _ in pair.watch.failures] == ["different"]


def average_of(pair: Any, parameters: list[nn.Parameter], bucket_bytes: int) -> GradientAverage:
    made = GradientAverage(pair, lambda: None, bucket_bytes)
    made.watch(named(parameters))
    made.watch(named(parameters))  # again, as at every call
    return made


def named(parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]


def test_full_buckets_are_sent_while_backward_goes_on_and_two_are_in_flight_at_most() -> None:
    pair, parameters = Pair(), [nn.Parameter(torch.full((4,), float(i))) for i in range(9)]
    summed = average_of(pair, parameters, bucket_bytes=32)
    sum((p * i).sum() for i, p in enumerate(parameters)).backward()
    assert len(pair.sums) == 4  # of two gradients each; the ninth waits
    assert pair.in_flight == 2
    assert pair.most_in_flight == 3
    summed.finish()
    assert len(pair.sums) == 5
    assert pair.in_flight == 0
    assert [p.grad.tolist() for p in parameters] == [[1.0 * i] * 4 for i in range(9)]  # type: ignore[union-attr]


def test_gradients_of_each_dtype_have_buckets_of_their_own_and_are_summed_in_fp32_at_least() -> None:
    pair = Pair()
    parameters = [nn.Parameter(torch.ones(2, 3, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)]
    summed = average_of(pair, parameters, bucket_bytes=2**20)
    sum(p.double().sum() for p in parameters).backward()
    summed.finish()
    assert sorted(map(str, pair.sums)) == ["torch.float32", "torch.float64"]
    for p in parameters:
        assert p.grad is not None
        assert (p.grad.dtype, p.grad.tolist()) == (p.dtype, [[1.0] * 3] * 2)


def test_autograd_grad_is_refused_and_leaves_earlier_gradients_as_they_were() -> None:
    pair, parameter = Pair(), nn.Parameter(torch.ones(2))
    summed = average_of(pair, [parameter], bucket_bytes=2**20)
    parameter.grad = earlier = torch.full((2,), 7.0)
    torch.autograd.grad((parameter * 3).sum(), parameter)
    with pytest.raises(ModelInvalid, match=r"torch\.autograd\.grad computed this rank's part of 1 gradients"):
        summed.finish()
    assert parameter.grad is earlier


def test_hooks_of_a_user_run_once_in_their_order_on_the_whole_gradient_and_as_before_after_remove() -> None:
    pair, parameter, seen = Pair(), nn.Parameter(torch.zeros(2)), list[Any]()
    parameter.register_hook(lambda gradient: seen.append(("gradient", gradient.tolist())))
    parameter.register_hook(lambda gradient: gradient.clamp(max=2.5))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(("added", p.grad.tolist())))  # type: ignore[union-attr]
    summed = average_of(pair, [parameter], bucket_bytes=2**20)
    later = parameter.register_hook(lambda gradient: seen.append(("later", gradient.tolist())))
    summed.watch(named([parameter]))  # the next call
    for scale in (3.0, 2.0):
        seen.clear()
        (parameter * scale).sum().backward()
        assert seen == []
        summed.finish()
        later.remove()
    assert seen == [("gradient", [2.0, 2.0]), ("added", [4.5, 4.5])]
    summed.remove()
    seen.clear()
    (parameter * 3).sum().backward()
    assert seen == [("gradient", [3.0, 3.0]), ("added", [7.0, 7.0])]


def test_hook_behind_the_forward_is_refused_by_name_before_it_sees_a_part() -> None:
    parameter, seen = nn.Parameter(torch.zeros(2)), list[Any]()
    average_of(Pair(), [parameter], bucket_bytes=2**20)
    parameter.register_post_accumulate_grad_hook(seen.append)
    with pytest.raises(ModelInvalid, match=r"a hook on p0 that would see this rank's part of its gradient\. Expected"):
        parameter.sum().backward()
    assert (seen, parameter.grad) == ([], None)


def test_hook_on_a_trained_parameter_is_refused_by_name_where_ddp_averages() -> None:
    model = nn.Linear(2, 2)
    refuse_hooks(model.named_parameters())
    model.weight.requires_grad_(False)
    hook = model.bias.register_hook(lambda gradient: None)
    with pytest.raises(ModelInvalid, match="a hook on bias that would see"):
        refuse_hooks(model.named_parameters())
    hook.remove()
    refuse_hooks(model.named_parameters())


class Cut(torch.autograd.Function):
    """Hands no gradient back, as a kernel without a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("earlier", [None, torch.full((2,), 7.0)])
def test_parameter_that_gets_no_gradient_keeps_what_it_had_and_the_others_are_averaged(
    earlier: torch.Tensor | None,
) -> None:
    pair, (cut, other) = Pair(), (nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)))
    summed = average_of(pair, [cut, other], bucket_bytes=2**20)
    cut.grad = earlier
    (Cut.apply(cut) + other * 3).sum().backward()  # type: ignore[no-untyped-call]
    summed.finish()
    assert cut.grad is earlier
    assert other.grad is not None
    assert other.grad.tolist() == [3.0, 3.0]


def test_parameter_is_left_alone_once_the_model_is_no_longer_sharded() -> None:
    pair, parameter = Pair(), nn.Parameter(torch.ones(2))
    average_of(pair, [parameter], bucket_bytes=1).remove()
    parameter.sum().backward()
    assert pair.sums == []
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 1.0]
