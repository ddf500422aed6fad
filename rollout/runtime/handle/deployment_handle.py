"""The handle of all servers of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.http.trace_context import in_callers_trace
from engines.process.background import Then, keep_thread
from rollout.config import RolloutConfig
from rollout.control.deployment import Deployment
from rollout.core.errors import LifecycleError, RolloutError
from rollout.core.pending import LoopThread, Pending
from rollout.core.types import ServerStatus, StepReport, TrainerSlot
from rollout.rules.lifecycle import Command
from rollout.runtime.handle.offload_window import BeforeKv, check_before_kv, with_before_kv
from rollout.runtime.handle.run_handle import RunHandle
from rollout.runtime.handle.server_handle import ServerHandle, pushes_of
from rollout.weights.push.push import Push, Stages, send_all
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.buffers import remove_leftovers

if TYPE_CHECKING:
    from rollout.weights.tensors import NamedTensors


class DeploymentHandle(RunHandle):
    """All servers of a run, by name; a context manager that stops them at its end.

    A pickled one is a ``RunHandle``: only the launching process can stop the run.

    Args:
        on_close: cleans up the rest of the launch, after the servers have stopped.
        placement_group, trainer_slots: see the properties.
    """

    def __init__(
        self,
        config: RolloutConfig,
        servers: Mapping[str, ServerHandle],
        deployment: Deployment,
        loop: LoopThread,
        on_close: Callable[[], None] = lambda: None,
        placement_group: Any = None,
        trainer_slots: Sequence[TrainerSlot] = (),
    ) -> None:
        super().__init__(servers)
        self.config = config
        self._placement_group = placement_group
        self._trainer_slots = tuple(trainer_slots)
        self._deployment = deployment
        self._loop = loop
        self._on_close = on_close
        self._closed = False
        self._started: Future[dict[str, ServerStatus]] = Future()
        self._ready = Pending(self._started)
        self._starting: Pending[dict[str, ServerStatus]] | None = None

    @property
    def placement_group(self) -> Any:
        """Ray's placement group with the engines, or None without Ray."""
        return self._placement_group

    @property
    def trainer_slots(self) -> tuple[TrainerSlot, ...]:
        """The GPUs that the trainer shares, in the order of its ranks.

        With Ray, place rank ``slot.rank`` in bundle ``slot.bundle_index`` of ``placement_group``.
        """
        return self._trainer_slots

    def started(self, *, wait: bool = True) -> DeploymentHandle:
        """Start all servers and return this handle; if one fails to start, stop everything.

        Args:
            wait: until they have started; else ``ready`` ends then, or has the error.

        Raises:
            LifecycleError: it was called before, as ``launch`` does.
        """
        if self._starting is not None:
            raise LifecycleError("this deployment was started by launch", command="started")
        for root in {server.weights.shared_memory_path for server in self.config.servers.values()}:
            remove_leftovers(Path(root))
        starting = self._starting = self._loop.submit(self._deployment.start())
        if wait:
            self._finish_start(starting)
            self._ready.result()
        else:
            keep_thread(partial(self._finish_start, starting), "launch", Then.IS_OVER)
        return self

    def ready(self) -> Pending[dict[str, ServerStatus]]:
        """The launch: it ends when all servers have started, or with the error that stopped all.

        Raises:
            PhaseFailed: from ``result()`` or ``await``: an engine did not start.
        """
        return self._ready

    def _finish_start(self, starting: Pending[dict[str, ServerStatus]]) -> None:
        try:
            self._started.set_result(starting.result())
        except CancelledError:
            self._started.set_exception(RolloutError("stopped before the servers had started"))
        except BaseException as error:
            self.stop()
            self._started.set_exception(error)

    def offload(self) -> Pending[dict[str, StepReport]]:
        """Free the engines' memory of all servers as one transaction, whatever their phases.

        Raises:
            PhaseFailed: from ``result()`` or ``await``: memory of an engine is not free.
        """
        return self._loop.submit(in_callers_trace(self._deployment.offload()))

    def push(
        self,
        weights: Mapping[str, NamedTensors | Push],
        *,
        before_kv: BeforeKv | None = None,
    ) -> Pending[dict[str, StepReport]]:
        """These weights, verified and serving, by server name, on all servers as one transaction.

        Servers that are not named serve the weights that they hold.

        Args:
            weights: by server name, each as for ``ServerHandle.push``.
            before_kv: called when the weights of all servers are verified; see
                ``ServerHandle.push``.

        Raises:
            ValueError: there is no server of that name; nothing was sent.
            WeightMismatch: tensors do not fit their model; nothing was sent.
        """
        for name in weights:
            if name not in self._servers:
                known = ", ".join(self._servers)
                raise ValueError(f"no server {name!r} to push weights to; known: {known}")
        check_before_kv(before_kv)
        with ExitStack() as made:
            pushes = {}
            for name, tensors in weights.items():
                pushes[name] = pushes_of(self._servers[name]).push_of(tensors)
                made.callback(pushes[name].close)
            made.pop_all()  # all fit
        return self._serve(pushes, before_kv)

    def serve(self, *, before_kv: BeforeKv | None = None) -> Pending[dict[str, StepReport]]:
        """Serve the published weights of all servers again, as one transaction; see
        ``ServerHandle.serve``.

        Args:
            before_kv: see ``push``.

        Raises:
            TypeError: ``before_kv`` is no plain function.
            LifecycleError: from ``result()`` or ``await``: weights were discarded, and nothing
                keeps them.
        """
        check_before_kv(before_kv)
        return self._serve({}, before_kv)

    def _serve(
        self, pushes: Mapping[str, Push], before_kv: BeforeKv | None
    ) -> Pending[dict[str, StepReport]]:
        def with_stages(reports: dict[str, StepReport], stages: Stages) -> dict[str, StepReport]:
            pushed = {
                name: replace(reports[name], push_stages=tuple(of_push))
                for name, of_push in stages.items()
            }
            return reports | pushed

        def begin(until: Command) -> Pending[dict[str, StepReport]]:
            return send_all(pushes, lambda weights: self._begin(weights, until), with_stages)

        return with_before_kv(
            begin,
            before_kv,
            lambda: self._begin({}, Command.CONTINUE_GENERATION),
            lambda first, second: {name: first[name].merged(second[name]) for name in first},
            is_serving=lambda: all(
                status.gate == "open" for status in self.status().result().values()
            ),
        )

    def _begin(
        self, weights: Mapping[str, WeightPush], until: Command
    ) -> Pending[dict[str, StepReport]]:
        shipped = {
            name: pushes_of(self._servers[name]).server.shipped(push)
            for name, push in weights.items()
        }
        return self._loop.submit(in_callers_trace(self._deployment.serve(shipped, until)))

    def status(self) -> Pending[dict[str, ServerStatus]]:
        """Status of every server.

        Raises:
            RolloutError: the deployment is closed.
        """
        return self._loop.submit(self._deployment.status())

    def stop(self) -> None:
        """Stop everything that ``launch`` started, and wait until it has ended."""
        if self._closed:
            return
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        try:
            self._loop.submit(self._deployment.stop()).result()
        finally:
            for server in self._servers.values():
                server.close()
            self._on_close()
            self._loop.close()

    def __enter__(self) -> DeploymentHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def __aenter__(self) -> DeploymentHandle:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.stop)
