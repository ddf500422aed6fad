"""The handle of one server: its commands, and pushes to it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Unpack, overload

from engines.protocol import GenerateReply, SamplingParams
from rollout.config import ServerConfig, WeightUpdate
from rollout.control.engine.logprob_check import check_expected, prompts_of
from rollout.control.server.server import RolloutServer
from rollout.core.arguments import check_kind, check_number
from rollout.core.errors import ConfigError, WeightMismatch
from rollout.core.optional_deps import optional_import
from rollout.core.pending import Pending, PendingWithTurn
from rollout.core.types import EngineReport, EngineStatus, ServerStatus, StepReport
from rollout.driver.client.agent_session import AgentSession
from rollout.driver.client.sample_requests import SampleOptions, is_batch, make_requests
from rollout.rules.canary import Logprobs, Prompt
from rollout.rules.lifecycle import Command
from rollout.runtime.handle.offload_window import (
    WITHOUT_KV,
    BeforeKv,
    OffloadWindow,
    check_before_kv,
)
from rollout.runtime.handle.push_builder import PushBuilder, remote_engines
from rollout.runtime.handle.sample_client import ReplyStream, SampleClient
from rollout.runtime.handle.transport import Caller
from rollout.weights.format.named import named_pairs
from rollout.weights.push.push_version import checked_version
from rollout.weights.push.transport_choice import NEAR_ONLY, check_window, choose_transport
from rollout.weights.push.weight_push import WeightPush

if TYPE_CHECKING:
    from rollout.runtime.handle.pusher import Pusher
    from rollout.weights.tensors import NamedTensors, NameMap

P = ParamSpec("P")


class ServerHandle:
    """The handle of one rollout server.  It can be pickled at any time, without its open pushes."""

    def __init__(self, name: str, config: ServerConfig, caller: Caller) -> None:
        self.name = name
        self._caller = caller
        self._url = ""
        self._push_builder = PushBuilder(config, caller)
        self._config = config
        self._expected: Logprobs = ()
        self._has_pusher = False
        self._samples: SampleClient | None = None

    @property
    def url(self) -> str:
        """Base URL of the router: ``/generate``, ``/v1/...`` go here.

        Raises:
            RolloutError: the deployment is closed.
        """
        if not self._url:
            self._url = self.status().result().router_url
        return self._url

    @property
    def weight_version(self) -> int:
        """The version that the server has published last.

        Raises:
            RolloutError: the deployment is closed.
        """
        return self.status().result().weight_version

    def __repr__(self) -> str:
        # Without a call: the address is shown once it is known.
        url = f", url={self._url!r}" if self._url else ""
        return f"ServerHandle({self.name!r}{url}, backend={self._caller.backend!r})"

    def __reduce__(self) -> tuple[type[ServerHandle], tuple[str, ServerConfig, Caller]]:
        return ServerHandle, (self.name, self._config, self._caller)

    # -- log-prob check ---------------------------------------------------------------------

    @property
    def canary_prompts(self) -> tuple[Prompt, ...]:
        """Token ids of the prompts of the log-prob check."""
        return prompts_of(self._config.lifecycle, self._config.model_path)

    def expect(self, logprobs: Sequence[Sequence[float]]) -> None:
        """Set the log-probs of the trainer's model for ``canary_prompts`` with the next push.

        Engines with other log-probs are fenced, even if their fingerprints are right.

        Args:
            logprobs: for each prompt, of its tokens after the first.
                ``weights.tensors.canary_logprobs`` computes them with a transformers model.

        Raises:
            WeightMismatch: the numbers of prompts or tokens differ.
        """
        try:
            expected = tuple(tuple(map(float, values)) for values in logprobs)
        except (TypeError, ValueError) as error:
            raise WeightMismatch(f"log-probs are a list of floats per prompt: {error}") from None
        check_expected(expected, self.canary_prompts)
        self._expected = expected

    # -- whole transitions ------------------------------------------------------------------

    def serve_weights(
        self,
        named_tensors: NamedTensors | WeightPush,
        version: int | None = None,
        *,
        name_map: NameMap | None = None,
        before_kv: BeforeKv | None = None,
    ) -> Pending[StepReport]:
        """These weights, verified and serving, in whatever phase the engines are.

        Engines that serve are paused for it; released memory is resumed.  If it fails, the gate
        stays closed; call it again to continue.  With ``weights.prove_first_push``, the first call
        is ``prove_push_path``.

        Args:
            named_tensors: tensors by checkpoint name, with the checkpoint's shapes, or an existing
                push.  Tensors that are sharded over several ranks need ``pusher``.
            version: the new weight version; by default one more than the last.
            name_map: maps the trainer's names and fused tensors to the checkpoint's; see
                ``rollout.weights.tensors.NameMap``.
            before_kv: frees memory of the trainer that the KV cache needs.  It runs after the
                weights are verified, in the thread that waits in ``result()`` or ``await``; if
                no thread or task waits, the call stops there.  If it raises, so does the call:
                the engines hold the new weights and do not serve, and ``serve()`` continues.

        Raises:
            WeightMismatch: the tensors do not fit the model, or the version was used for others;
                nothing was sent.
            PhaseFailed: from ``result()`` or ``await``: too few engines hold the weights.
        """
        check_before_kv(before_kv)
        push = self._made(named_tensors, version, name_map)
        if before_kv is None:
            return self._sent(RolloutServer.serve_weights, push)
        first = self._sent(RolloutServer.serve_weights, push, Command.VERIFY)
        return self._with_turn(first, before_kv)

    def serve(self, *, before_kv: BeforeKv | None = None) -> Pending[StepReport]:
        """Serve the weights that the engines hold, in whatever phase they are.

        They were pushed before, or have survived the release (``weights_cpu_backup``).

        Args:
            before_kv: see ``serve_weights``.

        Raises:
            LifecycleError: from ``result()`` or ``await``: the release discarded the weights, so
                ``serve_weights`` must push them.
        """
        check_before_kv(before_kv)
        if before_kv is None:
            return self._caller.call(RolloutServer.serve)
        first = self._caller.call(RolloutServer.serve, Command.VERIFY)
        return self._with_turn(first, before_kv)

    def give_memory(self) -> Pending[StepReport]:
        """Free the engines' memory for the trainer, in whatever phase they are.

        Engines that serve are paused and flushed first.  The report comes after the memory is
        free; its ``freed_bytes`` is what was measured, in bytes.  If it fails, call it again.

        Raises:
            PhaseFailed: from ``result()`` or ``await``: memory of an engine is not free, or too
                few engines are left.
        """
        return self._caller.call(RolloutServer.give_memory)

    def _with_turn(self, first: Pending[StepReport], before_kv: BeforeKv) -> Pending[StepReport]:
        return PendingWithTurn(
            first,
            before_kv,
            lambda: self._caller.call(RolloutServer.serve),
            StepReport.merged,
            WITHOUT_KV,
        )

    def prove_push_path(
        self,
        named_tensors: NamedTensors | WeightPush,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
    ) -> Pending[StepReport]:
        """Before the first push: check that a push arrives as the checkpoint does.

        The engines copy their weights in host memory, overwrite them with noise, get this push as
        any other, and compare.  An engine whose weights differ is fenced.

        Args:
            named_tensors: the weights of ``model_path``, as the trainer holds them.
            version: the version of this push; by default one more than the last.
            name_map: see ``serve_weights``.

        Raises:
            LifecycleError: an engine cannot compare, or was pushed to; nothing was changed.
            PhaseFailed: weights differ; the message names them.
        """
        push = self._made(named_tensors, version, name_map)
        return self._sent(RolloutServer.prove_push_path, push)

    def sync_base(
        self, named_tensors: NamedTensors, *, version: int | None = None
    ) -> Pending[StepReport] | None:
        """With ``update: lora``, at the start: push the trainer's base weights.

        Args:
            named_tensors: by checkpoint name, with the checkpoint's shapes.
            version: the new weight version; by default one more than the last.

        Returns None and sends nothing if the engines loaded the same weights from ``model_path``.

        Raises:
            WeightMismatch: they do not fit the model; nothing was sent.
        """
        chosen = self._next(version)
        pairs = list(named_pairs(named_tensors))
        if not self._push_builder.base_differs(pairs):
            return None
        return self.serve_weights(self.make_base_push(pairs, chosen))

    def offloaded(
        self,
        weights: Callable[[], NamedTensors] | None = None,
        *,
        version: int | None = None,
        before_kv: BeforeKv | None = None,
    ) -> OffloadWindow:
        """``with server.offloaded():`` the trainer uses the GPUs; also ``async with``.

        Args:
            weights: called when the block ends, for the tensors to push.
            version: of the push; by default one more than the last.
            before_kv: called after the weights are verified; see ``serve_weights``.

        Raises:
            ConfigError: the push at its end would be refused.  Nothing is offloaded.
        """
        check_before_kv(before_kv)
        if weights is not None and not callable(weights):
            raise ConfigError(
                f"offloaded(weights) takes a function that returns tensors, not a "
                f"{type(weights).__name__}; push tensors with window.push(tensors)"
            )
        if not self._has_pusher:  # whose push would end the window
            check_window(self._config.weights, is_copy=weights is None)
        chosen = None if version is None else checked_version(version)
        check_reach = self._check_reach if self._pushes_near else None
        return OffloadWindow(self, weights, chosen, before_kv, check_reach=check_reach)

    # -- one phase at a time ----------------------------------------------------------------
    # Each runs one command of the lifecycle, and is refused in every other phase.  Use them to do
    # something between two phases; ``give_memory`` and ``serve_weights`` run all that are needed.

    def pause_generation(self) -> Pending[StepReport]:
        """Close the gate and stop generation; ``lifecycle.drain`` says what becomes of requests.

        Raises:
            LifecycleError: from ``result()`` or ``await``, here and in the next six: the command
                is not legal in this phase; the error names those that are.
            PhaseFailed: too few engines are left.
        """
        return self._caller.call(RolloutServer.pause_generation)

    def flush_cache(self) -> Pending[StepReport]:
        """Wait until no request is in flight, and drop the prefix caches.

        Raises:
            LifecycleError: generation is not paused.
        """
        return self._caller.call(RolloutServer.flush_cache)

    def release_memory_occupation(self) -> Pending[StepReport]:
        """Release the memory of the groups that offload; ``freed_bytes`` is measured.

        Raises:
            LifecycleError: the caches are not flushed.
        """
        return self._caller.call(RolloutServer.release_memory_occupation)

    def onload_weights(self) -> Pending[StepReport]:
        """Resume the memory of the weights; what it holds is not trusted yet.

        Raises:
            LifecycleError: the memory is not released.
        """
        return self._caller.call(RolloutServer.onload_weights)

    def update_weights(
        self,
        named_tensors: NamedTensors | WeightPush,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
    ) -> Pending[StepReport]:
        """Push new weights to engines that are flushed, or whose weights are onloaded.

        The engines neither verify them nor serve.

        Args:
            named_tensors, version, name_map: see ``serve_weights``.

        Raises:
            WeightMismatch: as ``serve_weights``.
            LifecycleError: from ``result()`` or ``await``: the engines cannot take weights now.
        """
        push = self._made(named_tensors, version, name_map)
        return self._sent(RolloutServer.update_weights, push)

    def verify(self) -> Pending[StepReport]:
        """Check that every engine holds the weights that were pushed last.

        Raises:
            LifecycleError: they have no weights.
        """
        return self._caller.call(RolloutServer.verify)

    def onload_kv(self) -> Pending[StepReport]:
        """Resume the memory of KV caches and CUDA graphs.

        Raises:
            LifecycleError: the weights are not verified.
        """
        return self._caller.call(RolloutServer.onload_kv)

    def continue_generation(self) -> Pending[StepReport]:
        """Generate again, and open the gate.

        Raises:
            LifecycleError: the engines lack verified weights or KV caches.
        """
        return self._caller.call(RolloutServer.continue_generation)

    # -- engines ----------------------------------------------------------------------------

    def remove_engine(self, engine_id: str, *, keep_process: bool = False) -> Pending[EngineReport]:
        """Remove an engine while the others serve: drain, free and measure its memory, end it.

        Args:
            engine_id: as in ``status``.
            keep_process: it only sleeps, with its memory released; ``add_engine`` wakes it.

        Raises:
            LifecycleError: from ``result()`` or ``await``: there is no such engine, or too few
                would remain.
        """
        check_kind("keep_process", keep_process, bool, "True or False")
        return self._caller.call(RolloutServer.remove_engine, engine_id, keep_process)

    def add_engine(self, engine_id: str) -> Pending[EngineStatus]:
        """Start or wake a removed engine; it serves after its weights are verified.

        Args:
            engine_id: one of the group's ``vacant_slots`` in ``status``.

        Raises:
            LifecycleError: from ``result()`` or ``await``: no engine of that id was removed.
        """
        return self._caller.call(RolloutServer.add_engine, engine_id)

    def status(self) -> Pending[ServerStatus]:
        """Phase, engines, versions, gate; works also while a command runs.

        Raises:
            RolloutError: the deployment is closed.
        """
        return self._caller.call(RolloutServer.status)

    # -- samples ----------------------------------------------------------------------------

    @overload
    def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        **options: Unpack[SampleOptions],
    ) -> Pending[GenerateReply]: ...

    @overload
    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        **options: Unpack[SampleOptions],
    ) -> Pending[list[GenerateReply]]: ...

    def generate(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        **options: Unpack[SampleOptions],
    ) -> Pending[GenerateReply] | Pending[list[GenerateReply]]:
        """Sample completions; one that loses its engine continues on another.

        Args:
            token_ids: a prompt, for one reply; or a list of prompts, for a list of replies: the
                ``sampling.n`` replies to the first prompt, then those to the second.
            sampling: for all prompts; by default SGLang's defaults.
            request_id: for ``abort``: no other call under way may have it.  By default random.
            options: see ``SampleOptions``.

        Raises:
            ConfigError: an argument is wrong; nothing was sent.
            GenerationFailed: from ``result()`` or ``await``: requests had no reply.  It has the
                replies to the others.
        """
        requests = make_requests(token_ids, sampling, request_id, **options)
        client = self._sample_client()
        if is_batch(token_ids):
            return client.generate(requests, request_id)
        return client.generate_one(requests[0], request_id)

    def stream(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        **options: Unpack[SampleOptions],
    ) -> ReplyStream:
        """``generate`` of one prompt, with the reply as it comes.

        Args:
            token_ids, sampling, request_id, options: see ``generate``.

        Raises:
            ConfigError: an argument is wrong, or there are several prompts; nothing was sent.
        """
        if is_batch(token_ids):
            raise ConfigError("stream takes one prompt; call it for each, or use generate")
        request = make_requests(token_ids, sampling, request_id, **options)[0]
        return self._sample_client().stream(request, request_id)

    def session(self, session_id: str = "") -> AgentSession:
        """A conversation for an agent with an OpenAI client; its samples have exact token ids.

        Args:
            session_id: letters, digits and ``._-``; by default random.  The same id continues the
                same session, from any process.

        Raises:
            ConfigError: the id has other characters.
        """
        return self._sample_client().session(self.url, session_id)

    def abort(self, request_id: str) -> Pending[None]:
        """End the requests of one ``generate`` or ``stream``, which any process may have called.

        Each then has its reply: the tokens so far and the finish reason ``abort``.  An id that is
        not under way is no error.

        Args:
            request_id: that of the call.

        Raises:
            ConfigError: the id is empty.
            GenerationFailed: from ``result()`` or ``await``: router or engine did not take it.
        """
        return self._sample_client().abort(request_id)

    def _sample_client(self) -> SampleClient:
        if self._samples is None or self._samples.pid != os.getpid():
            caller = self._caller

            async def find_url() -> str:
                return (await caller.call(RolloutServer.status)).router_url

            self._samples = SampleClient(find_url, self._config.router)
        return self._samples

    # -- pushes -----------------------------------------------------------------------------

    def make_push(
        self,
        named_tensors: NamedTensors,
        version: int | None = None,
        name_map: NameMap | None = None,
    ) -> WeightPush:
        """Copy tensors into a push; the trainer may free them afterwards.

        Args:
            named_tensors, version, name_map: see ``serve_weights``.

        Raises:
            WeightMismatch: they do not fit the model.
        """
        return self._push_builder.full(
            named_tensors, self._next(version), name_map=name_map, may_stream=False
        )

    def make_base_push(self, named_tensors: NamedTensors, version: int | None = None) -> WeightPush:
        """With ``update: lora``: a push of all base weights, or of base and adapter ``merged``.

        Args:
            named_tensors, version: see ``serve_weights``.

        Raises:
            WeightMismatch: they do not fit the model.
        """
        return self._push_builder.full(
            named_tensors, self._next(version), may_stream=False, contents=WeightUpdate.FULL
        )

    def base_differs(self, named_tensors: NamedTensors) -> bool:
        """Whether any tensor differs from the weights at ``model_path``.

        Args:
            named_tensors: by checkpoint name, with the checkpoint's shapes.

        Raises:
            WeightMismatch: they do not fit the model.
        """
        return self._push_builder.base_differs(named_tensors)

    def make_adapter_push(
        self,
        named_tensors: NamedTensors,
        config: Mapping[str, Any],
        version: int | None = None,
    ) -> WeightPush:
        """With ``update: lora``: copy an adapter into a push.

        Args:
            named_tensors: with PEFT's names.
            config: PEFT's ``adapter_config.json``: at least ``r`` and ``lora_alpha``.
            version: the new weight version; by default one more than the last.

        Raises:
            WeightMismatch: it does not fit the model.
        """
        return self._push_builder.adapter(named_tensors, config, self._next(version))

    def prepare(
        self, named_tensors: NamedTensors | WeightPush, version: int | None = None
    ) -> WeightPush:
        """A new or existing push, shipped: ready for the server.

        Args:
            named_tensors, version: see ``serve_weights``.

        Raises:
            WeightMismatch: they do not fit the model.
        """
        if isinstance(named_tensors, WeightPush):
            return self._shipped(named_tensors)
        return self._shipped(self.make_push(named_tensors, version))

    def pusher(self, group: Any = None, *, rank_timeout_s: float = 30.0) -> Pusher:
        """Pushes from every rank of the trainer; a collective: every rank calls it, once.

        Args:
            group: a process group of torch.distributed; None for all ranks, or for a single
                process without torch.distributed.
            rank_timeout_s: a push fails on all ranks if one is silent for so many seconds.

        Raises:
            ConfigError: an argument is wrong, or torch is not installed.
        """
        with optional_import("embedded", "pushing weights needs torch, which is not installed"):
            from rollout.runtime.handle.pusher import Pusher
            from rollout.weights.ranks.rank_link import link_ranks
        check_number("rank_timeout_s", rank_timeout_s, least=1)
        link = link_ranks(self._caller.own_host(), group, answer_s=rank_timeout_s / 4)
        self._has_pusher = True
        return Pusher(self._config, self._caller, link, timeout_s=rank_timeout_s)

    @property
    def _pushes_near(self) -> bool:
        """Whether pushes of this handle reach engines on this host alone."""
        weights = self._config.weights
        is_frozen = weights.update is WeightUpdate.FROZEN
        return weights.transport in NEAR_ONLY and not is_frozen and not self._has_pusher

    def _check_reach(self, status: ServerStatus) -> None:
        """Raise ConfigError if the transport cannot reach an engine from this process."""
        remote = remote_engines(status, self._caller)
        choose_transport(self._config.weights.transport, remote, "")

    def end_push(self, push: WeightPush) -> None:
        """Free the resources of a push in this process.  Calls that send it do so themselves.

        Args:
            push: what ``make_push`` and the like returned.

        Raises:
            ConfigError: it is no push.
        """
        check_kind("push", push, WeightPush, "what make_push returned")
        self._push_builder.end(push.version)

    def close(self) -> None:
        """End all pushes and remove their files; the server keeps running."""
        self._push_builder.close()
        self._samples = None

    def _next(self, version: int | None) -> int:
        if version is not None:
            return checked_version(version)
        return self.weight_version + 1

    def _made(
        self,
        named_tensors: NamedTensors | WeightPush,
        version: int | None,
        name_map: NameMap | None,
    ) -> WeightPush:
        if isinstance(named_tensors, WeightPush):
            return named_tensors
        return self._push_builder.full(
            named_tensors, self._next(version), name_map=name_map, may_stream=True
        )

    def _sent(
        self,
        method: Callable[Concatenate[RolloutServer, WeightPush, P], Awaitable[StepReport]],
        push: WeightPush,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[StepReport]:
        pending = self._caller.call(method, self._shipped(push), *args, **kwargs)
        return self._push_builder.ended_with(pending, push)

    def _shipped(self, push: WeightPush) -> WeightPush:
        if self._expected:
            push, self._expected = replace(push, canary=self._expected), ()
        return self._caller.ship(push)
