"""What crosses between the processes of the stub ``ray``: pickled values, and references to them.

Always true:
- arguments and answers cross by pickle, once in each direction; only references, handles and
  placement groups cross as what they are;
- a reference is settled once: by the answer, an error, a cancel, or the actor's death;
- giving up on a reference never stops its call.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import pickle
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from rollout.testing.stub_errors import (
    OwnerDiedError,
    RayTaskError,
    UnserializableException,
    formatted,
)


class Owner:
    """An actor, as what it makes knows it.

    Attributes:
        told: its name in messages.
        full_name: namespace and name, if it has one.
        died: what ended it; empty while it lives.
    """

    told: str
    full_name: tuple[str, str] | None
    died: str


CURRENT: contextvars.ContextVar[Owner | None] = contextvars.ContextVar("actor", default=None)


class Parcel:
    """A value between two processes."""

    def __init__(self, value: Any) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(value)
        self.data = buffer.getvalue()
        self._live = pickler.live

    def open(self) -> Any:
        return _Unpickler(self.data, self._live).load()


class Live:
    """Crosses to another process as what it is."""


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.live: list[Live] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Live):
            return None
        self.live.append(value)
        return len(self.live) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, live: list[Live]) -> None:
        super().__init__(io.BytesIO(data))
        self._live = live

    def persistent_load(self, index: int) -> Live:
        return self._live[index]


class ObjectRef(Live):
    """A reference: await it on any loop, or take a ``future()`` of it."""

    def __init__(self) -> None:
        self._read: Future[Callable[[], Any]] = Future()
        self._owner = CURRENT.get()
        self.cancel: Callable[[], None] = lambda: None

    def future(self) -> Future[Any]:
        answer: Future[Any] = Future()

        def settle(read: Future[Callable[[], Any]]) -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    if self._owner is not None and self._owner.died:
                        raise OwnerDiedError(f"its owner, {self._owner.told}, is dead")
                    answer.set_result(read.result()())
                except BaseException as error:
                    answer.set_exception(error)

        self._read.add_done_callback(settle)
        return answer

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self.future()).__await__()

    def is_settled(self) -> bool:
        return self._read.done()

    def settle(self, read: Callable[[], Any]) -> None:
        """``read`` gives the answer or raises; later ones change nothing."""
        with suppress(InvalidStateError):  # settled before
            self._read.set_result(read)

    def fail(self, error: BaseException) -> None:
        def read() -> Any:
            raise error

        self.settle(read)

    def fail_in_task(self, error: BaseException) -> None:
        """What a method raised, through pickling, as Ray hands it over."""
        told = formatted(error)
        if isinstance(error, RayTaskError):  # of another actor, passed on
            error = error.cause
        try:
            parcel = Parcel(error)
        except Exception as why:  # anything can go wrong in somebody's __reduce__
            parcel = Parcel(RuntimeError(f"{type(error).__name__} cannot be pickled: {why}"))

        def read() -> Any:
            try:
                cause = parcel.open()
            except Exception:
                raise UnserializableException(told) from None
            raise RayTaskError.of(cause, told)

        self.settle(read)
