"""The routes of sessions: chats below ``/sessions/{id}/v1``, and the turns they made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from engines.protocol import Endpoint
from rollout.core.errors import ConfigError
from rollout.router.chat_sessions import ChatFailure, ChatSessions, failure
from rollout.router.engine_queries import EngineQueryClient, error_reply, first_reply
from rollout.router.http.fast_json import dumps
from rollout.router.http.request import MAX_SESSION_CHARACTERS
from rollout.router.proxy.context import Proxy
from rollout.router.sessions.chat_tokenizer import ChatTokenizer
from rollout.router.sessions.messages import BadChat
from rollout.router.sessions.tree import Turn

T = TypeVar("T")


def chat_sessions(proxy: Proxy, client: EngineQueryClient) -> ChatSessions:
    """The chats of this router; ``client`` finds the folder of the engines' tokenizer."""

    async def find_folder() -> str:
        if proxy.config.tokenizer_path:
            return proxy.config.tokenizer_path
        reply = await first_reply(proxy.gate, client, "/model_info")
        if reply.status_code == 404:  # of vLLM
            reply = await first_reply(proxy.gate, client, "/v1/models")
        try:
            info = json.loads(bytes(reply.body))
            if "data" in info:
                return str(info["data"][0]["root"])
            return str(info.get("tokenizer_path") or info["model_path"])
        except (ValueError, LookupError, AttributeError):
            message = "no engine names the folder of its tokenizer; set router.tokenizer_path"
            raise failure(503, "unavailable", message) from None

    def keep_decode(tokenizer: ChatTokenizer) -> None:
        proxy.decode = tokenizer.tokenizer.decode

    return ChatSessions(
        proxy.chats,
        find_folder,
        key=proxy.config.client_key,
        timeout_s=proxy.config.request_timeout_s,
        now_s=lambda: proxy.now_s(),
        on_tokenizer=keep_decode,
        tool_call_parser=proxy.config.tool_call_parser,
    )


def add_chats(app: FastAPI, proxy: Proxy, chats: ChatSessions) -> None:
    """Add the routes."""

    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def chat_completions(session_id: str, request: Request) -> Response:
        """One turn: OpenAI's chat completion, whose history keeps its exact token ids."""
        if len(session_id) > MAX_SESSION_CHARACTERS or not session_id.isprintable():
            message = f"a session id has at most {MAX_SESSION_CHARACTERS} printable characters"
            return error_reply(400, "bad_request", message)
        try:
            chat = await chats.read(await request.body())
            router = Endpoint(*request.scope["server"])
            pieces = await _unless_left(request, chats.answer(session_id, chat, router))
            if chat.is_streamed:
                return StreamingResponse(pieces, media_type="text/event-stream")
            body = b"".join([piece async for piece in pieces])
            return Response(body, media_type="application/json")
        except (BadChat, RecursionError) as error:
            return error_reply(400, "bad_request", str(error))
        except ConfigError as error:
            return error_reply(501, "sessions_unavailable", str(error))
        except ChatFailure as error:
            after = {"retry-after": error.retry_after} if error.retry_after else None
            return Response(error.body, error.status, after, "application/json")

    @app.get("/sessions/{session_id}/turns")
    async def turns(session_id: str) -> Response:
        """The turns of a session's chats, in the order in which they ended."""
        session = proxy.chats.get(session_id)
        if session is None:
            message = f"there are no chats of session {session_id}"
            return JSONResponse({"error": {"type": "not_found", "message": message}}, 404)
        parts = _parts(session_id, list(session.tree.turns))
        return StreamingResponse(parts, media_type="application/json")


async def _parts(session_id: str, turns: list[Turn]) -> AsyncIterator[bytes]:
    """The JSON object, a turn at a time: all at once would keep other requests waiting."""
    yield b'{"session_id":%s,"turns":[' % dumps(session_id)
    for number, turn in enumerate(turns):
        yield (b"," if number else b"") + dumps(turn.payload())
        await asyncio.sleep(0)
    yield b"]}"


async def _unless_left(request: Request, work: Awaitable[T]) -> T:
    """Do ``work``; when the client leaves, it ends, and so does the request on its engine."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([doing, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise failure(499, "client_left", "the client left")
        return doing.result()
    finally:
        leaving.cancel()
        doing.cancel()
