"""Actors of the stub ``ray``, all in this process.

Always true:
- every actor has a thread and an event loop of its own, so one that blocks stops nobody else;
- calls of an async actor that were made together start in an order shuffled by the seed.

Not here: concurrency limits, restarts, and the counting of handles: an actor lives until it or its
creator is killed, or at shutdown.  Two things end less abruptly than Ray's SIGKILL: coroutines of a
killed actor are cancelled (nothing they call any more is heard), and a thread that it started
itself lives on.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollout.testing.stub_errors import ActorDiedError, TaskCancelledError, formatted
from rollout.testing.stub_refs import CURRENT, ObjectRef, Owner, Parcel

# Calls that arrive within it count as made together.
_TOGETHER_S = 0.001
_END_S = 5.0

Placed = tuple[str, tuple[int, ...]]
"""Where something runs: node id and GPU ids."""
PLACE: contextvars.ContextVar[Placed | None] = contextvars.ContextVar("place", default=None)


@dataclass(eq=False)
class Call:
    """One call on its way."""

    method: str
    parcel: Parcel
    ref: ObjectRef = field(default_factory=ObjectRef)
    task: asyncio.Task[None] | None = None


class _Loop(asyncio.SelectorEventLoop):
    """Knows its sockets, so that they can be closed as the system closes a dead process's."""

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
        options: of the call of ``ray.remote``.
        seed: of the order in which its calls start.
        forget: told when it has died.
    """

    def __init__(
        self,
        kind: type,
        parcel: Parcel,
        options: Mapping[str, Any],
        *,
        full_name: tuple[str, str] | None,
        place: Placed,
        seed: str,
        forget: Callable[[Actor], None],
    ) -> None:
        self.full_name = full_name
        self.told = kind.__name__
        self.kind = kind
        self.creator = None if options.get("lifetime") == "detached" else CURRENT.get()
        self.group = getattr(options.get("scheduling_strategy"), "placement_group", None)
        self.died = ""
        self.instance: Any = None
        self.place = place
        self._forget = forget
        self._is_async = any(inspect.iscoroutinefunction(one) for one in vars(kind).values())
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._inbox: list[Call] = []
        self._unsettled: set[Call] = set()
        self._loop = _Loop()
        self._arrived = asyncio.Event()
        self._context = contextvars.Context()
        self._context.run(CURRENT.set, self)
        self._context.run(PLACE.set, place)
        self._thread = threading.Thread(target=self._run, args=(parcel,), name=self.told)
        self._thread.daemon = True

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: Call) -> ObjectRef:
        caller = CURRENT.get()
        with self._lock:
            if died := self.died or (caller.died if caller else ""):
                call.ref.fail(_died(died))
                return call.ref
            self._unsettled.add(call)
            self._inbox.append(call)
            call.ref.cancel = lambda: self._on_loop(self._cancel, call)
            self._on_loop(self._arrived.set)
        return call.ref

    def die(self, because: str) -> None:
        """End it and, before this returns, settle whatever still waits for it."""
        with self._lock:
            if self.died:
                return
            self.died = because
            unsettled, self._unsettled = self._unsettled, set()
        for call in unsettled:
            call.ref.fail(_died(because))
        self._on_loop(self._end)
        self._forget(self)

    def join(self) -> None:
        """Wait until its thread has ended."""
        self._thread.join(_END_S)

    def _on_loop(self, act: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # it has ended, and its loop is closed
            self._loop.call_soon_threadsafe(act, *args, context=self._context)

    def _run(self, parcel: Parcel) -> None:
        self._serving = self._loop.create_task(self._serve(parcel), context=self._context.copy())
        self._loop.run_forever()
        self._loop.close()
        self.instance = None

    async def _serve(self, parcel: Parcel) -> None:
        try:
            args, kwargs = await _opened(parcel)
            self.instance = self.kind(*args, **kwargs)
        except Exception as error:
            self.die(
                f"The actor died because of an error raised in its creation task, "
                f"{formatted(error)}"
            )
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

    async def _carry_out(self, call: Call) -> None:
        try:
            args, kwargs = await _opened(call.parcel)
            answer = getattr(self.instance, call.method)(*args, **kwargs)
            call.ref.settle(Parcel(await answer if inspect.isawaitable(answer) else answer).open)
        except asyncio.CancelledError:
            call.ref.fail_in_task(TaskCancelledError(f"{self.told}.{call.method} was cancelled"))
        except BaseException as error:  # whatever it is, the caller gets it
            call.ref.fail_in_task(error)
        finally:
            self._unsettled.discard(call)

    def _cancel(self, call: Call) -> None:
        if call.task is not None:
            if self._is_async:  # a synchronous method that runs cannot be cancelled
                call.task.cancel()
        elif call in self._inbox:
            self._inbox.remove(call)
            self._unsettled.discard(call)
            call.ref.fail(TaskCancelledError(f"{self.told}.{call.method} was cancelled"))

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


def _died(because: str) -> ActorDiedError:
    if "creation task" in because:
        return ActorDiedError(because)
    return ActorDiedError(f"The actor died unexpectedly before finishing this task.\n{because}")


async def _opened(parcel: Parcel) -> tuple[list[Any], dict[str, Any]]:
    """The arguments; references among them give way to their values, nested ones stay."""
    args, kwargs = parcel.open()
    for index, one in enumerate(args):
        if isinstance(one, ObjectRef):
            args[index] = await one
    for name, one in kwargs.items():
        if isinstance(one, ObjectRef):
            kwargs[name] = await one
    return args, kwargs
