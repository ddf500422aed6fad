"""The errors that this library raises.

    RolloutError
      ConfigError (also ValueError)      a setting, its value, what is accepted
      PlacementError                     requested and available resources
      LifecycleError                     command, phase, commands that are legal now
      EngineFailure                      one engine failed one operation; __cause__ is its error
      PhaseFailed                        a phase failed; carries the failure of every engine
      PhaseTimeout (also TimeoutError)   phase, budget, engines that are late
      WeightError
        WeightMismatch                   a tensor or a weight version is wrong
        WeightsUnavailable               no source has the requested weights
        RankFailure                      a rank of the trainer failed, or is silent
      LogprobMismatch                    the engines' log-probs are not the trainer's
      GenerationAborted                  carries the incomplete sample
      GenerationFailed                   requests without a reply; carries the other replies
        VersionUnavailable               no engine has the weight version that a request wants
      ActorLost                          a Ray actor died or cannot be reached

An error must survive pickling: the message is the only positional argument, and every other field
is a keyword with a default.  (An exception with two required arguments comes back
from Ray as an opaque ``UnserializableException``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class RolloutError(Exception):
    """Base of all errors that this library raises.

    Attributes:
        groups: finished samples of a ``rollout`` of a list that has failed.
    """

    groups: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Mistake:
    """One wrong setting.

    Attributes:
        setting: its dotted path, for example ``servers.policy.groups.main.num_engines``.
        value: its value; ``(hidden)`` for a secret.
        message: setting, value, and what would be accepted.
        line: line in its file, from 1, or None if it is not known.
        source: the file or the override that gave the value, or empty if it came from Python.
    """

    setting: str
    value: Any
    message: str
    line: int | None = None
    source: str = ""

    def __str__(self) -> str:
        line = "" if self.line is None else f"line {self.line}"
        where = ", ".join(filter(None, (self.source, line)))
        return f"{where}: {self.message}" if where else self.message


class ConfigError(RolloutError, ValueError):
    """One or more settings are wrong.

    Attributes:
        setting: dotted path of the first one.
        value: its value.
        mistakes: all of them, if a whole configuration was checked.
    """

    def __init__(
        self,
        message: str,
        *,
        setting: str = "",
        value: Any = None,
        mistakes: Sequence[Mistake] = (),
    ) -> None:
        super().__init__(message)
        self.setting = setting
        self.value = value
        self.mistakes = tuple(mistakes)

    @classmethod
    def of(cls, mistakes: Sequence[Mistake]) -> ConfigError:
        """One error for all of these.

        Args:
            mistakes: at least one.

        Raises:
            ValueError: there is none.
        """
        if not mistakes:
            raise ValueError("ConfigError.of needs at least one mistake")
        first, lines = mistakes[0], [str(mistake) for mistake in mistakes]
        if len(lines) > 1:
            lines.insert(0, f"{len(lines)} settings are wrong:")
        return cls("\n  ".join(lines), setting=first.setting, value=first.value, mistakes=mistakes)


class PlacementError(RolloutError):
    """The engines do not fit on the available machines.

    Attributes:
        requested: resource -> amount that the engines need.
        available: resource -> amount that the machines have.
    """

    def __init__(
        self,
        message: str,
        *,
        requested: dict[str, float] | None = None,
        available: dict[str, float] | None = None,
    ) -> None:
        super().__init__(message)
        self.requested = requested or {}
        self.available = available or {}


class LifecycleError(RolloutError):
    """A command is not legal in the current phase.

    Attributes:
        command: the refused command.
        phase: the phase of the group.
        legal: the commands that are legal in that phase.
    """

    def __init__(
        self,
        message: str,
        *,
        command: str = "",
        phase: str = "",
        legal: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.command = command
        self.phase = phase
        self.legal = tuple(legal)


class EngineFailure(RolloutError):
    """One engine failed one operation.

    Attributes:
        engine_id: the engine.
        operation: the failed operation.
        elapsed_s: seconds from the request to the failure.
    """

    def __init__(
        self,
        message: str,
        *,
        engine_id: str = "",
        operation: str = "",
        elapsed_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.engine_id = engine_id
        self.operation = operation
        self.elapsed_s = elapsed_s


class PhaseFailed(RolloutError):
    """A phase failed on so many engines that its group cannot continue.

    Attributes:
        phase: the command that failed.
        failures: one failure per failed engine.
    """

    def __init__(
        self, message: str, *, phase: str = "", failures: Sequence[EngineFailure] = ()
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.failures = tuple(failures)


class PhaseTimeout(RolloutError, TimeoutError):
    """A phase did not end within its deadline.

    Attributes:
        phase: the command that is late.
        budget_s: its deadline in seconds.
        late: engine id -> the operation that is late.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str = "",
        budget_s: float = 0.0,
        late: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.budget_s = budget_s
        self.late = late or {}


class WeightError(RolloutError):
    """Base of all errors about weights."""


class WeightMismatch(WeightError):
    """A tensor or a weight version is wrong.

    Attributes:
        tensor: name of the first tensor that differs, or empty for a version.
        engine_id: the engine that has it, or empty if the push itself is wrong.
    """

    def __init__(self, message: str, *, tensor: str = "", engine_id: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor
        self.engine_id = engine_id


class WeightsUnavailable(WeightError):
    """No source has the requested weights."""


class RankFailure(WeightError):
    """A push failed because of a rank of the trainer.

    Attributes:
        ranks: the ranks that failed or did not report in time.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class LogprobMismatch(RolloutError):
    """The engines' log-probs of their tokens are not those of the trainer's model.

    Attributes:
        engine_id, weight_version: the only ones that are off, or empty if there are several.
        gap: average absolute difference of the tokens that are off, in nats.
    """

    def __init__(
        self,
        message: str,
        *,
        engine_id: str = "",
        weight_version: str = "",
        gap: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.engine_id = engine_id
        self.weight_version = weight_version
        self.gap = gap


class GenerationAborted(RolloutError):
    """A generation ended before it was complete.

    Attributes:
        sample: the incomplete sample, which can be continued.
    """

    def __init__(self, message: str, *, sample: Any = None) -> None:
        super().__init__(message)
        self.sample = sample


class GenerationFailed(RolloutError):
    """One or more requests for a completion had no reply.

    Attributes:
        failures: index of the request in its batch -> why it had none; 0 without a batch.
        replies: one ``GenerateReply`` for each request, None for those that failed.
    """

    def __init__(
        self,
        message: str,
        *,
        failures: Mapping[int, str] | None = None,
        replies: Sequence[Any] = (),
    ) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})
        self.replies = list(replies)


class VersionUnavailable(GenerationFailed):
    """No engine has the weight version that a request wants, or has it long enough for a reply.

    Attributes:
        weight_version: the version that could be had, or None if that is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        weight_version: int | None = None,
        failures: Mapping[int, str] | None = None,
        replies: Sequence[Any] = (),
    ) -> None:
        super().__init__(message, failures=failures, replies=replies)
        self.weight_version = weight_version


class ActorLost(RolloutError):
    """A Ray actor died or cannot be reached.

    Attributes:
        actor: name of the actor.
        may_have_executed: the call may have taken effect before the actor was lost.
        is_dead: the actor has died, and all that it owned with it.  If false, it may only be
            unreachable and still execute the call.
    """

    def __init__(
        self,
        message: str,
        *,
        actor: str = "",
        may_have_executed: bool = True,
        is_dead: bool = False,
    ) -> None:
        super().__init__(message)
        self.actor = actor
        self.is_dead = is_dead
        self.may_have_executed = may_have_executed
