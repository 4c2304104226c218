"""`WANSHIM_PLAN=sequence` under the unmodified `launch_training_task`: the run of as many processes as groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.diffsynth.ddp_jobs import forked, launch, on_machines
from tests.contract.diffsynth.ddp_worker import Job

EXACT = 1e-5  # of a gradient's norm, fp32
BFLOAT16 = 2e-2  # the same where tokens and weights are rounded to eight bits of mantissa
EIGHT_BITS = 0.1  # the same where rows are rounded to eight bits
TRAINED = 1e-4  # of the LoRA's norm after the last step
SHARDED = {"WANSHIM_PLAN": "sequence"}
EACH = Job("each", samples=4, accumulation=1, dtype="float32")
ACCUMULATED = Job("accumulated", samples=7, accumulation=3, dtype="float32", weight_term=True)
OWN_WEIGHTS = replace(EACH, name="own_weights", own_weights=True)
CLIP = Job("clip", samples=3, accumulation=1, clip=True)


def farthest(found: Path, expected: Path) -> float:
    """The largest distance of a tensor, by norm."""
    ours, theirs = load_file(found), load_file(expected)
    assert ours.keys() == theirs.keys()
    apart = {name: (ours[name] - theirs[name]).float().norm().item() for name in theirs}
    return max(apart[name] and apart[name] / theirs[name].float().norm().item() for name in theirs)


def sharded(*jobs: Job, plan: str = "sequence") -> list[Job]:
    return [replace(job, variables={"WANSHIM_PLAN": plan, **job.variables}) for job in jobs]


def notes(said: list[dict[str, Any]], job: Job) -> str:
    return "\n".join(said[0][job.name]["notes"])


def check_gradients(job: Job, folder: Path, reference: Path, ranks: int, within: float = EXACT) -> None:
    for rank in range(ranks):
        assert farthest(folder / f"{job.name}.gradients{rank}", reference / f"{job.name}.gradients0") < within


def check_trained(job: Job, folder: Path, reference: Path) -> None:
    assert farthest(folder / job.name / "epoch-0.safetensors", reference / job.name / "epoch-0.safetensors") < TRAINED


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where one process has left its files, and what it says of each job."""
    folder = tmp_path_factory.mktemp("one") / "alone"
    return folder, forked(folder, [EACH, ACCUMULATED, CLIP], processes=1)[0]


@pytest.mark.slow
def test_two_processes_train_each_sample_together_as_one_process_does(
    tmp_path: Path, of_one_process: tuple[Path, dict[str, Any]]
) -> None:
    """The same samples in the same order, once; every gradient, the LoRA, one file; encoders run on one rank."""
    ranks = tmp_path / "ranks"
    alone, expected = of_one_process
    said = forked(ranks, sharded(EACH, ACCUMULATED, CLIP, OWN_WEIGHTS))
    for job in (EACH, ACCUMULATED):
        assert [one[job.name]["seen"] for one in said] == 2 * [expected[job.name]["seen"]]
        assert [one[job.name]["written"] for one in said] == [["epoch-0.safetensors.partial"], []]
        assert "sequence parallel over 2 ranks" in notes(said, job)
        check_gradients(job, ranks, alone, 2)
        check_trained(job, ranks, alone)
    trained = "epoch-0.safetensors"
    assert farthest(ranks / OWN_WEIGHTS.name / trained, alone / EACH.name / trained) < TRAINED
    check_gradients(CLIP, ranks, alone, 2, BFLOAT16)
    assert expected["clip"]["calls"]["vae"] == 3
    assert said[0]["clip"]["calls"] == expected["clip"]["calls"]
    assert said[1]["clip"]["calls"] == {"text_encoder": 0, "vae": 0}
    assert said[0]["clip"]["draw"] == said[1]["clip"]["draw"] == expected["clip"]["draw"]


@pytest.mark.sweep
@pytest.mark.slow
def test_processes_of_a_group_share_the_encode_of_its_clip(
    tmp_path: Path, of_one_process: tuple[Path, dict[str, Any]]
) -> None:
    """With `diffsynth.vae_encode` both run the VAE, on a share each, and see the latents that one process sees."""
    job = replace(CLIP, name="shared", variables={"WANSHIM_VAE_ENCODE": "temporal"})
    alone, expected = of_one_process
    said = forked(tmp_path / "ranks", sharded(job), MORE_FEATURES="diffsynth.vae_encode")
    for rank in range(2):
        found = tmp_path / "ranks" / f"shared.gradients{rank}"
        assert farthest(found, alone / "clip.gradients0") < BFLOAT16
    assert [one["shared"]["calls"]["vae"] for one in said] == 2 * [expected["clip"]["calls"]["vae"]]
    assert [one["shared"]["calls"]["text_encoder"] for one in said] == [3, 0]
    assert [one["shared"]["encodes"] for one in said] == 2 * [["temporal on 2 ranks, strict, compared"]]
    assert said[0]["shared"]["draw"] == said[1]["shared"]["draw"] == expected["clip"]["draw"]


