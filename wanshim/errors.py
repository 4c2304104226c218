"""Every error and warning wanshim raises: one tree, each message says what was found, what was expected, what to do."""

from __future__ import annotations


class WanshimError(Exception):
    """Root of all wanshim errors.

    Args:
        found: what was found, as a sentence or clause naming the culprit.
        expected: what would have been right.
        hint: the next step, a command or a setting where there is one.
    """

    left_to_framework = True  # False: the framework, if it computed the call, would hide the error or do things twice

    def __init__(self, found: str, *, expected: str | None = None, hint: str | None = None) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.hint = hint

    def __str__(self) -> str:
        parts = (self.found, self.expected and f"Expected {self.expected}", self.hint)
        sentences = [sentence(part) for part in parts if part]
        return "".join(part if part.endswith("\n") else f"{part} " for part in sentences).rstrip()


def sentence(text: str) -> str:
    """With a full stop at its end, unless it ends otherwise, as with the ellipsis of a command, or a table."""
    return text if text.endswith(("?", "...", "\n")) else text.rstrip(".") + "."


class WanshimWarning(UserWarning):
    """Something the user asked for was not done, or was done another way."""


class SettingInvalid(WanshimError, ValueError):
    """A WANSHIM_* variable, or the argument that stands for it, has a value wanshim cannot read."""

    left_to_framework = False


class DeadlineInvalid(SettingInvalid):
    """A deadline, timeout or interval is not a number of seconds that can be waited."""


class FeatureUnknown(WanshimError, ValueError):
    """A token of WANSHIM_FEATURES names no feature, framework or ability."""


class MatrixInvalid(WanshimError, ValueError):
    """compat_matrix.yaml cannot be read; the message lists every fault with its path."""


class FeatureUnavailable(WanshimError):
    """A feature the user named is unavailable here."""


class ProbeMismatch(FeatureUnavailable):
    """The code at a seam is not the code the matrix knows."""


class SeamConflict(WanshimError):
    """Two patches claim one place, or a seam's kind does not fit the place."""


class UsedAfterFork(WanshimError, RuntimeError):
    """A forked child uses a process group, threads or streams that belong to its parent."""


class PlacementInvalid(WanshimError, ValueError):
    """A model split was asked for that cannot be made."""


class PlanFailed(WanshimError, RuntimeError):
    """The ranks of a training job have no plan in common, or one of them could not make one."""


class TrainingInvalid(WanshimError, ValueError):
    """A training run is described by numbers that cannot be."""


class ResumeInvalid(WanshimError, ValueError):
    """A run cannot go on from its state: the state is damaged, or of another run."""


class ProgressLogUnsafe(WanshimError, PermissionError):
    """The place of a progress log is a link, or somebody else's."""


class MonitorInvalid(WanshimError, ValueError):
    """The monitor was asked for something it cannot show or must not serve."""


class LogUnreadable(MonitorInvalid):
    """A log went away, or was replaced, while it was read."""


class EncodingInvalid(WanshimError, ValueError):
    """A prompt encoding was asked for that cannot be named or placed."""


class EncodingFailed(WanshimError, RuntimeError):
    """The rank that encoded for the others failed; every waiting rank raises this with that rank's error."""


class EncodingTimeout(EncodingFailed, TimeoutError):
    """The embeddings did not appear before the deadline."""


class CollectiveRefused(WanshimError, RuntimeError):
    """Code that only one rank runs called a collective; the other ranks would never have joined it."""


class CacheUnsafe(WanshimError, PermissionError):
    """The cache directory could be written by somebody else."""


class RankDisagreement(WanshimError, RuntimeError):
    """The ranks of a job do not carry the same patch set."""

    left_to_framework = False


class RankAbsent(WanshimError, TimeoutError):
    """A rank did not make a call that all ranks of its group make together, or made it too late."""


class VaeInvalid(WanshimError, ValueError):
    """A decode or encode was asked for that cannot be made: a VAE, a shape, a mode or an option that does not fit."""


class VaeFailed(WanshimError, RuntimeError):
    """A decode or encode that had begun on several ranks did not end; the message says what happened to each rank."""


