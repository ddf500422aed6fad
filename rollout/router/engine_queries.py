"""What the router requests from engines itself: model info, loads and aborts.

Always true: an abort names requests by the ids that their clients know, and engines by those that
the router has given them; so it goes where the request is, and ends no other one.  Engines that did
not take it are named.

The client shares nothing with generation: a busy data path never delays a probe or an abort, and a
stuck engine never fills its pool.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence

import aiohttp
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from engines.http.key_check import is_control
from engines.plain_json import WRONG_FORM, read_json
from engines.protocol.errors import EngineUnreachable
from engines.protocol.plain_text import describe, shortened
from rollout.router.gate.aborts import AbortOrder
from rollout.router.gate.gate import Gate
from rollout.router.http.headers import to_client
from rollout.router.tokenizer_file import folder_in
from rollout.rules.routing import Backend, BackendState

logger = logging.getLogger(__name__)

_CAN_REPLY = (BackendState.SERVING, BackendState.DRAINING, BackendState.ASLEEP)
_CAN_HOLD_REQUESTS = (BackendState.SERVING, BackendState.DRAINING)
_MOST_ABORTS_AT_ONCE = 32
_TAKEN_WITHIN_S = 1.0
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
                headers=_headers(member, path, body),
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
    """Add the routes for model info, from one engine that replies, for loads and for aborts."""

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
    async def models() -> Response:
        """The names that an engine's model is served under."""
        return await forward("/v1/models")

    @app.get("/engines/{engine_id}/loads")
    async def loads(engine_id: str) -> Response:
        """The queue and the tokens of an engine, as it reports them: drivers have no key of it."""
        member = next(
            (candidate for candidate in gate.members if candidate.engine_id == engine_id), None
        )
        if member is None or member.state not in _CAN_REPLY:
            return error_reply(404, "not_found", "no such engine replies: see /engines")
        try:
            return await client.query(member, "GET", member.of_kind.loads_path)
        except EngineUnreachable as error:
            return error_reply(502, "unavailable", f"engine {member.engine_id}: {error}")

    @app.post("/abort_request")
    async def abort_request(request: Request) -> JSONResponse:
        """End what the order names, and nothing else: in the gate, and on the engines."""
        order = read_order(await request.body())
        if order is None:
            message = (
                "the body must be a JSON object with rid (an id, or a list of them), rid_prefix "
                "(the beginning of ids) or abort_all"
            )
            return error_reply(400, "bad_request", message)
        if order.prefix and order.prefix[-1].isalnum():
            message = (
                f"rid_prefix {shortened(order.prefix, 80)!r} ends with a letter or a digit, so it "
                "would also name ids that go on with others; end it with the sign that is behind "
                "it in the ids, as in 'r-1/', or list the ids under rid"
            )
            return error_reply(400, "bad_request", message)
        found = gate.abort(order)
        if order.is_for_all:  # also those that did not come through this router
            for member in gate.members:
                if member.state in _CAN_HOLD_REQUESTS:
                    found.add(member, [], is_left_to_it=True)
        slots = asyncio.Semaphore(_MOST_ABORTS_AT_ONCE)
        # By then the router has closed the connections of whole requests.
        until_s = asyncio.get_running_loop().time() + _TAKEN_WITHIN_S
        limits = dict.fromkeys(found.left_to)  # no other end than by the call
        outcomes = await asyncio.gather(
            *(
                _abort_on(client, slots, member, body, limits.get(engine_id, until_s))
                for engine_id, (member, rids) in found.engines.items()
                for body in _bodies(member, None if order.is_for_all else rids)
            )
        )
        failed = {engine_id: why for engine_id, why in outcomes if why}
        result = {
            "engines": list(found.engines),
            "num_held": found.num_held,
            "num_on_engines": found.num_on_engines,
            "failed": failed,
        }
        # A whole request that the router has sent ends all the same, as it leaves the engine.
        return JSONResponse(result, 502 if failed.keys() & found.left_to else 200)


def read_order(body: bytes) -> AbortOrder | None:
    """What the body of an abort names, or None if it is malformed."""
    try:
        order = read_json(body or b"{}")
        rids, prefix = order.get("rid") or [], order.get("rid_prefix") or ""
        is_for_all = bool(order.get("abort_all"))
    except (ValueError, AttributeError):
        return None
    rids = [rids] if isinstance(rids, str) else rids
    is_list = isinstance(rids, list) and all(isinstance(rid, str) for rid in rids)
    if not is_list or not isinstance(prefix, str):
        return None
    return AbortOrder(frozenset(filter(None, rids)), prefix, is_for_all)


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
    """The folder of the engines' tokenizer, or empty if no engine names it."""
    reply = await first_reply(gate, client, "/model_info")
    if reply.status_code == 404:  # of vLLM
        reply = await first_reply(gate, client, "/v1/models")
    try:
        return folder_in(read_json(bytes(reply.body)))
    except WRONG_FORM:
        return ""


def error_reply(
    status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse({"error": {"type": kind, "message": message}}, status, headers)


def _headers(member: Backend, path: str, body: bytes) -> dict[str, str]:
    kept = {"content-type": "application/json"} if body else {}
    return kept | member.access.headers(is_control=is_control(path))


def _bodies(member: Backend, rids: Sequence[str] | None) -> list[bytes]:
    """The orders to an engine to end these requests; None: all that it has."""
    forms = member.of_kind.aborted_ids
    if rids is None:
        return [b"{}" if forms else b'{"abort_all":true}']
    if not forms:  # one id in each
        return [json.dumps({"rid": rid}).encode() for rid in rids]
    return [
        json.dumps({"request_ids": [form.format(rid) for rid in rids for form in forms]}).encode()
    ]


async def _abort_on(
    client: EngineQueryClient,
    slots: asyncio.Semaphore,
    member: Backend,
    body: bytes,
    until_s: float | None,
) -> tuple[str, str]:
    """The engine's id, and why it did not take the abort, or empty if it did."""
    path = member.of_kind.abort_path
    try:
        async with asyncio.timeout_at(until_s), slots:
            reply = await client.query(member, "POST", path, body)
    except (EngineUnreachable, TimeoutError) as error:
        why = str(error) or f"no reply within {_TAKEN_WITHIN_S:g} s"
        logger.warning("engine %s: %s: %s", member.engine_id, path, why)
        return member.engine_id, why
    return member.engine_id, "" if reply.status_code < 400 else f"HTTP {reply.status_code}"
