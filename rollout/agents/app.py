"""The routes of sessions: chats below ``/sessions/{id}/v1``, and the turns they made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from engines.process.background import start_task
from rollout.agents.chats import ChatSessions
from rollout.agents.failures import ChatFailure, failure
from rollout.agents.plan import headers_of
from rollout.agents.turns.store import MAX_ID_CHARACTERS
from rollout.agents.turns.tree import Turn
from rollout.agents.wire.messages import BadChat
from rollout.core.errors import ConfigError
from rollout.router.http.fast_json import dumps
from rollout.rules.contract import HEADERS

T = TypeVar("T")
CONTRACT_FIELDS = {header: field for field, header in HEADERS.items()}
_BAD_ID = f"a session id has at most {MAX_ID_CHARACTERS} printable characters"
_NO_COMPLETIONS = (
    "a session takes chats; send a prompt to /v1/completions with return_token_ids, or to "
    "/generate, whose replies have the token ids and log-probs"
)


def add_sessions(app: FastAPI, chats: ChatSessions) -> None:
    """Add the routes."""
    store = chats.store

    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def chat_completions(session_id: str, request: Request) -> Response:
        """One turn: OpenAI's chat completion, whose history keeps its exact token ids."""
        try:
            if _is_bad(session_id):
                raise BadChat(_BAD_ID)
            # Not ``request.body()``, which keeps it as long as the request.
            body = b"".join([part async for part in request.stream()])
            texts = [
                (CONTRACT_FIELDS[name], value)
                for name, value in request.headers.items()
                if name in CONTRACT_FIELDS
            ]
            pieces, body = chats.answer(session_id, body, texts), b""
            signed = headers_of(await _unless_left(request, anext(pieces)))
            first = await anext(pieces)
            if first.startswith(b"data:"):
                events = _with(first, pieces)
                return StreamingResponse(events, headers=signed, media_type="text/event-stream")
            return Response(first, headers=signed, media_type="application/json")
        except (BadChat, RecursionError) as error:
            return _reply(failure(400, "bad_request", str(error)))
        except ConfigError as error:
            return _reply(failure(501, "sessions_unavailable", str(error)))
        except ChatFailure as error:
            return _reply(error)

    @app.post("/sessions/{session_id}/v1/completions")
    async def completions(session_id: str) -> Response:
        """Refused: a prompt has no messages that a later turn could continue."""
        return _reply(failure(400, "bad_request", _NO_COMPLETIONS))

    @app.get("/sessions/{session_id}")
    async def turns(session_id: str) -> Response:
        """The turns of a session, in the order in which they ended."""
        if _is_bad(session_id):
            return _reply(failure(400, "bad_request", _BAD_ID))
        session = store.get(session_id)
        if session is None and (why := store.why_lost(session_id)):
            return _reply(failure(410, "session_lost", why))
        if session is None:
            return _reply(_no_session(session_id))
        parts = _parts(session_id, list(session.tree.turns))
        return StreamingResponse(parts, media_type="application/json")

    @app.delete("/sessions/{session_id}")
    async def delete(session_id: str) -> Response:
        """Delete a session with its turns; a later turn of this id gets 410."""
        if _is_bad(session_id):
            return _reply(failure(400, "bad_request", _BAD_ID))
        if not store.close(session_id):
            return _reply(_no_session(session_id))
        return JSONResponse({"session_id": session_id})


def _is_bad(session_id: str) -> bool:
    return len(session_id) > MAX_ID_CHARACTERS or not session_id.isprintable()


async def _with(first: bytes, pieces: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(pieces):
        yield first
        async for piece in pieces:
            yield piece


def _no_session(session_id: str) -> ChatFailure:
    return failure(404, "not_found", f"there is no session {session_id}")


def _reply(error: ChatFailure) -> Response:
    after = {"retry-after": error.retry_after} if error.retry_after else None
    return Response(error.body, error.status, after, "application/json")


async def _parts(session_id: str, turns: list[Turn]) -> AsyncIterator[bytes]:
    """The JSON object, a piece at a time: all at once would keep other requests waiting."""
    yield b'{"session_id":%s,"turns":[' % dumps(session_id)
    for number, turn in enumerate(turns):
        yield b"," if number else b""
        for piece in turn.json():
            yield piece
            await asyncio.sleep(0)
    yield b"]}"


async def _unless_left(request: Request, work: Awaitable[T]) -> T:
    """Do ``work``; when the client leaves, it ends, and so does the request on its engine."""
    doing = start_task(work, "chat-turn")
    leaving = start_task(request.receive(), "chat-client")
    try:
        await asyncio.wait([doing, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise failure(499, "client_left", "the client left")
        return doing.result()
    finally:
        leaving.cancel()
        doing.cancel()