class VaeDisagreement(VaeFailed):
    """The ranks of a group came to one decode or encode with different inputs; every rank raises the same table.

    `differing` names what differs: shape, dtype, mode, latent, video, ...
    """

    left_to_framework = False
    differing: tuple[str, ...] = ()


class VaeRankAbsent(VaeFailed, RankAbsent):
    """A rank of the group did not call decode, or encode, before another one's deadline."""


class PipelineInvalid(WanshimError):
    """A forward does not go through the stages as pipelined micro-batches must."""


class HostMemoryInvalid(WanshimError, MemoryError):
    """Host memory for the GPUs to read was not available."""


class OffloadInvalid(WanshimError, RuntimeError):
    """A checkpoint's inputs on the host are not what they were when they were saved."""


class CompileFailed(WanshimError, RuntimeError):
    """A block does not compile as one graph."""


class RecomputeInvalid(WanshimError, RuntimeError):
    """A block is not computed again as it was computed in forward."""


class StreamingInvalid(WanshimError, RuntimeError):
    """A model's weights are streamed and it was used in a way that would read others' weights."""


class SequenceInvalid(WanshimError, ValueError):
    """A model cannot be sharded over its sequence as asked, or was called in a way that does not fit the shards."""


class SequenceFailed(WanshimError, RuntimeError):
    """A sequence-parallel step stopped on every rank of its group; the message names the rank and its error."""


class SequenceDisagreement(SequenceFailed):
    """The ranks of a sequence group hold different models or were called with different inputs."""


class WorkersInvalid(WanshimError, ValueError):
    """A module or an argument cannot be copied to a worker."""


class WorkersFailed(WanshimError, RuntimeError):
    """A worker failed, is gone or gives no sign of life; the message names its GPU and its error."""


class GenerationInvalid(WanshimError, ValueError):
    """A pipeline cannot be run over GPUs as asked."""


class GenerationFailed(WanshimError, RuntimeError):
    """A pipeline's loop does not call its models as its release is known to; no frames are returned."""


# What a user sets to do something: core code knows no variable and no flag.
HINTS = {
    "cache_directory": "name another directory with WANSHIM_CACHE_DIR",
    "checkpointing": "Pass --use_gradient_checkpointing, or run the block under torch.no_grad()",
    "chunk_off": "Train without LoRA dropout, or set WANSHIM_CHUNK=off",
    "compile_off": "Set WANSHIM_COMPILE=0",
    "compute_off": "Set WANSHIM_COMPUTE=off",
    "encode_on_cpu": "Set WANSHIM_ENCODE_ON=cpu, or free memory before the prompt is encoded",
    "encode_timeout": "Look at that process, or raise WANSHIM_ENCODE_TIMEOUT_S",
    "existing_devices": "Fix WANSHIM_DEVICES or CUDA_VISIBLE_DEVICES",
    "install_torchao": "Run `pip install 'wanshim[torchao]'`, or unset WANSHIM_BASE",
    "keep_off": "Set WANSHIM_KEEP=off",
    "locked_memory": "Check `free -g` and `ulimit -l`; in a container raise its memory limit and --ulimit memlock",
    "name_devices": "Name at least two devices in WANSHIM_DEVICES",
    "pipeline_off": "Switch the pipeline off with WANSHIM_PIPELINE=0",
    "rounded_base": "Unset WANSHIM_BASE: the values are rounded already",
    "same_environment": "Start every rank with the same environment and the same WANSHIM_* variables; "
    "`wanshim doctor` shows what a machine has",
    "shared_memory": "Raise the container's --shm-size, or stream fewer blocks",
    "split_at": "Fix WANSHIM_SPLIT_AT, or unset it to balance the stages by bytes",
    "stream_off": "Set WANSHIM_PLAN=auto, which streams blocks only if the model does not fit otherwise",
    "trained_base": "Unset WANSHIM_BASE if the base itself is trained",
    "vae_timeout": "Raise WANSHIM_VAE_TIMEOUT_S for a rank that is only late. If each rank has videos of its own, set "
    "WANSHIM_VAE_MODE=off, and WANSHIM_VAE_ENCODE=off",
}


def hint(name: str) -> str:
    """The hint of this name."""
    return HINTS[name]
