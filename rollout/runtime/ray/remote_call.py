"""One call of an actor method, without Ray's wrappers around its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, Generic, TypeVar

import ray
from engines.http.trace_context import current_traceparent, in_trace
from engines.protocol.plain_text import first_line
from ray.exceptions import (
    ActorDiedError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    UnserializableException,
)

from rollout.core.errors import ActorLost, RolloutError

T = TypeVar("T")

_CALL_AGAIN = "it cannot be reached now, or starts again; call again: nothing is done twice"


class TracedActor:
    """An actor whose calls can belong to the trace of a caller in another process."""

    async def call_in_trace(self, traceparent: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """One call of a coroutine method, which works as without a trace."""
        return await in_trace(traceparent, getattr(self, method)(*args, **kwargs))


def method_in_trace(
    actor: Any, method: str, args: tuple[Any, ...], **options: Any
) -> tuple[Any, tuple[Any, ...]]:
    """A method of a ``TracedActor`` and its arguments, in the caller's trace if there is one.

    Args:
        options: those of the call, as for Ray.
    """
    if traceparent := current_traceparent():
        method, args = TracedActor.call_in_trace.__name__, (traceparent, method, *args)
    call = getattr(actor, method)
    return call.options(**options) if options else call, args


class RemoteCall(Generic[T]):
    """A submitted actor call: await it anywhere, or take its ``object_ref``.

    Ray does not stop a call whose caller gave up, so a cancelled await cancels the call too.
    """

    def __init__(self, object_ref: Any, actor: str, if_dead: str = "") -> None:
        self.object_ref = object_ref
        self.actor = actor
        self.if_dead = if_dead

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        try:
            reply: T = await self.object_ref
            return reply
        except asyncio.CancelledError:
            ray.cancel(self.object_ref)
            raise
        except RayError as error:
            raise peel(error, self.actor, self.if_dead) from None


def peel(error: BaseException, actor: str, if_dead: str = "") -> BaseException:
    """The error that the actor raised, or ``ActorLost`` if the actor is lost.

    Args:
        if_dead: the consequence, and what to do, if the actor has died.
    """
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, RayActorError):
        # A dead or unreachable actor may have executed the call.
        is_dead = isinstance(error, ActorDiedError)
        why = if_dead if is_dead else _CALL_AGAIN
        hint = f" ({why})" if why else ""
        return ActorLost(f"actor {actor}: {first_line(error)}{hint}", actor=actor, is_dead=is_dead)
    if isinstance(error, TaskCancelledError):
        return RolloutError(f"actor {actor}: the call was cancelled")
    if isinstance(error, UnserializableException):
        # A foreign error whose constructor pickle cannot call; only its text arrives.
        message = str(error).strip().rpartition("\n")[2]
        return RolloutError(f"actor {actor}: {message}")
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        return ActorLost(f"actor {actor}: {type(error).__name__}: {first_line(error)}", actor=actor)
    return error
