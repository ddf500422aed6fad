"""A context manager for the time when the trainer uses the GPUs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rollout.core.errors import LifecycleError
from rollout.core.pending import Pending, PendingWithCallback
from rollout.core.types import ServerStatus, StepReport
from rollout.rules.lifecycle import Command
from rollout.runtime.calls.server_pushes import ServerPushes
from rollout.weights.push.push import Push, PushRequest
from rollout.weights.push.push_version import checked_version
from rollout.weights.push.weight_push import WITH_KV, WITHOUT_KV, WeightPush

if TYPE_CHECKING:
    from rollout.weights.tensors import NamedTensors, NameMap

T = TypeVar("T")

BeforeKv = Callable[[], object]
"""A function of the trainer that frees memory which the KV caches of the engines need."""


def check_before_kv(before_kv: object) -> None:
    """Refuse what cannot run between the weights and the KV cache.

    Raises:
        TypeError: it is no function, or one that would have to be awaited.
    """
    if before_kv is None or (callable(before_kv) and not inspect.iscoroutinefunction(before_kv)):
        return
    found = "an async function" if callable(before_kv) else f"a {type(before_kv).__name__}"
    raise TypeError(
        f"before_kv takes a plain function without arguments, not {found}; to await something "
        "there, run the phases of push one by one"
    )


def with_before_kv(
    begin: Callable[[Command], Pending[T]],
    before_kv: BeforeKv | None,
    serve: Callable[[], Pending[T]],
    merge: Callable[[T, T], T],
    *,
    is_serving: Callable[[], bool] = lambda: False,
) -> Pending[T]:
    """A transition in which the trainer frees memory before the KV caches are resumed.

    Args:
        begin: starts it, up to this command.
        serve: does the rest of it.
        merge: the result of both.
        is_serving: the engines have their KV caches: the trainer frees its memory at the end.
    """
    if before_kv is None:
        return begin(Command.CONTINUE_GENERATION)
    if is_serving():
        done = begin(Command.CONTINUE_GENERATION)
        return PendingWithCallback(done, before_kv, lambda: done, lambda result, _: result, WITH_KV)
    return PendingWithCallback(begin(Command.VERIFY), before_kv, serve, merge, WITHOUT_KV)


class Transitions(Protocol):
    """The calls of ``ServerHandle`` that a window makes."""

    def status(self) -> Pending[ServerStatus]: ...
    def offload(self) -> Pending[StepReport]: ...
    def serve(self, *, before_kv: BeforeKv | None = None) -> Pending[StepReport]: ...
    def push(
        self,
        named_tensors: NamedTensors | Push,
        version: int | None = None,
        *,
        before_kv: BeforeKv | None = None,
    ) -> Pending[StepReport]: ...


class OffloadWindow:
    """The time in which the trainer has the memory, as a context manager, sync and async.

    Always true: if the block raises, its push is closed and nothing is onloaded.  The engines stay
    offloaded, the gate holds requests, and the error is raised.  Afterwards ``report`` holds the
    figures of both transitions.

    Args:
        check_reach: called with the server's status before anything is offloaded.
    """

    def __init__(
        self,
        server: Transitions,
        pushes: ServerPushes,
        weights: Callable[[], NamedTensors] | None,
        version: int | None,
        before_kv: BeforeKv | None = None,
        *,
        check_reach: Callable[[ServerStatus], None] | None = None,
    ) -> None:
        self._server = server
        self._pushes = pushes
        self._check_reach = check_reach
        self._before_kv = before_kv
        self._weights = weights
        self._version = version
        self._push: Push | None = None
        self._is_open = False
        self.report = StepReport()

    def push(
        self,
        named_tensors: NamedTensors | Push,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
        adapter: Mapping[str, Any] | None = None,
        is_base: bool = False,
        adapter_name: str = "",
    ) -> None:
        """These weights, verified and serving when the block ends; the tensors are copied now.

        Args:
            named_tensors, version, name_map, adapter, is_base, adapter_name: see
                ``PhaseCommands.make_push``.  An existing push has its own version, and is sent as
                it is.

        Raises:
            WeightMismatch: they do not fit the model.
            LifecycleError: the block has already pushed, has ended or did not begin.
        """
        chosen = self._version_of_first(version)
        if isinstance(named_tensors, Push | WeightPush):
            self._push = self._pushes.push_of(named_tensors)
            return
        self._push = self._pushes.make(
            PushRequest(
                named_tensors,
                chosen,
                name_map,
                adapter=adapter,
                is_base=is_base,
                adapter_name=adapter_name,
            )
        )

    def _version_of_first(self, version: int | None) -> int | None:
        chosen = self._version if version is None else checked_version(version)
        if not self._is_open:
            raise LifecycleError(
                "this offload window is not open, so its push would never be sent: push inside "
                "`with server.offloaded() as window:`, or use push",
                command="push",
            )
        self._check_first()
        return chosen

    def _check_first(self) -> None:
        if self._push is not None:
            raise LifecycleError("this offload window already has a push", command="push")

    def _finish(self) -> Pending[StepReport]:
        if self._weights is not None:
            self._check_first()
            return self._server.push(self._weights(), self._version, before_kv=self._before_kv)
        if self._push is None:
            return self._server.serve(before_kv=self._before_kv)
        return self._server.push(self._push, before_kv=self._before_kv)

    def __enter__(self) -> OffloadWindow:
        self._check_closed()
        if self._check_reach is not None:
            self._check_reach(self._server.status().result())
        self.report = self._server.offload().result()
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._has_ended(kind):
            self.report = self.report.merged(self._finish().result())

    async def __aenter__(self) -> OffloadWindow:
        self._check_closed()
        if self._check_reach is not None:
            self._check_reach(await self._server.status())
        self.report = await self._server.offload()
        self._is_open = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._has_ended(kind):
            self.report = self.report.merged(await self._finish())

    def _has_ended(self, kind: type[BaseException] | None) -> bool:
        """Whether the block has ended without an error, so that the engines serve again."""
        self._is_open = False
        if kind is not None and self._push is not None:
            self._push.close()
        return kind is None

    def _check_closed(self) -> None:
        if self._is_open:
            raise LifecycleError("this offload window is open already", command="offloaded")
