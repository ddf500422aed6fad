"""One generation request from its first byte to its last.

Always true:
- An admitted request leaves the gate exactly once: at its last byte, error or disconnect.
- A client gets one whole answer, or a cut connection, or (in an event stream) an error event;
  an engine's failure is never an error of the router, and it names the engine.
- A request is sent a second time only if no byte of an answer has come, once, and to another
  engine, through the gate like any other.  Whatever an engine answers is final.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from engines.errors import EngineUnreachable
from rollout.router import stamp
from rollout.router.exchange import Client
from rollout.router.gate import Admission, ConnectionFailure, Gate, GateState, Refusal, Waiter
from rollout.router.headers import to_client, to_engine
from rollout.router.transport import Request, Transport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """How requests ended that did not simply end."""

    num_retried: int = 0
    num_engine_failures: int = 0
    num_broken_replies: int = 0
    num_clients_left: int = 0


class Proxy:
    """The data path as an ASGI application.

    Args:
        hold_timeout_s: how long a request may wait at the gate.
    """

    def __init__(self, gate: Gate, transport: Transport, *, hold_timeout_s: float) -> None:
        self._gate = gate
        self._transport = transport
        self._hold_timeout_s = hold_timeout_s
        self._counts = Counts()

    def stats(self) -> dict[str, int]:
        return asdict(self._counts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, receive, send)
        try:
            await self._serve(scope, client)
        except asyncio.CancelledError:
            # Not passed on: this is the outermost frame, and the server would log a traceback.
            if client.has_left:
                self._counts.num_clients_left += 1
            elif client.has_started:
                await client.cut(is_flushed=False)
            else:
                client.unwatch()
                await _refuse(client, Refusal("the router is stopping", GateState.CLOSED))
        finally:
            client.unwatch()

    async def _serve(self, scope: Scope, client: Client) -> None:
        if (refusal := self._gate.would_refuse()) is not None:
            return await _refuse(client, refusal)
        body = await client.read_body()
        if body is None:
            self._counts.num_clients_left += 1
            return
        request = read_request(scope, body)
        if isinstance(request, str):
            return await client.answer(400, _error("bad_request", message=request), [])
        client.watch()
        failure: ConnectionFailure | None = None
        for _ in range(2):
            decision = await self._pass_gate(request, not_on=failure.engine_id if failure else "")
            if isinstance(decision, Refusal):
                if failure is None or decision.is_abort:
                    return await _refuse(client, decision)
                break
            if failure is not None:
                self._counts.num_retried += 1
            failure = await self._exchange(decision, request, client)
            if failure is None:
                return
            if client.has_started:
                self._counts.num_broken_replies += 1
                return await client.break_off(_engine_failure(failure))
        assert failure is not None
        headers = [(b"x-engine-id", failure.engine_id.encode())]
        await client.answer(502, _engine_failure(failure), headers)

    async def _pass_gate(self, request: Request, not_on: str) -> Admission | Refusal:
        decision = self._gate.enter(rid=request.rid, num_bytes=len(request.body), not_on=not_on)
        if not isinstance(decision, Waiter):
            return decision
        loop = asyncio.get_running_loop()
        decided: asyncio.Future[Admission | Refusal] = loop.create_future()

        def decide(outcome: Admission | Refusal) -> None:
            if not decided.done():  # cancelled just now: ``leave`` below gives it back
                decided.set_result(outcome)

        decision.on_decision = decide
        timer = loop.call_later(self._hold_timeout_s, self._gate.expire, decision)
        try:
            return await decided
        except asyncio.CancelledError:
            self._gate.leave(decision)
            raise
        finally:
            timer.cancel()

    async def _exchange(
        self, admission: Admission, request: Request, client: Client
    ) -> ConnectionFailure | None:
        """Send, and pass the answer on; what failed, if the engine did."""
        member = admission.member
        try:
            reply = await self._transport.send(
                member.engine_id,
                member.endpoint,
                request,
                request.body_under(admission.weight_version),
            )
            try:
                await client.start(
                    reply.status,
                    to_client(
                        reply.headers, reply.status, member.engine_id, admission.weight_version
                    ),
                )
                while True:
                    chunk = await reply.read()
                    if reply.is_at_end:
                        break
                    await client.write(chunk)
            finally:
                reply.close()
        except EngineUnreachable as error:
            self._counts.num_engine_failures += 1
            failure = self._gate.report_failure(admission, request.target, str(error))
            logger.warning(
                "engine %s failed %s %s: %s",
                failure.engine_id,
                request.method,
                request.target,
                failure.message,
                extra={"engine_id": failure.engine_id, "rid": request.rid},
            )
            return failure
        finally:
            self._gate.leave(admission)
        await client.write(chunk, is_last=True)
        return None


def read_request(scope: Scope, body: bytes) -> Request | str:
    """The request for an engine; or, in words, why it cannot be passed on."""
    try:
        target = scope["raw_path"].decode("ascii")
        query = scope["query_string"].decode("ascii")
    except UnicodeDecodeError:
        return "path and query must be percent-encoded"
    if ".." in scope["path"].split("/"):
        return "path must not contain .."
    if query:
        target = f"{target}?{query}"
    request = Request(scope["method"], target, to_engine(scope["headers"]), body)
    if scope["path"] == "/generate" and request.method == "POST" and stamp.is_stampable(body):
        has_rid, rid = stamp.find(body, "rid")
        request.is_rid_ours = not has_rid
        request.rid = rid if isinstance(rid, str) else "" if has_rid else stamp.new_rid()
        request.is_extra_key_ours = not stamp.find(body, "extra_key")[0]
    return request


async def _refuse(client: Client, refusal: Refusal) -> None:
    kind = "aborted" if refusal.is_abort else "unavailable"
    payload = _error(
        kind,
        message=refusal.message,
        gate=refusal.gate.value,
        reason=refusal.reason,
        phase=refusal.phase,
    )
    if refusal.is_abort:
        await client.answer(499, payload, [])
    else:
        retry_after = (b"retry-after", str(refusal.retry_after_s).encode())
        await client.answer(503, payload, [retry_after])


def _engine_failure(failure: ConnectionFailure) -> dict[str, Any]:
    message = f"engine {failure.engine_id} failed {failure.operation}: {failure.message}"
    return _error("engine_failure", engine=failure.engine_id, message=message)


def _error(kind: str, **fields: str) -> dict[str, Any]:
    return {"error": {"type": kind, **fields}}
