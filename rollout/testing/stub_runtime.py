"""Actors, references and placement groups of the stub ``ray``, all in this process.

Always true:
- arguments and answers cross by pickle, once in each direction; only references, handles and
  placement groups cross as what they are;
- every actor has a thread and an event loop of its own, so one that blocks stops nobody else;
- calls of an async actor that were made together start in an order shuffled by the seed;
- a reference is settled once: by the answer, an error, a cancel, or the actor's death;
- giving up on a reference never stops its call.

Not here: concurrency limits, restarts, resources of actors outside a placement group, and the
counting of handles: an actor lives until it or its creator is killed, or at shutdown.  Two things
end less abruptly than Ray's SIGKILL: coroutines of a killed actor are cancelled (nothing they
call any more is heard), and a thread that it started itself lives on.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import io
import pickle
import random
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollout.testing.stub_errors import (
    ActorAlreadyExistsError,
    ActorDiedError,
    OwnerDiedError,
    RayTaskError,
    TaskCancelledError,
    UnserializableException,
    formatted,
)

# Calls that arrive within it count as made together.
_TOGETHER_S = 0.001
_END_S = 5.0

Placed = tuple[str, tuple[int, ...]]
"""Where something runs: node id and GPU ids."""
CURRENT: contextvars.ContextVar[Actor | None] = contextvars.ContextVar("actor", default=None)
PLACE: contextvars.ContextVar[Placed | None] = contextvars.ContextVar("place", default=None)


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


class Actor:
    """One actor: its object, its thread, its calls."""

    def __init__(self, cluster: Cluster, kind: type, parcel: Parcel, options: Mapping[str, Any]):
        self.full_name = cluster.full_name(options)
        self.told = kind.__name__
        self.kind = kind
        self.creator = None if options.get("lifetime") == "detached" else CURRENT.get()
        self.group = getattr(options.get("scheduling_strategy"), "placement_group", None)
        self.died = ""
        self.instance: Any = None
        self._cluster = cluster
        self._is_async = any(inspect.iscoroutinefunction(one) for one in vars(kind).values())
        self._random = random.Random(f"{cluster.seed}/{len(cluster.actors)}")
        self._lock = threading.Lock()
        self._inbox: list[Call] = []
        self._unsettled: set[Call] = set()
        self._loop = _Loop()
        self._arrived = asyncio.Event()
        self._context = contextvars.Context()
        self._context.run(CURRENT.set, self)
        self.place = cluster.place(options)
        self._context.run(PLACE.set, self.place)
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
        self._cluster.forget(self)

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


class PlacementGroup(Live):
    """Bundles, granted all together or pending."""

    def __init__(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> None:
        self.bundle_specs = [dict(one) for one in bundles]
        self.strategy = strategy
        self.places: list[Placed] = []
        self.granted = threading.Event()

    def wait(self, timeout_seconds: float = 30) -> bool:
        return self.granted.wait(timeout_seconds)


@dataclass
class Node:
    """One machine: what it has in all, what is free."""

    node_id: str
    resources: dict[str, float]
    free: dict[str, float]
    free_gpu_ids: list[int]
    is_alive: bool = True


class Cluster:
    """What one ``ray.init`` started.

    Attributes:
        actors: all that live.
        nodes: all there ever were.
    """

    def __init__(self, nodes: Sequence[Mapping[str, float]], seed: int, namespace: str) -> None:
        self.seed = seed
        self.namespace = namespace
        self.actors: list[Actor] = []
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._ended: list[Actor] = []
        self._groups: list[PlacementGroup] = []
        self.nodes: list[Node] = []
        for one in nodes:
            self.add_node(one)

    def add_node(self, resources: Mapping[str, float]) -> str:
        """One more machine; bundles that wait for a place may get theirs there."""
        num_gpus = int(resources.get("GPU", 0))
        node = Node(
            f"{len(self.nodes):x}".rjust(56, "0"),
            dict(resources),
            dict(resources),
            self._random.sample(range(num_gpus), num_gpus),
        )
        with self._lock:
            self.nodes.append(node)
            self._grant()
        return node.node_id

    def lose_node(self, node_id: str) -> None:
        """A machine is gone, with its actors; Ray gives its bundles another place, or none yet."""
        with self._lock:
            node = next(one for one in self.nodes if one.node_id == node_id)
            node.is_alive = False
            lost = [one for one in self.actors if one.place[0] == node_id]
            for group in self._groups:
                group.places = [("", ()) if one[0] == node_id else one for one in group.places]
            self._grant()
        for actor in lost:
            actor.die("The actor died because its node has died.")

    def is_alive(self, node_id: str) -> bool:
        return any(one.node_id == node_id and one.is_alive for one in self.nodes)

    def create(self, kind: type, parcel: Parcel, options: Mapping[str, Any]) -> Actor:
        with self._lock:
            name = self.full_name(options)
            if name and self.find(*name):
                raise ActorAlreadyExistsError(
                    f"The name {name[1]} (namespace={name[0]}) is already taken."
                )
            actor = Actor(self, kind, parcel, options)
            self.actors.append(actor)
            actor.start()
        return actor

    def full_name(self, options: Mapping[str, Any]) -> tuple[str, str] | None:
        """Namespace and name, if it has one."""
        name = options.get("name")
        return (options.get("namespace") or self.namespace, name) if name else None

    def find(self, namespace: str, name: str) -> Actor | None:
        with self._lock:
            return next((one for one in self.actors if one.full_name == (namespace, name)), None)

    def forget(self, actor: Actor) -> None:
        with self._lock:
            if actor in self.actors:
                self.actors.remove(actor)
                self._ended.append(actor)
            orphans = [one for one in self.actors if one.creator is actor]
        for one in orphans:
            one.die("The actor is dead because its owner has died.")

    def shutdown(self) -> None:
        for one in list(self.actors):
            one.die("The driver has exited.")
        for one in self._ended:
            one.join()

    # -- placement --------------------------------------------------------------------------

    def place(self, options: Mapping[str, Any]) -> Placed:
        """Where an actor or a task with these options runs."""
        strategy = options.get("scheduling_strategy")
        group = getattr(strategy, "placement_group", None)
        if group is not None:
            index = getattr(strategy, "placement_group_bundle_index", -1)
            node_id, gpu_ids = group.places[max(0, index)]
            return node_id, gpu_ids if options.get("num_gpus") else ()
        return getattr(strategy, "node_id", None) or self.nodes[0].node_id, ()

    def reserve(self, group: PlacementGroup) -> PlacementGroup:
        with self._lock:
            self._groups.append(group)
            self._grant()
        return group

    def release(self, group: PlacementGroup) -> None:
        """Free its bundles, for groups that wait; its actors die with it."""
        with self._lock:
            self._groups.remove(group)
            for (node_id, gpu_ids), bundle in zip(group.places, group.bundle_specs, strict=False):
                if not node_id:  # it lost its place
                    continue
                node = next(one for one in self.nodes if one.node_id == node_id)
                node.free_gpu_ids.extend(gpu_ids)
                for name, amount in bundle.items():
                    node.free[name] += amount
            self._grant()
            lost = [one for one in self.actors if one.group is group]
        for actor in lost:
            actor.die("Its placement group was removed.")

    def _grant(self) -> None:
        for group in self._groups:
            places = self._try_place(group)
            if places is not None:
                group.places = places
                group.granted.set()

    def _try_place(self, group: PlacementGroup) -> list[Placed] | None:
        """Where its bundles are, those without a place given one; None if not all can be."""
        before = [(dict(one.free), list(one.free_gpu_ids)) for one in self.nodes]
        places = list(group.places) or [("", ())] * len(group.bundle_specs)
        for index, bundle in enumerate(group.bundle_specs):
            if places[index][0]:
                continue
            used = [node_id for node_id, _ in places] if group.strategy == "PACK" else []
            node = self._node_for(bundle, used)
            if node is None:
                for one, (free, gpu_ids) in zip(self.nodes, before, strict=True):
                    one.free, one.free_gpu_ids = free, gpu_ids
                return None
            for name, amount in bundle.items():
                node.free[name] -= amount
            gpu_ids = [node.free_gpu_ids.pop() for _ in range(int(bundle.get("GPU", 0)))]
            places[index] = (node.node_id, tuple(gpu_ids))
        return places

    def _node_for(self, bundle: Mapping[str, float], used: Sequence[str]) -> Node | None:
        """Any node with room, one of ``used`` if it can be: Ray promises no more."""
        fitting = [
            one
            for one in self.nodes
            if one.is_alive
            and all(one.free.get(name, 0.0) >= amount for name, amount in bundle.items())
        ]
        preferred = [one for one in fitting if one.node_id in used] or fitting
        return self._random.choice(preferred) if preferred else None
