"""The handle of one server: its commands, and pushes to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from engines.protocol import GenerateReply, SamplingParams
from rollout.config import ServerConfig, WeightUpdate
from rollout.control.server.server import RolloutServer
from rollout.core.arguments import wrong
from rollout.core.pending import Pending
from rollout.core.types import ServerStatus, StepReport
from rollout.driver.client.agent_session import AgentSession
from rollout.driver.client.sample_requests import (
    SampleOptions,
    VersionOptions,
    is_batch,
    make_requests,
    version_contract,
)
from rollout.rules.lifecycle import Command
from rollout.runtime.calls.caller import Caller
from rollout.runtime.calls.making import making
from rollout.runtime.calls.phase_commands import PhaseCommands
from rollout.runtime.calls.sample_client import ReplyStream, SampleClient
from rollout.runtime.calls.server_engines import ServerEngines
from rollout.runtime.calls.server_pushes import ServerPushes, needs_torch
from rollout.runtime.calls.weight_checks import WeightChecks
from rollout.runtime.handle.offload_window import (
    BeforeKv,
    OffloadWindow,
    check_before_kv,
    with_before_kv,
)
from rollout.weights.push.push import Push
from rollout.weights.push.push_version import checked_version
from rollout.weights.routes.choice import NEAR_ONLY, check_reach, check_window
from rollout.weights.routes.nccl import check_nccl

if TYPE_CHECKING:
    from rollout.runtime.handle.pusher import Pusher
    from rollout.weights.tensors import NamedTensors, NameMap


class ServerHandle:
    """The handle of one rollout server.  It can be pickled at any time, without its open pushes.

    Attributes:
        name: of the server, as in ``servers`` of the configuration.
        phases: one command of the lifecycle at a time; see ``PhaseCommands``.
        engines: removes and adds engines; see ``ServerEngines``.
        checks: compares the engines' weights with the trainer's; see ``WeightChecks``.
    """

    def __init__(self, name: str, config: ServerConfig, caller: Caller) -> None:
        self.name = name
        self._caller = caller
        self._url = ""
        self._agents_urls: tuple[str, ...] = ()
        self._config = config
        self._pushes = ServerPushes(config, caller)
        self.phases = PhaseCommands(caller, self._pushes)
        self.engines = ServerEngines(caller)
        self.checks = WeightChecks(config, self._pushes)
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

    def status(self) -> Pending[ServerStatus]:
        """Phase, engines, versions, gate; works also while a command runs.

        Raises:
            RolloutError: the deployment is closed.
        """
        return self._caller.call(RolloutServer.status)

    def __repr__(self) -> str:
        # Without a call: the address is shown once it is known.
        url = f", url={self._url!r}" if self._url else ""
        return f"ServerHandle({self.name!r}{url}, backend={self._caller.backend!r})"

    def __reduce__(self) -> tuple[type[ServerHandle], tuple[str, ServerConfig, Caller]]:
        return ServerHandle, (self.name, self._config, self._caller)

    # -- whole transitions ------------------------------------------------------------------

    def push(
        self,
        named_tensors: NamedTensors | Push,
        version: int | None = None,
        *,
        name_map: NameMap | None = None,
        before_kv: BeforeKv | None = None,
    ) -> Pending[StepReport]:
        """These weights, verified and serving, in whatever phase the engines are.

        Engines that serve are paused for it; released memory is resumed.  If it fails, the gate
        stays closed; call it again to continue.  With ``weights.check_first_push``, the first call
        is ``checks.push_path``.

        Args:
            named_tensors: tensors by checkpoint name, with the checkpoint's shapes, or an existing
                push.  Tensors that are sharded over several ranks need ``pusher``.
            version: the new weight version; by default one more than the last.
            name_map: maps the trainer's names and fused tensors to the checkpoint's; a
                ``rollout.NameMap``.
            before_kv: frees memory of the trainer that the KV cache needs.  It runs after the
                weights are verified, in the thread that waits in ``result()`` or ``await``; if
                no thread or task waits, the call stops there.  If it raises, so does the call:
                the engines hold the new weights and do not serve, and ``serve()`` continues.
                If the engines were not offloaded, or the push path is checked, it runs after the
                push, while they serve.

        Raises:
            WeightMismatch: the tensors do not fit the model, or the version was used for others;
                nothing was sent.
            PhaseFailed: from ``result()`` or ``await``: too few engines hold the weights.
        """
        check_before_kv(before_kv)
        push = self._pushes.push_of(named_tensors, version, name_map)

        def begin(until: Command) -> Pending[StepReport]:
            return push.send(
                lambda weights: self._caller.call(
                    RolloutServer.push, self._pushes.server.shipped(weights), until
                )
            )

        return with_before_kv(
            begin,
            before_kv,
            lambda: self._caller.call(RolloutServer.serve),
            StepReport.merged,
            is_serving=lambda: self.status().result().gate == "open",
        )

    def serve(self, *, before_kv: BeforeKv | None = None) -> Pending[StepReport]:
        """Serve the published weights again, in whatever phase the engines are.

        The engines hold them, they have survived the release (``engine.weights_cpu_backup``), or
        ``weights.store`` or ``health.weights_path`` gives them back.

        Args:
            before_kv: see ``push``.

        Raises:
            LifecycleError: from ``result()`` or ``await``: the release discarded the weights and
                nothing keeps them, so ``push`` must push them.
        """
        check_before_kv(before_kv)

        def begin(until: Command = Command.CONTINUE_GENERATION) -> Pending[StepReport]:
            return self._caller.call(RolloutServer.serve, until)

        return with_before_kv(begin, before_kv, begin, StepReport.merged)

    def offload(self) -> Pending[StepReport]:
        """Free the engines' memory for the trainer, in whatever phase they are.

        With ``weights.update: full`` the weights are discarded, unless
        ``engine.weights_cpu_backup`` keeps them; without ``weights.store``, only a push serves
        again then.  Engines that serve are paused and flushed first.  The report comes after the
        memory is free; its ``freed_bytes`` is what was measured, in bytes.  If it fails, call it
        again.

        Raises:
            PhaseFailed: from ``result()`` or ``await``: memory of an engine is not free, or too
                few engines are left.
        """
        return self._caller.call(RolloutServer.offload)

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
            before_kv: called after the weights are verified; see ``push``.

        Raises:
            TypeError: ``weights`` or ``before_kv`` is no plain function.
            ConfigError: the push at its end would be refused.  Nothing is offloaded.
        """
        check_before_kv(before_kv)
        if weights is not None and not callable(weights):
            raise TypeError(
                f"offloaded(weights) takes a function that returns tensors, not a "
                f"{type(weights).__name__}; push tensors with window.push(tensors)"
            )
        if not self._has_pusher:  # whose push would end the window
            check_window(self._config.weights, is_copy=weights is None)
        chosen = None if version is None else checked_version(version)
        return OffloadWindow(
            self, self._pushes, weights, chosen, before_kv, check_reach=self._reach_check()
        )

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
            TypeError, ValueError: an argument is wrong; nothing was sent.
            GenerationFailed: from ``result()`` or ``await``: requests had no reply.  It has the
                replies to the others.
            VersionUnavailable: which is one: for all of them the reason was that no engine has
                the weight version that they want.
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
            TypeError, ValueError: an argument is wrong, or there are several prompts.  Nothing was
                sent.
        """
        if is_batch(token_ids):
            raise ValueError("stream takes one prompt; call it for each, or use generate")
        request = make_requests(token_ids, sampling, request_id, **options)[0]
        return self._sample_client().stream(request, request_id)

    def session(self, session_id: str = "", **versions: Unpack[VersionOptions]) -> AgentSession:
        """A conversation for an agent with an OpenAI client; its samples have exact token ids.

        Args:
            session_id: letters, digits and ``._-``; by default random.  The same id continues the
                same session, from any process.
            versions: see ``VersionOptions``.  Each turn of a client with the session's
                ``default_headers`` has them.

        Raises:
            TypeError, ValueError: the id has other characters, or a version is wrong.
            ConfigError: the server has no workers for sessions.
            RolloutError: the deployment is closed.
        """
        contract = version_contract(**versions)
        if self._config.agents.workers and not self._agents_urls:
            self._agents_urls = self.status().result().agents_urls
        return self._sample_client().session(self._agents_urls, session_id, contract)

    def abort(self, request_id: str) -> Pending[None]:
        """End the requests of one ``generate`` or ``stream``, which any process may have called.

        Each then has its reply: the tokens so far and the finish reason ``abort``.  An id that is
        not under way is no error.

        Args:
            request_id: that of the call.

        Raises:
            ValueError: the id is empty.
            GenerationFailed: from ``result()`` or ``await``: router or engine did not take it.
        """
        return self._sample_client().abort(request_id)

    def _sample_client(self) -> SampleClient:
        caller = self._caller

        async def find_url() -> str:
            return (await caller.call(RolloutServer.status)).router_url

        with making():
            if self._samples is None or self._samples.pid != os.getpid():
                self._samples = SampleClient(find_url, self._config.router)
            return self._samples

    # -- all ranks --------------------------------------------------------------------------

    def pusher(self, group: Any = None, *, rank_timeout_s: float = 30.0) -> Pusher:
        """Pushes from every rank of the trainer; a collective: every rank calls it, once.

        Args:
            group: a process group of torch.distributed, or None for all ranks, or for a single
                process without torch.distributed.
            rank_timeout_s: a push fails on all ranks if one is silent for so many seconds, or for
                nine tenths of ``lifecycle.update_timeout_s`` where that is less.

        Raises:
            ConfigError: an argument is wrong, torch is not installed, or a broadcast from here
                would fail.
        """
        with needs_torch():
            from rollout.runtime.handle.pusher import Pusher
            from rollout.weights.ranks.link import link_ranks
        if not rank_timeout_s >= 1:
            raise wrong("rank_timeout_s", rank_timeout_s, "at least 1")
        check_nccl(self._config, self._pushes.server.has_far_engines)
        link = link_ranks(self._caller.own_host(), group, answer_s=rank_timeout_s / 4)
        self._has_pusher = True
        pushes = self._pushes
        return Pusher(pushes.server, link, timeout_s=rank_timeout_s, idle_group=pushes.idle_group)

    def _reach_check(self) -> Callable[[ServerStatus], None] | None:
        """Raises ConfigError if a push of this handle would not reach an engine, which is known
        from a status, or None if each is reached."""
        weights, server = self._config.weights, self._pushes.server
        is_frozen = weights.update is WeightUpdate.FROZEN
        if weights.transport not in NEAR_ONLY or is_frozen or self._has_pusher:
            return None
        return lambda status: check_reach(
            weights.transport, [server.own_node], server.places(status)
        )

    def close(self) -> None:
        """Close all pushes and remove their files; the server keeps running."""
        self._pushes.close()
        self._samples = None


def pushes_of(server: ServerHandle) -> ServerPushes:
    """The pushes of a handle, for a transaction over several."""
    return server._pushes
