"""Samples for any process that has a handle: requests to the server's router, from a thread.

Always true: every request asks the router for token-level failover, so it survives its engine; the
caller's thread and event loop are never blocked by it.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace

from engines.process.background import Then, keep_task, start_task
from engines.protocol import FinishReason, GenerateReply
from rollout.config import RouterConfig
from rollout.core.errors import GenerationFailed, VersionUnavailable
from rollout.core.pending import LoopThread, Pending
from rollout.driver.client.agent_session import AgentSession
from rollout.driver.client.generation_client import (
    FailureKind,
    GenerationError,
    GenerationRequest,
)
from rollout.driver.client.http_client import HttpGenerationClient
from rollout.driver.client.sample_requests import rid_prefix
from rollout.rules.contract import NO_CONTRACT, Contract
from rollout.runtime.calls.making import making

_TIMEOUT_S = 600.0
# Each open request has a connection, and a process has a limited number of open files.
_MOST_AT_ONCE = 512
# A request may reach the router behind the order that aborts it.
_ABORT_AGAIN_S = 0.1
_MOST_ORDERS = 20
_LOOPS: dict[int, LoopThread] = {}


@dataclass(eq=False)
class _Call:
    """A call of this process that is under way.

    Attributes:
        is_aborted: none of its requests is sent from now on.
        is_over: all of them have ended.
    """

    is_aborted: bool = False
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class SampleClient:
    """Sends requests for samples to one server's router.

    Args:
        find_url: finds the router's address; called at the first request.

    Attributes:
        pid: the process that it works in.
    """

    def __init__(self, find_url: Callable[[], Awaitable[str]], router: RouterConfig) -> None:
        self.pid = os.getpid()
        self._find_url = find_url
        self._keys = (router.client_key, router.control_key)
        self._opened: asyncio.Task[HttpGenerationClient] | None = None
        self._slots = asyncio.Semaphore(_MOST_AT_ONCE)
        self._calls: dict[str, set[_Call]] = {}

    def generate(
        self, requests: Sequence[GenerationRequest], request_id: str
    ) -> Pending[list[GenerateReply]]:
        """The reply to each request.

        Raises:
            GenerationFailed: one or more have none; all others have ended, too.
        """
        return _loop(self.pid).submit(self._generate(requests, request_id))

    def generate_one(self, request: GenerationRequest, request_id: str) -> Pending[GenerateReply]:
        """The reply to one request; raises as ``generate`` does."""

        async def first() -> GenerateReply:
            return (await self._generate([request], request_id))[0]

        return _loop(self.pid).submit(first())

    def stream(self, request: GenerationRequest, request_id: str) -> ReplyStream:
        """The reply as it comes."""
        return ReplyStream(self._stream(request, request_id))

    def abort(self, request_id: str) -> Pending[None]:
        """End the requests of one call, from any process."""
        return _loop(self.pid).submit(self._abort(request_id, rid_prefix(request_id)))

    async def _abort(self, request_id: str, prefix: str) -> None:
        calls = list(self._calls.get(request_id, ()))
        for call in calls:
            call.is_aborted = True
        try:
            client = await self._client()
            for _ in range(_MOST_ORDERS):
                await client.order_abort(prefix)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ABORT_AGAIN_S):
                        for call in calls:
                            await call.is_over.wait()
                    break
        except GenerationError as error:
            raise GenerationFailed(f"cannot abort {request_id!r}: {error}") from None

    @contextmanager
    def _under_way(self, request_id: str) -> Iterator[_Call]:
        """Note a call for as long as its requests have not ended."""
        call, calls = _Call(), self._calls.setdefault(request_id, set())
        calls.add(call)
        try:
            yield call
        finally:
            call.is_over.set()
            calls.remove(call)
            if not calls:
                del self._calls[request_id]

    def session(
        self, urls: Sequence[str], session_id: str, contract: Contract = NO_CONTRACT
    ) -> AgentSession:
        """A session of chats, with the workers of agents at ``urls``."""
        key, control_key = self._keys
        submit = _loop(self.pid).submit
        return AgentSession(
            urls, session_id, key=key, control_key=control_key, submit=submit, contract=contract
        )

    async def _generate(
        self, requests: Sequence[GenerationRequest], request_id: str
    ) -> list[GenerateReply]:
        async def reply_to(request: GenerationRequest) -> GenerateReply | GenerationError:
            async with self._slots:
                if call.is_aborted:
                    return _aborted(request_id)
                try:
                    return _named(await client.generate(request), request_id)
                except GenerationError as error:
                    return _aborted(request_id) if _is_abort(error) else error

        with self._under_way(request_id) as call:
            client = await self._client()
            ended = await asyncio.gather(*map(reply_to, requests))
        replies = [reply if isinstance(reply, GenerateReply) else None for reply in ended]
        failures = {
            index: reply for index, reply in enumerate(ended) if isinstance(reply, GenerationError)
        }
        if failures:
            raise _failed(failures, replies)
        return [reply for reply in replies if reply is not None]

    async def _stream(
        self, request: GenerationRequest, request_id: str
    ) -> AsyncGenerator[GenerateReply, None]:
        with self._under_way(request_id) as call:
            client = await self._client()
            try:
                if call.is_aborted:
                    raise GenerationError("aborted", kind=FailureKind.ABORTED)
                async with aclosing(client.stream(request)) as replies:
                    async for reply in replies:
                        yield _named(reply, request_id)
            except GenerationError as error:
                if not _is_abort(error):
                    raise _failed({0: error}, [None]) from None
                yield _aborted(request_id)

    async def _client(self) -> HttpGenerationClient:
        """The connection to the router; the first request opens it."""
        opened = self._opened
        if opened is None or (opened.done() and (opened.cancelled() or opened.exception())):
            opened = self._opened = start_task(self._open(), "samples-open")
        return await asyncio.shield(opened)

    async def _open(self) -> HttpGenerationClient:
        key, control_key = self._keys
        client = HttpGenerationClient(
            await self._find_url(), timeout_s=_TIMEOUT_S, key=key, control_key=control_key
        )
        # A request under way holds this object, so none is cut off.
        weakref.finalize(self, _close_soon, asyncio.get_running_loop(), client)
        return client


class ReplyStream:
    """One reply as it comes: ``for`` in a thread, ``async for`` in a coroutine.

    Each item has everything so far, and the last one a finish reason.  A slow caller gets fewer
    items, never fewer tokens.  To leave the loop, or ``close``, ends the request at its engine.
    """

    def __init__(self, replies: AsyncGenerator[GenerateReply, None]) -> None:
        self._loop = _loop(os.getpid())
        self._news = asyncio.Event()
        self._newest: GenerateReply | None = None
        self._is_over = False
        self._reading = asyncio.run_coroutine_threadsafe(self._read(replies), self._loop.loop)

    def close(self) -> None:
        """End the request; nothing if it has ended."""
        self._reading.cancel()

    def __iter__(self) -> Iterator[GenerateReply]:
        try:
            while (reply := self._loop.submit(self._next()).result()) is not None:
                yield reply
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[GenerateReply]:
        try:
            while (reply := await self._loop.submit(self._next())) is not None:
                yield reply
        finally:
            self.close()

    def __enter__(self) -> ReplyStream:
        return self

    async def __aenter__(self) -> ReplyStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aexit__(self, *error: object) -> None:
        self.close()

    async def _read(self, replies: AsyncGenerator[GenerateReply, None]) -> None:
        try:
            async with aclosing(replies):
                async for reply in replies:
                    self._newest = reply
                    self._news.set()
        finally:
            self._is_over = True
            self._news.set()

    async def _next(self) -> GenerateReply | None:
        """The newest reply that was not taken, or None at the end."""
        if not self._reading.cancelled():
            await self._news.wait()
        reply, self._newest = self._newest, None
        if reply is not None:
            if not self._is_over:
                self._news.clear()
            return reply
        reading = asyncio.wrap_future(self._reading)
        await asyncio.wait([reading])
        if not reading.cancelled() and (error := reading.exception()) is not None:
            raise error
        return None


def _loop(pid: int) -> LoopThread:
    """The event loop of all clients of this process; a forked process gets one of its own."""
    with making():
        if pid not in _LOOPS:
            _LOOPS[pid] = LoopThread(f"samples-{pid}")
        return _LOOPS[pid]


def _close_soon(loop: asyncio.AbstractEventLoop, client: HttpGenerationClient) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(keep_task, client.close, "samples-close", Then.IS_OVER)


def _named(reply: GenerateReply, request_id: str) -> GenerateReply:
    return replace(reply, rid=request_id) if request_id else reply


def _is_abort(error: GenerationError) -> bool:
    return error.kind is FailureKind.ABORTED


def _aborted(request_id: str) -> GenerateReply:
    """The reply to a request that was aborted before its first token."""
    reason = FinishReason("abort", message="aborted before its first token")
    return GenerateReply(request_id, "", (), (), reason)


def _failed(
    errors: Mapping[int, GenerationError], replies: Sequence[GenerateReply | None]
) -> GenerationFailed:
    index, first = next(iter(errors.items()))
    several = len(replies) > 1
    what = f"{len(errors)} of {len(replies)} requests failed; request {index}" if several else ""
    message = f"{what}: {first}" if what else f"the request failed: {first}"
    failures = {index: str(error) for index, error in errors.items()}
    if any(error.kind is not FailureKind.VERSION for error in errors.values()):
        return GenerationFailed(message, failures=failures, replies=replies)
    known = [error.weight_version for error in errors.values() if error.weight_version is not None]
    newest = max(known, default=None)
    return VersionUnavailable(message, weight_version=newest, failures=failures, replies=replies)
