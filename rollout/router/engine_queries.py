"""What the router requests from engines itself: model info and aborts.

Always true: an abort goes where its request is known to be, else to every engine that may hold it;
engines that did not take it are named.

The client shares nothing with generation: a busy data path never delays a probe or an abort, and a
stuck engine never fills its pool.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping

import aiohttp
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from engines.protocol.errors import EngineUnreachable
from engines.protocol.plain_text import describe
from rollout.router.gate.gate import Gate
from rollout.router.http.headers import to_client
from rollout.rules.routing import Backend, BackendState

logger = logging.getLogger(__name__)

_CAN_REPLY = (BackendState.SERVING, BackendState.DRAINING, BackendState.ASLEEP)
_CAN_HOLD_REQUESTS = (BackendState.SERVING, BackendState.DRAINING)
_LOST = (aiohttp.ClientError, OSError, TimeoutError)


class EngineQueryClient:
    """Sends single requests to engines.

    Args:
        connect_timeout_s: until the connection is established.
        total_timeout_s: until the last byte.
    """

    def __init__(self, *, connect_timeout_s: float, total_timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=total_timeout_s, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def query(self, member: Backend, method: str, path: str, body: bytes = b"") -> Response:
        """The complete reply, whatever its status, with the headers that go to a client.

        Raises:
            EngineUnreachable: no complete reply within the deadline.
        """
        assert self._session is not None, "query before open"
        try:
            async with self._session.request(
                method,
                member.endpoint.url + path,
                headers={"content-type": "application/json"} if body else {},
                data=body or None,
                allow_redirects=False,
            ) as response:
                reply = Response(await response.read(), response.status)
        except _LOST as error:
            raise EngineUnreachable(
                describe(error), engine=member.engine_id, operation=path
            ) from error
        lowered = [
            (name.lower(), value)
            for name, value in response.raw_headers
            if name.lower() != b"content-length"
        ]
        length = (b"content-length", str(len(reply.body)).encode())
        reply.raw_headers = [*to_client(lowered, member.engine_id, None), length]
        return reply


def add_engine_queries(app: FastAPI, gate: Gate, client: EngineQueryClient) -> None:
    """Add the routes for model info, from one engine that replies, and for aborts."""

    async def forward(path: str) -> Response:
        return await first_reply(gate, client, path)

    # The paths are written out: no part of what a client sends chooses an engine's endpoint.
    @app.get("/model_info")
    async def model_info() -> Response:
        """The model of an engine."""
        return await forward("/model_info")

    @app.get("/get_model_info")
    async def get_model_info() -> Response:
        """The model of an engine, by its old name."""
        return await forward("/get_model_info")

    @app.get("/v1/models")
    @app.get("/sessions/{session_id}/v1/models")
    async def models() -> Response:
        """The names that an engine's model is served under."""
        return await forward("/v1/models")

    @app.post("/abort_request")
    async def abort_request(request: Request) -> JSONResponse:
        """Abort on the engines that hold the rid, else on every engine that may hold it."""
        body = await request.body()
        try:
            order = json.loads(body or b"{}")
            rid, is_for_all = order.get("rid") or "", bool(order.get("abort_all"))
        except (ValueError, AttributeError, RecursionError):
            rid, is_for_all = None, False
        if not isinstance(rid, str):
            message = "the body must be a JSON object with rid or abort_all"
            return error_reply(400, "bad_request", message)
        num_held, targets = _abort_here(gate, rid, is_for_all)
        orders = [_abort_order(gate, one, rid, body) for one in targets]
        outcomes = await asyncio.gather(
            *(_abort_on(client, one, order) for one, order in zip(targets, orders, strict=True))
        )
        engines = [member.engine_id for member in targets]
        failed = {engine_id: why for engine_id, why in zip(engines, outcomes, strict=True) if why}
        result = {"engines": engines, "num_held": num_held, "failed": failed}
        return JSONResponse(result, 502 if failed else 200)


async def first_reply(gate: Gate, client: EngineQueryClient, path: str) -> Response:
    """The reply of the first of two engines; serving engines are tried first."""
    members = [member for member in gate.members if member.state in _CAN_REPLY]
    members.sort(key=lambda member: _CAN_REPLY.index(member.state))
    for member in members[:2]:
        if not member.of_kind.has_model_info and path != "/v1/models":
            message = f"{member.of_kind.title} engines have only /v1/models"
            return error_reply(404, "not_found", message)
        try:
            return await client.query(member, "GET", path)
        except EngineUnreachable as error:
            logger.warning("engine %s: %s: %s", member.engine_id, path, error)
    message = f"no engine replied: {gate.members.why_none_serves()}"
    return error_reply(503, "unavailable", message, {"retry-after": "2"})


async def tokenizer_folder(gate: Gate, client: EngineQueryClient) -> str:
    """The folder of the engines' tokenizer; empty if no engine names it."""
    reply = await first_reply(gate, client, "/model_info")
    if reply.status_code == 404:  # of vLLM
        reply = await first_reply(gate, client, "/v1/models")
    try:
        info = json.loads(bytes(reply.body))
        if "data" in info:
            return str(info["data"][0]["root"])
        return str(info.get("tokenizer_path") or info["model_path"])
    except (ValueError, LookupError, AttributeError):
        return ""


def error_reply(
    status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse({"error": {"type": kind, "message": message}}, status, headers)


def _abort_here(gate: Gate, rid: str, is_for_all: bool) -> tuple[int, list[Backend]]:
    """Abort held requests.  Returns how many there were, and which engines must abort too."""
    num_held, targets = 0, []
    if rid or is_for_all:
        aborted = None if is_for_all else rid
        num_held = gate.abort_held(aborted)
        gate.mark_aborted(aborted)
        targets = gate.engines_of(rid)
    if is_for_all or not (targets or num_held):
        targets = [member for member in gate.members if member.state in _CAN_HOLD_REQUESTS]
    return num_held, targets


def _abort_order(gate: Gate, member: Backend, rid: str, body: bytes) -> bytes:
    """The client's order as the engine takes it: some want each id, as their route names it."""
    forms = member.of_kind.aborted_ids
    if not forms:
        return body
    if not rid:
        return b"{}"
    rids = gate.rids_on(member.engine_id, rid) or [rid]
    return json.dumps(
        {"request_ids": [form.format(one) for one in rids for form in forms]}
    ).encode()


async def _abort_on(client: EngineQueryClient, member: Backend, body: bytes) -> str:
    """Why the engine did not take the abort; empty if it did."""
    path = member.of_kind.abort_path
    try:
        reply = await client.query(member, "POST", path, body)
    except EngineUnreachable as error:
        logger.warning("engine %s: %s: %s", member.engine_id, path, error)
        return str(error)
    return "" if reply.status_code < 400 else f"HTTP {reply.status_code}"
