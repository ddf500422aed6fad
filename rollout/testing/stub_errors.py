"""The errors of the stub ``ray``, named, related and worded as Ray's own are."""

from __future__ import annotations

import traceback
from typing import Any


class RayError(Exception):
    """Super class of all."""


class RayTaskError(RayError):
    """A method raised.  What callers see is also an instance of its cause's class.

    Attributes:
        cause: what was raised, as it came through pickling.
    """

    cause: BaseException

    @staticmethod
    def of(cause: BaseException, remote_traceback: str) -> RayTaskError:
        """As Ray does it: both classes at once, with the remote traceback for a message."""

        def initialize(self: Any, cause: BaseException) -> None:
            self.cause = cause

        methods = {
            "__init__": initialize,
            "__getattr__": lambda self, name: getattr(self.cause, name),
            "__str__": lambda self: remote_traceback,
        }
        name = f"RayTaskError({type(cause).__name__})"
        try:
            error: RayTaskError = type(name, (RayTaskError, type(cause)), methods)(cause)
        except TypeError:  # a class that nothing can be derived from
            error = type(name, (RayTaskError,), methods)(cause)
        return error


class RayActorError(RayError):
    """The actor is the trouble."""


class ActorDiedError(RayActorError):
    """It is dead: now, or before the call was made."""


class ActorUnavailableError(RayActorError):
    """It cannot be reached; the call may or may not have been executed."""


class ActorAlreadyExistsError(ValueError, RayError):
    """The name is taken."""


class TaskCancelledError(RayError):
    """The call was cancelled."""


class ObjectLostError(RayError):
    """The object is gone."""


class OwnerDiedError(ObjectLostError):
    """The process that made the reference is gone, and the object with it."""


class GetTimeoutError(RayError, TimeoutError):
    """``ray.get`` gave up."""


class TaskUnschedulableError(RayError):
    """There is no node that it may run on."""


class OutOfMemoryError(RayError):
    """The memory monitor killed the worker; not an actor error."""


class UnserializableException(RayError):
    """The method raised what cannot be unpickled: two required arguments, for one."""

    def __init__(self, original: str) -> None:
        super().__init__(f"Failed to deserialize exception.\nOriginal exception:\n{original}")


def formatted(error: BaseException) -> str:
    """The traceback of ``error`` as text."""
    return "".join(traceback.format_exception(error))
