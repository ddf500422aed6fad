"""Coroutines for callers without an event loop: a facade whose object lives on a loop of its own.

A facade names the methods that it has, and how a call of each ends; their arguments, types and
documentation are those of the object:

    class Files(BlockingFacade[AsyncFiles]):
        @arguments_of(AsyncFiles)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__("files", lambda: AsyncFiles(*args, **kwargs))

        read = started(AsyncFiles.read)  # returns a Pending
        size = blocking(AsyncFiles.size)  # returns the result
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from rollout.core.pending import LoopThread, Pending

logger = logging.getLogger(__name__)

_CLOSE_S = 4.2
_LEAVE_S = 0.4


class Closable(Protocol):
    """What can be closed by a coroutine."""

    async def close(self) -> None:
        """Free everything."""
        ...


D = TypeVar("D", bound=Closable)
P = ParamSpec("P")
T = TypeVar("T")


class BlockingFacade(Generic[D]):
    """An object on the event loop of a thread; a context manager, sync and async.

    Args:
        name: of the thread and in errors.
        make: makes the object; called on the loop.
    """

    def __init__(self, name: str, make: Callable[[], D]) -> None:
        self._name = name
        self._loop = LoopThread(name)
        try:
            self._inner = self._loop.submit(_result_of(make)).result()
        except BaseException:
            self._loop.close()
            raise

    def close(self) -> None:
        """Close the object and end the thread, within five seconds; again, it does nothing.

        What does not end in time is logged by name, and left behind.

        Raises:
            Exception: from the object's own ``close``.
        """
        if self._loop.is_closed:
            return
        closing = self._loop.submit(self._inner.close())
        try:
            closing.result(_CLOSE_S)
        except TimeoutError as error:
            if closing.done():
                raise
            logger.error("%s: close did not end; %s", self._name, error)
        finally:
            self._loop.close(_LEAVE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with hiding_nothing(self._name, raised):
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: object, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with hiding_nothing(self._name, raised):
            await asyncio.to_thread(self.close)


@contextmanager
def hiding_nothing(name: str, raised: BaseException | None) -> Iterator[None]:
    """A block that closes something; where its user has raised, its own error is only logged."""
    try:
        yield
    except Exception:
        if raised is None:
            raise
        logger.exception("%s: close failed, too", name)


def arguments_of(
    kind: Callable[P, D],
) -> Callable[[Callable[..., None]], Callable[Concatenate[BlockingFacade[D], P], None]]:
    """Give an ``__init__`` the arguments of ``kind``, for type checkers and ``help``."""

    def typed(init: Callable[..., None]) -> Callable[Concatenate[BlockingFacade[D], P], None]:
        return update_wrapper(init, kind.__init__)

    return typed


def started(
    method: Callable[Concatenate[D, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingFacade[D], P], Pending[T]]:
    """A method that starts this coroutine at once, and returns a ``Pending`` of its result."""

    def call(facade: BlockingFacade[D], /, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        def why_late() -> str:
            return str(getattr(facade._inner, "why_waiting", ""))

        return facade._loop.submit(method(facade._inner, *args, **kwargs), why_late)

    how = "It starts at once and returns a ``Pending``; errors come from ``result()`` or ``await``."
    return _documented(call, method, how, "Pending[{}]")


@overload
def blocking(
    method: Callable[Concatenate[D, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingFacade[D], P], T]: ...


@overload
def blocking(
    method: Callable[Concatenate[D, P], T],
) -> Callable[Concatenate[BlockingFacade[D], P], T]: ...


def blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs this one on the loop, and returns its result."""

    def call(facade: BlockingFacade[Any], /, *args: Any, **kwargs: Any) -> Any:
        return facade._loop.submit(
            _result_of(lambda: method(facade._inner, *args, **kwargs))
        ).result()

    return _documented(call, method, "It blocks until it has ended.", "{}")


async def _result_of(call: Callable[[], Any]) -> Any:
    result = call()
    return await result if inspect.isawaitable(result) else result


def _documented(
    call: Callable[P, T], method: Callable[..., Any], how: str, returns: str
) -> Callable[P, T]:
    """``call`` with the name, parameters and documentation of ``method``, and how it ends."""
    update_wrapper(call, method)
    first, _, rest = inspect.cleandoc(method.__doc__ or "").partition("\n\n")
    call.__doc__ = f"{first}\n\n{how}\n\n{rest}"
    signature = inspect.signature(method)
    annotation = returns.format(signature.return_annotation)
    call.__signature__ = signature.replace(return_annotation=annotation)  # type: ignore[attr-defined]
    return call
