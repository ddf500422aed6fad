"""One call of an actor method, with Ray's wrappers peeled off its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import (
    ActorDiedError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    UnserializableException,
)

from rollout.errors import ActorLost, RolloutError

T = TypeVar("T")


class RemoteCall(Generic[T]):
    """A submitted actor call: await it anywhere, or take its ``object_ref``.

    Giving up on a Ray call does not stop it, so an await that is cancelled cancels the call too.
    """

    def __init__(self, object_ref: Any, actor: str, if_dead: str = "") -> None:
        self.object_ref = object_ref
        self.actor = actor
        self.if_dead = if_dead

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        try:
            answer: T = await self.object_ref
            return answer
        except asyncio.CancelledError:
            ray.cancel(self.object_ref)
            raise
        except RayError as error:
            raise peel(error, self.actor, self.if_dead) from None


def peel(error: BaseException, actor: str, if_dead: str = "") -> BaseException:
    """The error that was raised inside the actor, or ``ActorLost`` if the actor is the trouble.

    Args:
        if_dead: what that means and what to do, where the actor has died.
    """
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, RayActorError):
        # Both a dead actor and one that cannot be reached may have acted.
        is_dead = isinstance(error, ActorDiedError)
        hint = f" ({if_dead})" if is_dead and if_dead else ""
        return ActorLost(f"actor {actor}: {_first_line(error)}{hint}", actor=actor, is_dead=is_dead)
    if isinstance(error, TaskCancelledError):
        return RolloutError(f"actor {actor}: the call was cancelled")
    if isinstance(error, UnserializableException):
        # Somebody else's error with a constructor that pickle cannot call; its text is left.
        told = str(error).strip().rpartition("\n")[2]
        return RolloutError(f"actor {actor}: {told}")
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        return ActorLost(
            f"actor {actor}: {type(error).__name__}: {_first_line(error)}", actor=actor
        )
    return error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
