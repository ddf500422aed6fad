"""One server from outside: every verb of it, and the pushes it is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollout.canary import Logprobs, Prompt
from rollout.config import ServerConfig, WeightUpdate
from rollout.deployment import ServerPort
from rollout.handle.calling import Around, Caller
from rollout.handle.window import OffloadWindow
from rollout.hearing import check_expected, prompts_of
from rollout.pending import Pending
from rollout.pushing import Pushes
from rollout.types import EngineReport, EngineStatus, ServerStatus, StepReport
from rollout.weights.push import WeightPush

if TYPE_CHECKING:
    from rollout.weights.tensors import NamedTensors, NameMap


class ServerHandle:
    """One rollout server from outside."""

    def __init__(self, name: str, config: ServerConfig, target: ServerPort, caller: Caller) -> None:
        self.name = name
        self._target = target
        self._caller = caller
        self._url = ""
        self._version = 0
        self._pushes = Pushes(config, Around(target, caller))
        self._config = config
        self._expected: Logprobs = ()

    @property
    def url(self) -> str:
        """Base URL of the router: ``/generate``, ``/v1/...`` go here."""
        if not self._url:
            self._url = self.status().result().router_url
        return self._url

    @property
    def weight_version(self) -> int:
        """The version published last through this handle."""
        return self._version

    # -- canary -----------------------------------------------------------------------------

    @property
    def canary_prompts(self) -> tuple[Prompt, ...]:
        """What engines are asked where fingerprints cannot prove them; token ids."""
        return prompts_of(self._config.lifecycle, self._config.model_path)

    def expect(self, logprobs: Sequence[Sequence[float]]) -> None:
        """What the trainer's own model tells of ``canary_prompts`` with the weights that are pushed
        next: engines that tell otherwise are fenced, however they hold those weights.

        Args:
            logprobs: of each prompt's tokens after the first; ``weights.tensors.canary_logprobs``
                has them of a model of transformers.

        Raises:
            WeightMismatch: they are not of these prompts.
        """
        expected = tuple(tuple(values) for values in logprobs)
        check_expected(expected, self.canary_prompts)
        self._expected = expected

    # -- whole transitions ------------------------------------------------------------------

    def offload(self) -> Pending[StepReport]:
        """Pause, flush and release, each a barrier over all groups."""
        return self._caller.call(self._target.offload)

    def onload(
        self,
        named_tensors: NamedTensors | WeightPush | None = None,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
    ) -> Pending[StepReport]:
        """Resume weights, push ``named_tensors``, verify, resume KV cache, continue.

        Args:
            named_tensors: tensors by checkpoint name, DTensors too; None pushes nothing; or a
                push that was made before.
            version: the weight version they make; one more than the last if left out.
            name_map: from the trainer's names and fused tensors to the checkpoint's; see
                ``rollout.weights.tensors.NameMap``.
        """
        if named_tensors is None:
            return self.onload_push(None)
        return self.onload_push(self._made(named_tensors, version, name_map))

    def onload_push(self, push: WeightPush | None) -> Pending[StepReport]:
        """``onload`` with a push that was made before."""
        if push is None:
            return self._caller.call(self._target.onload, None)
        return self._sent(self._target.onload, push)

    def sync_weights(
        self,
        named_tensors: NamedTensors | WeightPush,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
    ) -> Pending[StepReport]:
        """New weights while serving: pause, flush, update, verify, continue; nothing released."""
        push = self._made(named_tensors, version, name_map)
        return self._sent(self._target.update_and_continue, push)

    def sync_base(
        self, named_tensors: NamedTensors, *, version: int | None = None
    ) -> Pending[StepReport] | None:
        """With ``update: lora``, at the start: give the engines the trainer's base weights.

        None, and nothing is sent, if they are what the engines loaded from ``model_path``.
        """
        pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
        if not self._pushes.base_differs(pairs):
            return None
        return self.sync_weights(self.make_base_push(pairs, version))

    def offloaded(
        self, weights: Callable[[], NamedTensors] | None = None, *, version: int | None = None
    ) -> OffloadWindow:
        """``with server.offloaded():`` the GPUs are the trainer's; also ``async with``.

        Args:
            weights: called when the block ends, for the tensors to push.
        """
        return OffloadWindow(self, weights, version)

    # -- the explicit verbs -----------------------------------------------------------------

    def pause_generation(self) -> Pending[StepReport]:
        return self._caller.call(self._target.pause_generation)

    def flush_cache(self) -> Pending[StepReport]:
        return self._caller.call(self._target.flush_cache)

    def release_memory_occupation(self) -> Pending[StepReport]:
        return self._caller.call(self._target.release_memory_occupation)

    def onload_weights(self) -> Pending[StepReport]:
        return self._caller.call(self._target.onload_weights)

    def update_weights(
        self,
        named_tensors: NamedTensors | WeightPush,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
    ) -> Pending[StepReport]:
        push = self._made(named_tensors, version, name_map)
        return self._sent(self._target.update_weights, push)

    def verify(self) -> Pending[StepReport]:
        return self._caller.call(self._target.verify)

    def onload_kv(self) -> Pending[StepReport]:
        return self._caller.call(self._target.onload_kv)

    def continue_generation(self) -> Pending[StepReport]:
        return self._caller.call(self._target.continue_generation)

    def remove_engine(self, engine_id: str, *, keep_process: bool = False) -> Pending[EngineReport]:
        """Take an engine out while the others serve: drained, its memory measured free, ended.

        Args:
            keep_process: it only sleeps, with its memory released; ``add_engine`` wakes it.
        """
        return self._caller.call(self._target.remove_engine, engine_id, keep_process)

    def add_engine(self, engine_id: str) -> Pending[EngineStatus]:
        """Take the place of a removed engine back; it serves when its weights are proved."""
        return self._caller.call(self._target.add_engine, engine_id)

    def status(self) -> Pending[ServerStatus]:
        """Phase, engines, versions, gate; answers also while a command runs."""
        return self._caller.call(self._target.status)

    # -- pushes -----------------------------------------------------------------------------

    def make_push(
        self,
        named_tensors: NamedTensors,
        version: int | None = None,
        name_map: NameMap | None = None,
    ) -> WeightPush:
        """Copy tensors into a push.  Done here and now, so the trainer may then free them.

        Raises:
            WeightMismatch: they do not fit the model.
        """
        return self._pushes.full(
            named_tensors, self._next(version), name_map=name_map, may_stream=False
        )

    def make_base_push(self, named_tensors: NamedTensors, version: int | None = None) -> WeightPush:
        """With ``update: lora``: a push of all base weights, or of base and adapter ``merged``."""
        return self._pushes.full(
            named_tensors, self._next(version), may_stream=False, contents=WeightUpdate.FULL
        )

    def base_differs(self, named_tensors: NamedTensors) -> bool:
        """Whether these are other weights than those at ``model_path``, tensor by tensor."""
        return self._pushes.base_differs(named_tensors)

    def make_adapter_push(
        self,
        named_tensors: NamedTensors,
        config: Mapping[str, Any],
        version: int | None = None,
    ) -> WeightPush:
        """With ``update: lora``: copy an adapter into a push.

        Args:
            named_tensors: under PEFT's names.
            config: PEFT's ``adapter_config.json``: ``r`` and ``lora_alpha`` at the least.

        Raises:
            WeightMismatch: it does not fit the model.
        """
        return self._pushes.adapter(named_tensors, config, self._next(version))

    def prepare(
        self, named_tensors: NamedTensors | WeightPush, version: int | None = None
    ) -> WeightPush:
        """``make_push``, or a push that was made before, shipped: ready for the server."""
        if isinstance(named_tensors, WeightPush):
            return self._shipped(named_tensors)
        return self._shipped(self.make_push(named_tensors, version))

    def end_push(self, push: WeightPush) -> None:
        """Let go of what a push holds in this process.  Calls that send one do it themselves."""
        self._pushes.end(push.version)

    def close(self) -> None:
        """End all pushes and remove their files; the server itself is left alone."""
        self._pushes.close()

    def _next(self, version: int | None) -> int:
        return self._version + 1 if version is None else version

    def _made(
        self,
        named_tensors: NamedTensors | WeightPush,
        version: int | None,
        name_map: NameMap | None,
    ) -> WeightPush:
        if isinstance(named_tensors, WeightPush):
            return named_tensors
        return self._pushes.full(
            named_tensors, self._next(version), name_map=name_map, may_stream=True
        )

    def _sent(self, method: Callable[..., Any], push: WeightPush) -> Pending[StepReport]:
        return self._pushes.ended_with(self._caller.call(method, self._shipped(push)), push)

    def _shipped(self, push: WeightPush) -> WeightPush:
        self._version = max(self._version, push.version)
        if self._expected:
            push, self._expected = replace(push, canary=self._expected), ()
        return self._caller.ship(push)
