"""The time when the GPUs are the trainer's.

Always true: if its block raises, nothing is onloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollout.errors import LifecycleError
from rollout.pending import Pending
from rollout.types import StepReport
from rollout.weights.push import WeightPush

if TYPE_CHECKING:
    from rollout.handle.server import ServerHandle
    from rollout.weights.tensors import NamedTensors


class OffloadWindow:
    """The time between offload and onload, as a context manager, sync and async.

    If the block raises, nothing is onloaded: the engines stay as they are, the gate stays shut,
    and the error goes on.  ``report`` holds the figures of both transitions afterwards.
    """

    def __init__(
        self,
        server: ServerHandle,
        weights: Callable[[], NamedTensors] | None,
        version: int | None,
    ) -> None:
        self._server = server
        self._weights = weights
        self._version = version
        self._push: WeightPush | None = None
        self.report = StepReport()

    def push(self, named_tensors: NamedTensors, *, version: int | None = None) -> None:
        """Copy these tensors now; they are sent when the block ends.

        Raises:
            WeightMismatch: they do not fit the model.
            LifecycleError: the block has already pushed.
        """
        chosen = self._version_of_first(version)
        self._push = self._server.make_push(named_tensors, chosen)

    def push_adapter(
        self, named_tensors: NamedTensors, config: Mapping[str, Any], *, version: int | None = None
    ) -> None:
        """Copy a LoRA adapter now (``update: lora``); it is sent when the block ends.

        Raises:
            WeightMismatch: it does not fit the model.
            LifecycleError: the block has already pushed.
        """
        chosen = self._version_of_first(version)
        self._push = self._server.make_adapter_push(named_tensors, config, chosen)

    def push_base(self, named_tensors: NamedTensors, *, version: int | None = None) -> None:
        """Copy all base weights now, or base and adapter merged (``update: lora``); sent when the
        block ends.

        Raises:
            WeightMismatch: they do not fit the model.
            LifecycleError: the block has already pushed.
        """
        chosen = self._version_of_first(version)
        self._push = self._server.make_base_push(named_tensors, chosen)

    def _version_of_first(self, version: int | None) -> int | None:
        self._check_first()
        return self._version if version is None else version

    def _check_first(self) -> None:
        if self._push is not None:
            raise LifecycleError("this offload window already has a push", command="push")

    def _finish(self) -> Pending[StepReport]:
        if self._weights is not None:
            self._check_first()
            return self._server.onload(self._weights(), version=self._version)
        return self._server.onload_push(self._push)

    def __enter__(self) -> OffloadWindow:
        self.report = self._server.offload().result()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.report = self.report.merged(self._finish().result())

    async def __aenter__(self) -> OffloadWindow:
        self.report = await self._server.offload()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.report = self.report.merged(await self._finish())
