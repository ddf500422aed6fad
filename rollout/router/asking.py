"""What the router asks engines for a client: what they are, and to abort.

Always true: an abort goes where its request is known to be, else to every engine that may hold it;
who could not be asked is named.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from engines.errors import EngineUnreachable
from rollout.router.control import ControlClient
from rollout.router.gate import Gate
from rollout.routing import Member, MemberState

logger = logging.getLogger(__name__)

_CAN_ANSWER = (MemberState.SERVING, MemberState.DRAINING, MemberState.ASLEEP)
_CAN_HOLD_REQUESTS = (MemberState.SERVING, MemberState.DRAINING)


def asking(gate: Gate, control: ControlClient) -> APIRouter:
    """Model info, from one engine that answers, and aborts."""
    routes = APIRouter()

    async def pass_on(request: Request) -> Response:
        return await _answer_of_one(gate, control, request.url.path)

    for path in ("/model_info", "/get_model_info", "/v1/models"):
        routes.add_api_route(path, pass_on, methods=["GET"])

    @routes.post("/abort_request")
    async def abort_request(request: Request) -> JSONResponse:
        """Abort where the rid is known to be; else on every engine that may hold it."""
        body = await request.body()
        try:
            asked = json.loads(body or b"{}")
            rid, is_for_all = str(asked.get("rid") or ""), bool(asked.get("abort_all"))
        except (ValueError, AttributeError):
            message = "the body must be a JSON object with rid or abort_all"
            return JSONResponse({"error": {"type": "bad_request", "message": message}}, 400)
        num_held, targets = _abort_here(gate, rid, is_for_all)
        failed = await _abort_on(control, targets, body)
        answer = {
            "engines": [member.engine_id for member in targets],
            "num_held": num_held,
            "failed": failed,
        }
        return JSONResponse(answer, 502 if failed else 200)

    return routes


async def _answer_of_one(gate: Gate, control: ControlClient, path: str) -> Response:
    """What the first of two engines answers; those that serve are asked first."""
    members = [member for member in gate.members if member.state in _CAN_ANSWER]
    members.sort(key=lambda member: _CAN_ANSWER.index(member.state))
    for member in members[:2]:
        try:
            reply = await control.ask(member, "GET", path)
        except EngineUnreachable as error:
            logger.warning("engine %s: %s: %s", member.engine_id, path, error)
            continue
        response = Response(reply.body, reply.status)
        length = (b"content-length", str(len(reply.body)).encode())
        response.raw_headers = [*reply.headers, length]
        return response
    message = f"no engine answers: {gate.members.why_none_serves()}"
    error_body = {"error": {"type": "unavailable", "message": message}}
    return JSONResponse(error_body, 503, {"retry-after": "2"})


def _abort_here(gate: Gate, rid: str, is_for_all: bool) -> tuple[int, list[Member]]:
    """Abort what waits at the gate: how many that were, and which engines are to be told."""
    num_held = gate.abort_held(None if is_for_all else rid) if rid or is_for_all else 0
    if rid or is_for_all:
        gate.mark_aborted(None if is_for_all else rid)
    targets = gate.holders(rid) if rid and not is_for_all else []
    if is_for_all or not (targets or num_held):
        targets = [member for member in gate.members if member.state in _CAN_HOLD_REQUESTS]
    return num_held, targets


async def _abort_on(
    control: ControlClient, members: Iterable[Member], body: bytes
) -> dict[str, str]:
    """Tell them all: the ids of those that did not take it, and why."""
    told = await asyncio.gather(*(_abort_on_one(control, member, body) for member in members))
    return {engine_id: why for engine_id, why in told if why}


async def _abort_on_one(control: ControlClient, member: Member, body: bytes) -> tuple[str, str]:
    """The engine's id, and why it did not take the abort; empty if it did."""
    try:
        reply = await control.ask(member, "POST", "/abort_request", body)
    except EngineUnreachable as error:
        logger.warning("engine %s: /abort_request: %s", member.engine_id, error)
        return member.engine_id, str(error)
    return member.engine_id, "" if reply.status < 400 else f"HTTP {reply.status}"
