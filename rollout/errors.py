"""What can go wrong, as a tree.

    RolloutError
      ConfigError (also ValueError)      a setting, its value, what would be accepted
      PlacementError                     asked for, available, where
      LifecycleError                     command, phase, what is legal now
      EngineFailure                      one engine failed one operation; its own error is __cause__
      PhaseFailed                        a phase failed on several engines; carries every failure
      PhaseTimeout (also TimeoutError)   phase, budget, who is late and with how many requests
      WeightError
        WeightMismatch                   a tensor or version is not what it has to be
        WeightsUnavailable               nothing can provide the weights that are asked for
      GenerationAborted                  carries the sample as far as it came
      ActorLost                          which Ray actor died or cannot be reached

An error must survive a process boundary: the message is the only positional argument and every
other field is a keyword with a default.  (An exception with two required arguments comes back
from Ray as an opaque ``UnserializableException``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RolloutError(Exception):
    """Base of everything this library raises on purpose."""


class ConfigError(RolloutError, ValueError):
    """A setting is wrong.

    Attributes:
        setting: its dotted path, for example ``servers.policy.groups.0.num_engines``.
        value: what was given.
    """

    def __init__(self, message: str, *, setting: str = "", value: Any = None) -> None:
        super().__init__(message)
        self.setting = setting
        self.value = value


class PlacementError(RolloutError):
    """The engines do not fit on the machines there are.

    Attributes:
        requested: what was asked for, resource -> amount.
        available: what there is, resource -> amount.
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
    """A command that is not legal in the present phase.

    Attributes:
        command: what was asked.
        phase: where the group is.
        legal: the commands that are legal there.
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
        engine_id: which engine.
        operation: what it was doing.
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
    """A phase failed on so many engines that it cannot go on.

    Attributes:
        phase: the command that failed.
        failures: one per failed engine.
    """

    def __init__(
        self, message: str, *, phase: str = "", failures: Sequence[EngineFailure] = ()
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.failures = tuple(failures)


class PhaseTimeout(RolloutError, TimeoutError):
    """A phase did not end within its budget.

    Attributes:
        phase: the command that is late.
        budget_s: seconds it was given.
        late: engine id -> what it is late with.
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
    """Something is wrong with weights."""


class WeightMismatch(WeightError):
    """A tensor or a weight version is not what it has to be.

    Attributes:
        tensor: name of the first tensor that differs; empty for a version.
        engine_id: the engine that differs; empty when the push itself is wrong.
    """

    def __init__(self, message: str, *, tensor: str = "", engine_id: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor
        self.engine_id = engine_id


class WeightsUnavailable(WeightError):
    """No source can provide the weights that are asked for."""


class GenerationAborted(RolloutError):
    """A generation ended before it was complete.

    Attributes:
        sample: the sample as far as it came, so that it can be continued.
    """

    def __init__(self, message: str, *, sample: Any = None) -> None:
        super().__init__(message)
        self.sample = sample


class ActorLost(RolloutError):
    """A Ray actor died or cannot be reached.

    Attributes:
        actor: its name.
        may_have_executed: the call may have taken effect before the actor was lost.
        is_dead: it has died for certain, and with it what it owned; else it may only be out of
            reach, and still do what it was told.
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
