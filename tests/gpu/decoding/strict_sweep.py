"""What users may vary in a strict decode or encode on one GPU, drawn at random: equal to the framework, or it says not.

    python tests/gpu/decoding/strict_sweep.py --minutes 20 --json benchmarks/results/strict_sweep_1xH200.json

Each round draws its cases from a seed of its own, which the record names. A case that fails is shrunk.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.distributed.decoding.tiny import QWEN_IMAGE, tiny, vae_config  # noqa: E402 - the checkout's own
from wanshim.core.decoding import parallelize_decode, parallelize_encode  # noqa: E402

LAYOUTS = ("2.1", "2.2", QWEN_IMAGE)
DTYPES = ("float16", "bfloat16", "float32")
MEMORY = ("contiguous", "channels_last", "view", "expanded")
CASES_A_ROUND = 12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without an index; the CPU is there to try the script


@dataclass(frozen=True)
class Case:
    """Args: frames: of the latent; height, width: of the latent; wide: as many channels as the published model has."""

    layout: str
    verb: str
    dtype: str
    batch: int
    frames: int
    height: int
    width: int
    memory: str
    autocast: bool
    inference: bool
    engines: bool
    wide: bool


CASES = st.builds(
    Case,
    layout=st.sampled_from(LAYOUTS),
    verb=st.sampled_from(("decode", "encode")),
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 3),
    frames=st.integers(1, 9),
    height=st.integers(2, 24),
    width=st.integers(2, 24),
    memory=st.sampled_from(MEMORY),
    autocast=st.booleans(),
    inference=st.booleans(),
    engines=st.sampled_from((False,) * 7 + (True,)),  # they are searched for each size, which takes seconds
    wide=st.booleans(),
)


@cache
def vae_of(layout: str, dtype: str, wide: bool) -> Any:
    import diffusers

    config = vae_config(layout)
    if wide:
        config |= {"base_dim": 160 if layout == "2.2" else 96}
        config |= {"decoder_base_dim": 256} if layout == "2.2" else {}
    cls = diffusers.AutoencoderKLQwenImage if layout == QWEN_IMAGE else diffusers.AutoencoderKLWan
    return tiny(cls, config, getattr(torch, dtype)).to(DEVICE)


def given_of(case: Case, vae: Any) -> torch.Tensor:
    """A latent, or a video, as a user may hand it over."""
    generator = torch.Generator().manual_seed(case.frames * 1000 + case.height * 30 + case.width)
    factor = 16 if case.layout == "2.2" else 8
    shape = [case.batch, 4, case.frames, case.height, case.width]
    if case.verb == "encode":
        shape = [case.batch, 3, 4 * case.frames - 3, factor * case.height, factor * case.width]
    if case.memory == "expanded":
        shape[0] = 1
    values = torch.randn(shape, generator=generator).to(DEVICE, getattr(torch, case.dtype))
    if case.memory == "channels_last":
        return values.to(memory_format=torch.channels_last_3d)
    if case.memory == "expanded":
        return values.expand(case.batch, *shape[1:])
    if case.memory == "view":
        around = torch.empty([*shape[:3], shape[3] + 3, shape[4] + 1], device=DEVICE, dtype=values.dtype)
        around[..., 2:-1, 1:] = values
        return around[..., 2:-1, 1:]
    return values


@contextmanager
def surroundings(case: Case) -> Iterator[None]:
    autocast = torch.autocast(DEVICE, torch.bfloat16) if case.autocast else nullcontext()
    with torch.inference_mode() if case.inference else torch.no_grad(), autocast:
        yield


def outcome(case: Case) -> str:
    """`equal`; `said` if the result is not and the plan says so; `own` if the framework differs from itself.

    Raises:
        AssertionError: it differs without a word.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    vae = vae_of(case.layout, case.dtype, case.wide)
    value = given_of(case, vae)

    def call() -> torch.Tensor:
        made = vae.decode(value).sample if case.verb == "decode" else vae.encode(value).latent_dist.parameters
        assert isinstance(made, torch.Tensor)
        return made

    with surroundings(case):
        expected = call()
        if not torch.equal(call(), expected):
            return "own"
        handle = (parallelize_decode if case.verb == "decode" else parallelize_encode)(vae, engines=case.engines)
        handle.wait_for_kernels(value.shape)
        try:
            found = [call() for _ in range(2)]  # what was learned in the first call serves the second
            plan = str(handle.plan)
        finally:
            handle.remove()
    if all(torch.equal(each, expected) for each in found):
        return "equal"
    worst = max((each.float() - expected.float()).abs().max().item() for each in found)
    assert "not equal" in plan or "within" in plan, f"differs by {worst} without a word:\n{plan}"
    return "said"


def sweep(number: int, cases: int, done: Callable[[Case, str], None]) -> None:
    @seed(number)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(CASES)
    def check(case: Case) -> None:
        done(case, outcome(case))

    check()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from benchmarks import checkout

    found: Counter[str] = Counter()
    drawn: list[Case] = []
    seeds: list[int] = []
    failed = ""
    until = time.monotonic() + 60 * args.minutes

    def done(case: Case, how: str) -> None:
        found[how] += 1
        drawn.append(case)

    while time.monotonic() < until and not failed:
        seeds.append(args.seed + len(seeds))
        try:
            sweep(seeds[-1], CASES_A_ROUND, done)
        except AssertionError as error:
            failed = str(error) + "\n" + "\n".join(getattr(error, "__notes__", ()))
        print(f"seed {seeds[-1]}: {dict(found)} {failed}", flush=True)
        record = {
            "gpu": torch.cuda.get_device_name(0) if DEVICE == "cuda" else None,
            "torch": torch.__version__,
            **checkout.state(),
            "seeds": seeds,
            "cases": sum(found.values()),
            **found,
            "by": {
                name: dict(Counter(str(asdict(case)[name]) for case in drawn))
                for name in ("layout", "verb", "dtype", "batch", "memory", "autocast", "engines")
            },
            "failed": failed,
        }
        if args.json:  # after each round: a time limit may end the run
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
