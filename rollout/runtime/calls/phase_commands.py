"""The commands of the lifecycle, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout.control.server.server import RolloutServer
from rollout.core.pending import Pending
from rollout.core.types import StepReport
from rollout.rules.lifecycle import Command
from rollout.runtime.calls.caller import Caller
from rollout.runtime.calls.server_pushes import ServerPushes
from rollout.weights.push.push import Push, PushRequest

if TYPE_CHECKING:
    from rollout.weights.tensors import NamedTensors, NameMap


class PhaseCommands:
    """``policy.phases``: one command of the lifecycle at a time, refused in every other phase.

    Use them to do something between two phases, and to copy weights before the command that sends
    them.  ``offload`` and ``push`` of the handle run all that are needed.
    """

    def __init__(self, caller: Caller, pushes: ServerPushes) -> None:
        self._caller = caller
        self._pushes = pushes

    def pause_generation(self) -> Pending[StepReport]:
        """Close the gate and stop generation; ``lifecycle.drain`` says what becomes of requests.

        Raises:
            LifecycleError: from ``result()`` or ``await``, here and in the others: the command
                is not legal in this phase; the error names those that are.
            PhaseFailed: too few engines are left.
        """
        return self._caller.call(RolloutServer.run, Command.PAUSE_GENERATION)

    def flush_cache(self) -> Pending[StepReport]:
        """Wait until no request is in flight, and drop the prefix caches.

        Raises:
            LifecycleError: generation is not paused.
        """
        return self._caller.call(RolloutServer.run, Command.FLUSH_CACHE)

    def release_memory_occupation(self) -> Pending[StepReport]:
        """Release the memory of the groups that offload; ``freed_bytes`` is measured.

        Raises:
            LifecycleError: the caches are not flushed.
        """
        return self._caller.call(RolloutServer.run, Command.RELEASE_MEMORY_OCCUPATION)

    def onload_weights(self) -> Pending[StepReport]:
        """Resume the memory of the weights; what it holds is not trusted yet.

        Raises:
            LifecycleError: the memory is not released.
        """
        return self._caller.call(RolloutServer.run, Command.ONLOAD_WEIGHTS)

    def snapshot(self) -> Pending[StepReport]:
        """Let every engine keep a copy of its weights, to compare with after a push.

        ``checks.push_path`` runs it, the push and the comparison in one call.

        Raises:
            LifecycleError: the caches are not flushed, the weights are not verified, or an engine
                cannot compare weights.
        """
        return self._caller.call(RolloutServer.run, Command.SNAPSHOT)

    def make_push(
        self,
        named_tensors: NamedTensors,
        version: int | None = None,
        *,
        name_map: NameMap | None = None,
        adapter: Mapping[str, Any] | None = None,
        is_base: bool = False,
        adapter_name: str = "",
    ) -> Push:
        """Copy tensors into a push; the trainer may change or free them afterwards.

        It is legal in any phase.  ``update_weights``, ``push`` and ``checks.push_path``
        take the push in place of tensors, once; ``close`` frees one that is not sent.

        Args:
            named_tensors, version, name_map: see ``ServerHandle.push``.
            adapter: with ``update: lora``, the tensors are those of a LoRA adapter, under PEFT's
                names, and this is PEFT's ``adapter_config.json`` or ``config.to_dict()``: at least
                ``r`` and ``lora_alpha``.
            is_base: with ``update: lora``, the tensors are all base weights, or base and adapter
                ``merged``; else tensors under the model's names are some of the base's.
            adapter_name: which of ``weights.adapters`` it is, where there are several.

        Raises:
            WeightMismatch: they do not fit the model, or no engine honours a field of ``adapter``.
        """
        return self._pushes.make(
            PushRequest(
                named_tensors,
                version,
                name_map,
                adapter=adapter,
                is_base=is_base,
                adapter_name=adapter_name,
            )
        )

    def update_weights(
        self,
        named_tensors: NamedTensors | Push,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
    ) -> Pending[StepReport]:
        """Push new weights to engines that are flushed, or whose weights are onloaded.

        The engines neither verify them nor serve.

        Args:
            named_tensors, version, name_map: see ``ServerHandle.push``.

        Raises:
            WeightMismatch: as ``ServerHandle.push``.
            LifecycleError: from ``result()`` or ``await``: the engines cannot take weights now.
        """
        push = self._pushes.push_of(named_tensors, version, name_map)
        shipped = self._pushes.server.shipped
        return push.send(
            lambda weights: self._caller.call(RolloutServer.update_weights, shipped(weights))
        )

    def verify(self) -> Pending[StepReport]:
        """Check that every engine holds the weights that were pushed last.

        Raises:
            LifecycleError: they have no weights.
        """
        return self._caller.call(RolloutServer.run, Command.VERIFY)

    def onload_kv(self) -> Pending[StepReport]:
        """Resume the memory of KV caches and CUDA graphs.

        Raises:
            LifecycleError: the weights are not verified.
        """
        return self._caller.call(RolloutServer.run, Command.ONLOAD_KV)

    def continue_generation(self) -> Pending[StepReport]:
        """Generate again, and open the gate.

        Raises:
            LifecycleError: the engines lack verified weights or KV caches.
        """
        return self._caller.call(RolloutServer.run, Command.CONTINUE_GENERATION)
