"""The plan of a training job, its reasons, and what was rejected: the answer of `decide`, which prints itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from wanshim.core.strategy.candidates import StepSettings
from wanshim.core.strategy.predict import DevicePeak, KeptOn
from wanshim.values import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A strategy that was not taken.

    Args:
        gain: over one GPU's samples a second; None: it cannot run.
        reason: why it cannot run, or why it was not taken although it could.
    """

    strategy: Strategy
    gain: float | None
    reason: str

    def __str__(self) -> str:
        gain = f"at most {self.gain:.2f}x" if self.gain is not None else ""
        return f"{self.strategy.value.capitalize()}: {'; '.join(filter(None, (gain, self.reason)))}."


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The plan of a training job. `apply` carries it out; nothing has changed before.

    Args:
        strategy: how the devices are used.
        devices: of this process, one a stage.
        split_points: the first block of each stage after the first.
        step: how steps are run; None: as the framework runs them.
        side_models: those that leave the first device, and where each goes: a device, or `side_models.HOST`.
        streamed_blocks: how many blocks wait in host memory.
        block_changes: by name, a statement of each thing that the blocks compute otherwise.
        ranks: of a sequence group; 1: a sample is not sharded.
        saves_state: the run saves its state, and goes on from one.
        peaks: predicted bytes of each device; empty where nothing can be predicted.
        reason: why this strategy, with what was measured; empty where strategies were not compared.
        alternatives: the strategies that were not taken.
        notes: what was found on the way, one statement a line.
        outcome: what the user gets, in one statement.
    """

    strategy: Strategy
    devices: tuple[str, ...]
    split_points: tuple[int, ...] = ()
    step: StepSettings | None
    side_models: Mapping[str, str] = field(default_factory=dict)
    streamed_blocks: int = 0
    block_changes: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    saves_state: bool = False
    peaks: tuple[DevicePeak, ...] = ()
    reason: str = ""
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    outcome: str = ""

    def rejection_of(self, strategy: Strategy) -> str:
        """Why a strategy cannot run here, or nothing."""
        return next((one.reason for one in self.alternatives if one.strategy is strategy), "")

    @property
    def shared(self) -> dict[str, Any]:
        """The part of the plan in which all ranks of a job must agree, as JSON; devices by their place among this
        rank's."""
        step = asdict(self.step) if self.step is not None else None
        if step is not None:
            step |= {"keep": step["keep"] and step["keep"].value, "num_kept_blocks": list(step["num_kept_blocks"])}
        places = {device: number for number, device in enumerate(self.devices)}
        return {
            "strategy": self.strategy.value,
            "stages": len(self.devices),
            "split_points": list(self.split_points),
            "step": step,
            "side_models": {name: places.get(device, device) for name, device in self.side_models.items()},
            "streamed_blocks": self.streamed_blocks,
            "block_changes": dict(self.block_changes),
            "ranks": self.ranks,
            "saves_state": self.saves_state,
        }

    @property
    def changes_nothing(self) -> bool:
        """Whether the whole model is on the device and each step runs as the framework runs it."""
        step = self.step
        is_own = step is None or not (step.chunk or step.offload or step.keep or any(step.num_kept_blocks))
        moved = self.side_models or self.block_changes or self.saves_state
        return self.strategy is Strategy.RESIDENT and is_own and not moved

    @property
    def why_offloaded(self) -> str:
        """Why checkpoints wait in host memory; empty where they do not, or where the user asked for it."""
        if self.step is None or not self.step.offload or self.step.offload_asked:
            return ""
        if not self.step.offload_for_attention:
            return "the step would not fit without"
        place = "beside them" if self.step.keep is KeptOn.HOST else "on the device in their place"
        return f"the plan keeps attention {place}"

    @property
    def kept_attention(self) -> str:
        """Names of what backward does not compute again, and where it waits; empty where it computes all again."""
        if self.step is None or self.step.keep is None:
            return ""
        return f"self-attention is kept {self.step.keep.value} and not computed again in backward, bit for bit the same"

    @property
    def kept_blocks_text(self) -> str:
        """Which blocks backward does not compute again; empty where it does all."""
        counts = self.step.num_kept_blocks if self.step is not None else ()
        if not any(counts):
            return ""
        last = ", ".join(map(str, counts)) + (" blocks of the stages" if len(counts) > 1 else " blocks")
        return f"the last {last} are not computed again in backward, bit for bit the same"

    @property
    def choice(self) -> str:
        """The strategy, why it was taken, and what became of each other one; empty where none were compared."""
        if not self.reason:
            return ""
        return " ".join([f"plan: {self.strategy.value}.", self.reason, *map(str, self.alternatives)])

    def __str__(self) -> str:
        head = f"{self.strategy.value} on {', '.join(self.devices)}"
        changes = self.block_changes.values()
        saved = "its state is saved" if self.saves_state else ""
        parts = (
            head,
            *self.notes,
            *changes,
            self.kept_attention,
            self.kept_blocks_text,
            saved,
            self.choice,
            self.outcome,
        )
        return "\n  ".join(filter(None, parts))
