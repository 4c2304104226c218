"""Every error and warning wanshim raises: one tree, each message says what was found, what was expected, what to do."""

from __future__ import annotations

ADVICE: dict[str, str] = {}  # what a user can do, by `WanshimError.topic`; `wanshim.advice` fills it


class WanshimError(Exception):
    """Root of all wanshim errors, and the error of whatever nobody distinguishes.

    Args:
        found: what was found, as a sentence or clause naming the culprit.
        expected: what would have been right.
        hint: the next step, a command or a setting where there is one.
        topic: key of a further step in `ADVICE`, for core code, which knows no variable and no flag. A step that begins
            with a comma goes on with the sentence of `hint`.
    """

    left_to_framework = True  # False: the framework, if it computed the call, would hide the error or do things twice

    def __init__(
        self, found: str, *, expected: str | None = None, hint: str | None = None, topic: str | None = None
    ) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.hint = hint
        self.topic = topic

    def __str__(self) -> str:
        advice = ADVICE.get(self.topic or "", "")
        steps = (f"{self.hint}{advice}",) if advice.startswith(",") else (self.hint, advice)
        parts = (self.found, self.expected and f"Expected {self.expected}", *steps)
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


class FeatureUnavailable(WanshimError):
    """A feature the user named is unavailable here."""


class PlacementInvalid(WanshimError, ValueError):
    """A model split was asked for that cannot be made."""


class ModelInvalid(WanshimError, ValueError):
    """A model, a VAE or a pipeline does not fit what was asked of it, or a call of it does not."""


class ResumeInvalid(WanshimError, ValueError):
    """A run cannot go on from its state: the state is damaged, or of another run."""


class LogUnreadable(WanshimError, ValueError):
    """A log or its folder is missing, went away, or was replaced while it was read."""


class HostMemoryInvalid(WanshimError, MemoryError):
    """Host memory for the GPUs to read was not available."""


class RanksFailed(WanshimError, RuntimeError):
    """Ranks that work together did not end what they had begun; every rank raises what happened to each."""


class RankDisagreement(RanksFailed):
    """The ranks of a group carry different patches or models, or came to one call with different inputs; every rank
    raises the same table.

    `differing` names what differs: shape, dtype, mode, latent, video, ...
    """

    left_to_framework = False
    differing: tuple[str, ...] = ()


class RankAbsent(RanksFailed, TimeoutError):
    """A rank did not make a call that all ranks of its group make together, or made it too late."""


class WorkersInvalid(WanshimError, ValueError):
    """A module or an argument cannot be copied to a worker."""


class WorkersFailed(WanshimError, RuntimeError):
    """A worker failed, is gone or gives no sign of life; the message names its GPU and its error."""
