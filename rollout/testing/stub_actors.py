"""Actors of the stub ``ray``, all in this process.

Always true:
- every actor has its own thread and event loop, so an actor that blocks does not block others;
- calls of an async actor that were made together start in an order shuffled by the seed.

Not supported: concurrency limits, restarts, and reference counting of handles: an actor lives until
it or its creator is killed, or until shutdown.  Two things differ from Ray's SIGKILL: coroutines of
a killed actor are cancelled (their further calls have no effect), and a thread that it started
keeps running.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rollout.testing.stub_refs import (
    CURRENT,
    ActorDiedError,
    ObjectRef,
    Owner,
    Pickled,
    TaskCancelledError,
    formatted,
)

# Calls that arrive within this time count as made together.
_TOGETHER_S = 0.001
_END_S = 5.0

Location = tuple[str, tuple[int, ...]]
"""Node id and GPU ids of an actor or a task."""
PLACE: contextvars.ContextVar[Location | None] = contextvars.ContextVar("place", default=None)


@dataclass(eq=False)
class ActorCall:
    """One call of a method of an actor."""

    method: str
    pickled: Pickled
    ref: ObjectRef = field(default_factory=ObjectRef)
    task: asyncio.Task[None] | None = None


class _Loop(asyncio.SelectorEventLoop):
    """A loop that can close all its sockets, as the system does for a dead process."""

    def __init__(self) -> None:
        super().__init__()
        self._servers: list[asyncio.Server] = []

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        server = await super().create_server(*args, **kwargs)
        self._servers.append(server)
        return server

    def close_sockets(self) -> None:
        for server in self._servers:
            server.close()
        for transport in list(self._transports.values()):  # type: ignore[attr-defined]
            transport.abort()


class Actor(Owner):
    """One actor: its object, its thread, its calls.

    Args:
        options: the options of ``ray.remote``.
        seed: seed of the order in which its calls start.
        forget: called when it has died.
    """

    def __init__(
        self,
        kind: type,
        pickled: Pickled,
        options: Mapping[str, Any],
        *,
        full_name: tuple[str, str] | None,
        place: Location,
        seed: str,
        forget: Callable[[Actor], None],
    ) -> None:
        self.full_name = full_name
        self.label = kind.__name__
        self.kind = kind
        self.creator = None if options.get("lifetime") == "detached" else CURRENT.get()
        self.group = getattr(options.get("scheduling_strategy"), "placement_group", None)
        self.died = ""
        self.instance: Any = None
        self.place = place
        self._forget = forget
        self._is_async = bool(inspect.getmembers(kind, inspect.iscoroutinefunction))
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._inbox: list[ActorCall] = []
        self._pending: set[ActorCall] = set()
        self._loop = _Loop()
        self._arrived = asyncio.Event()
        self._context = contextvars.Context()
        self._context.run(CURRENT.set, self)
        self._context.run(PLACE.set, place)
        self._thread = threading.Thread(target=self._run, args=(pickled,), name=self.label)
        self._thread.daemon = True

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: ActorCall) -> ObjectRef:
        caller = CURRENT.get()
        with self._lock:
            if died := self.died or (caller.died if caller else ""):
                call.ref.fail(_died(died))
                return call.ref
            self._pending.add(call)
            self._inbox.append(call)
            call.ref.cancel = lambda: self._on_loop(self._cancel, call)
            self._on_loop(self._arrived.set)
        return call.ref

    def die(self, reason: str) -> None:
        """End the actor; before this returns, all its pending calls have failed."""
        with self._lock:
            if self.died:
                return
            self.died = reason
            pending, self._pending = self._pending, set()
        for call in pending:
            call.ref.fail(_died(reason))
        self._on_loop(self._end)
        self._forget(self)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """In the block it runs nothing, as a process that was stopped."""
        goes_on = threading.Event()
        self._on_loop(goes_on.wait)
        try:
            yield
        finally:
            goes_on.set()

    def join(self) -> None:
        """Wait for the end of its thread."""
        self._thread.join(_END_S)

    def _on_loop(self, act: Callable[..., object], *args: Any) -> None:
        with suppress(RuntimeError):  # it has ended, and its loop is closed
            self._loop.call_soon_threadsafe(act, *args, context=self._context)

    def _run(self, pickled: Pickled) -> None:
        self._serving = self._loop.create_task(self._serve(pickled), context=self._context.copy())
        self._loop.run_forever()
        self._loop.close()
        self.instance = None

    async def _serve(self, pickled: Pickled) -> None:
        try:
            args, kwargs = await opened(pickled)
            self.instance = self.kind(*args, **kwargs)
        except Exception as error:
            reason = "The actor died because of an error raised in its creation task"
            self.die(f"{reason}, {formatted(error)}")
            return
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await asyncio.sleep(_TOGETHER_S)
            batch, self._inbox = self._inbox, []
            if self._is_async:
                self._random.shuffle(batch)
            for call in batch:
                call.task = self._loop.create_task(self._carry_out(call))
                if not self._is_async:
                    await call.task

    async def _carry_out(self, call: ActorCall) -> None:
        try:
            args, kwargs = await opened(call.pickled)
            result = getattr(self.instance, call.method)(*args, **kwargs)
            call.ref.resolve(Pickled(await result if inspect.isawaitable(result) else result).load)
        except asyncio.CancelledError:
            call.ref.fail_in_task(TaskCancelledError(f"{self.label}.{call.method} was cancelled"))
        except BaseException as error:  # every error goes to the caller
            call.ref.fail_in_task(error)
        finally:
            self._pending.discard(call)

    def _cancel(self, call: ActorCall) -> None:
        if call.task is not None:
            if self._is_async:  # a synchronous method that runs cannot be cancelled
                call.task.cancel()
        elif call in self._inbox:
            self._inbox.remove(call)
            self._pending.discard(call)
            call.ref.fail(TaskCancelledError(f"{self.label}.{call.method} was cancelled"))

    def _end(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            self._loop.close_sockets()
            if tasks:
                await asyncio.wait(tasks, timeout=_END_S)
            self._loop.close_sockets()
            self._loop.call_later(0, self._loop.stop)

        self._ending = self._loop.create_task(end())


def _died(reason: str) -> ActorDiedError:
    if "creation task" in reason:
        return ActorDiedError(reason)
    return ActorDiedError(f"The actor died unexpectedly before finishing this task.\n{reason}")


async def opened(pickled: Pickled) -> tuple[list[Any], dict[str, Any]]:
    """The arguments; top-level references are replaced by their values, nested ones are kept."""
    args, kwargs = pickled.load()
    for index, value in enumerate(args):
        if isinstance(value, ObjectRef):
            args[index] = await value
    for name, value in kwargs.items():
        if isinstance(value, ObjectRef):
            kwargs[name] = await value
    return args, kwargs
