"""What is passed between the processes of the stub ``ray``: values, references, and errors.

Always true:
- arguments and results are pickled, once in each direction; only references, handles and placement
  groups are passed as they are;
- a reference is resolved once: by a result, an error, a cancellation, or the death of the actor;
- a caller that stops waiting for a reference never stops the call.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import pickle
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

# -- errors, with the names, base classes and messages of Ray's errors ---------------------------


class RayError(Exception):
    """Base of all errors."""


class RayTaskError(RayError):
    """A method raised.  Callers get an error that is also an instance of the class of its cause.

    Attributes:
        cause: the raised error, after pickling.
    """

    cause: BaseException

    @staticmethod
    def of(cause: BaseException, remote_traceback: str) -> RayTaskError:
        """An instance of both classes, with the remote traceback as its message, as Ray does it."""

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
    """Base of the errors of actors."""


class ActorDiedError(RayActorError):
    """The actor died during the call or before it."""


class ActorAlreadyExistsError(ValueError, RayError):
    """The name of the actor is taken."""


class TaskCancelledError(RayError):
    """The call was cancelled."""


class OwnerDiedError(RayError):
    """The process that made the reference has ended, and the object with it."""


class GetTimeoutError(RayError, TimeoutError):
    """``ray.get`` missed its deadline."""


class TaskUnschedulableError(RayError):
    """There is no node for the task."""


class UnserializableException(RayError):
    """The raised error cannot be unpickled, for example with two required arguments."""

    def __init__(self, original: str) -> None:
        super().__init__(f"Failed to deserialize exception.\nOriginal exception:\n{original}")


def formatted(error: BaseException) -> str:
    """The traceback of ``error`` as text."""
    return "".join(traceback.format_exception(error))


# -- values and references -----------------------------------------------------------------------


class Owner:
    """The actor that owns a reference.

    Attributes:
        label: its name in messages.
        died: why it died, or empty while it lives.
    """

    label: str
    died: str


CURRENT: contextvars.ContextVar[Owner | None] = contextvars.ContextVar("actor", default=None)


class Pickled:
    """A value on its way to another process."""

    def __init__(self, value: Any) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(value)
        self.data = buffer.getvalue()
        self._live = pickler.live

    def load(self) -> Any:
        return _Unpickler(self.data, self._live).load()


class PassedAsIs:
    """Base of objects that are passed to another process without a copy."""


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.live: list[PassedAsIs] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, PassedAsIs):
            return None
        self.live.append(value)
        return len(self.live) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, live: list[PassedAsIs]) -> None:
        super().__init__(io.BytesIO(data))
        self._live = live

    def persistent_load(self, index: int) -> PassedAsIs:
        return self._live[index]


class ObjectRef(PassedAsIs):
    """A reference to a result: await it on any loop, or use ``future()``."""

    def __init__(self) -> None:
        self._read: Future[Callable[[], Any]] = Future()
        self._owner = CURRENT.get()
        self.cancel: Callable[[], None] = lambda: None

    def future(self) -> Future[Any]:
        result: Future[Any] = Future()

        def resolve(read: Future[Callable[[], Any]]) -> None:
            if result.set_running_or_notify_cancel():
                try:
                    if self._owner is not None and self._owner.died:
                        raise OwnerDiedError(f"its owner, {self._owner.label}, is dead")
                    result.set_result(read.result()())
                except BaseException as error:
                    result.set_exception(error)

        self._read.add_done_callback(resolve)
        return result

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self.future()).__await__()

    def resolve(self, read: Callable[[], Any]) -> None:
        """``read`` returns the result or raises; a second call has no effect."""
        with suppress(InvalidStateError):  # resolved before
            self._read.set_result(read)

    def fail(self, error: BaseException) -> None:
        def read() -> Any:
            raise error

        self.resolve(read)

    def fail_in_task(self, error: BaseException) -> None:
        """Fail with the error of a method, after pickling, as Ray does."""
        text = formatted(error)
        if isinstance(error, RayTaskError):  # it comes from a call of another actor
            error = error.cause
        try:
            pickled = Pickled(error)
        except Exception as failure:  # a __reduce__ can raise anything
            pickled = Pickled(RuntimeError(f"{type(error).__name__} cannot be pickled: {failure}"))

        def read() -> Any:
            try:
                cause = pickled.load()
            except Exception:
                raise UnserializableException(text) from None
            raise RayTaskError.of(cause, text)

        self.resolve(read)