@pytest.mark.slow
def test_two_groups_of_two_train_as_two_processes_do(tmp_path: Path) -> None:
    """Seven samples over two groups with accumulation 3: the last one of a group comes twice, as in data parallel."""
    pairs, groups = tmp_path / "pairs", tmp_path / "groups"
    expected = forked(pairs, [ACCUMULATED])
    said = forked(groups, sharded(ACCUMULATED, plan="sequence:2"), processes=4)
    seen = [one[ACCUMULATED.name]["seen"] for one in said]
    assert seen == [expected[rank // 2][ACCUMULATED.name]["seen"] for rank in range(4)]
    check_gradients(ACCUMULATED, groups, pairs, 4)
    check_trained(ACCUMULATED, groups, pairs)
    assert "2 groups, each as one process of data parallel" in notes(said, ACCUMULATED)


@pytest.mark.slow
def test_streamed_weights_and_offloaded_checkpoints_leave_the_gradients_alone(tmp_path: Path) -> None:
    """Both move bytes: the sharded step has the same bits with them and without."""
    plain, offloaded = replace(EACH, name="plain"), replace(EACH, name="offloaded", variables={"WANSHIM_OFFLOAD": "on"})
    streamed = replace(EACH, name="streamed", streamed=3)
    said = forked(tmp_path / "ranks", sharded(plain, offloaded, streamed))
    for rank in (0, 1):
        expected = (tmp_path / "ranks" / f"plain.gradients{rank}").read_bytes()
        for job in (offloaded, streamed):
            assert (tmp_path / "ranks" / f"{job.name}.gradients{rank}").read_bytes() == expected, job.name
    assert "checkpoints are offloaded to host memory" in notes(said, offloaded)
    assert "streaming 3 of 4 blocks" in notes(said, streamed)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("compute", [None, "int8"])
def test_compiled_blocks_exchange_their_tokens_between_graphs(tmp_path: Path, compute: str | None) -> None:
    """The gradients of one process that compiles whole blocks, in fp32. In eight bits, a number halfway between two may
    fall to either side."""
    variables = {"WANSHIM_COMPILE": "1", **({"WANSHIM_COMPUTE": compute} if compute else {})}
    job = replace(EACH, name="compiled", samples=2, variables=variables, inductor=bool(compute))
    forked(tmp_path / "alone", [job], processes=1)
    said = forked(tmp_path / "ranks", sharded(job))
    check_gradients(job, tmp_path / "ranks", tmp_path / "alone", 2, EIGHT_BITS if compute else EXACT)
    assert "runs between four graphs of a block" in notes(said, job)
    assert "graphs compiled: 4, in " in notes(said, job)
    assert (f"Linears multiply in {compute}" in notes(said, job)) == bool(compute)


@pytest.mark.parametrize("base", ["int8", pytest.param("float8", marks=pytest.mark.sweep)])
@pytest.mark.slow
def test_base_in_eight_bits_gives_the_gradients_of_one_process_with_that_base(tmp_path: Path, base: str) -> None:
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    plain = replace(EACH, name="base", samples=2, base=base)
    forked(alone, [plain], processes=1)
    said = forked(ranks, sharded(replace(plain, variables={"WANSHIM_BASE": base})))
    check_gradients(plain, ranks, alone, 2)
    assert f"frozen Linear weights are stored as {base}" in notes(said, plain)


@pytest.mark.slow
@pytest.mark.sweep
def test_two_machines_of_two_processes_have_a_group_each(tmp_path: Path) -> None:
    """Two agents of torchrun on this machine: a group never spans machines unless it is asked to."""
    pairs, machines = tmp_path / "pairs", tmp_path / "machines"
    forked(pairs, [ACCUMULATED])
    said = on_machines(machines, sharded(ACCUMULATED), 2, 2)
    assert len(said) == 4
    assert "sequence parallel over 2 ranks" in notes(said, ACCUMULATED)
    assert "2 groups, each as one process of data parallel" in notes(said, ACCUMULATED)
    check_gradients(ACCUMULATED, machines, pairs, 4)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("memory", "rank 1: OutOfMemoryError: no room on this rank"),
        ("noise", "different x"),
        ("nan", "  rank 1: nan"),
        ("drift", "The ranks have drifted apart, in 1 of "),
        ("loss", "The ranks computed different losses:"),
        ("killed", "Signal 9 (SIGKILL)"),
    ],
)
def test_fault_of_one_rank_ends_all_with_its_cause_and_no_file(tmp_path: Path, fault: str, cause: str) -> None:
    with pytest.raises(AssertionError) as caught:
        launch(tmp_path / "ranks", sharded(replace(EACH, fault=fault)))
    assert cause in str(caught.value)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_is_trained_is_compared_before_steps_that_are_powers_of_two_of_its_own_optimizer_alone() -> None:
    from wanshim.adapters.diffsynth.splitting.sequence import Trained

    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    own = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), betas=(0.25, 0.75))
    compared, handle = list[Any](), SimpleNamespace()
    handle.compare_trained = compared.append
    trained: Any = Trained(handle, model)  # type: ignore[arg-type]
    after = []
    for _ in range(9):
        trained.before_step(torch.optim.SGD(other.parameters()), (), {})
        trained.before_step(own, (), {})
        after.append(len(compared))
    assert after == [1, 2, 2, 3, 3, 3, 3, 4, 4]
    numbers = compared[0]
    assert (numbers["lr of parameter group 0"], numbers["betas of parameter group 0"]) == ("0.5", "(0.25, 0.75)")
    assert not any(name.startswith("params") for name in numbers)
