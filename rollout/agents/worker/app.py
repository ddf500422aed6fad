"""One worker's HTTP application: chats below ``/sessions/{id}/v1``, and the turns they made.

Always true: a body has at most ``max_read_bytes`` and arrives at a least rate; a session of another
worker is refused with its address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from engines.http.trace_context import pass_on
from engines.process.background import Then, keep_task, start_task
from rollout.agents.chats import ChatSessions, readable
from rollout.agents.failures import ChatFailure, failure
from rollout.agents.router_link import RouterLink
from rollout.agents.turns.files import SessionFiles
from rollout.agents.turns.store import MAX_ID_CHARACTERS, SessionStore
from rollout.agents.turns.tree import Turn
from rollout.agents.wire.messages import BadChat
from rollout.agents.worker.metrics import metrics_text
from rollout.agents.worker.settings import WorkerSettings
from rollout.core.errors import ConfigError
from rollout.router.http.auth import BearerKeys
from rollout.router.http.fast_json import dumps
from rollout.router.http.incoming_body import LEAST_BYTES_PER_S, STALLED_S
from rollout.rules.contract import HEADERS
from rollout.rules.routing import worker_of

T = TypeVar("T")
CONTRACT_FIELDS = {header: field for field, header in HEADERS.items()}
_BAD_ID = f"a session id has at most {MAX_ID_CHARACTERS} printable characters"
_NO_COMPLETIONS = (
    "a session takes chats; send a prompt to /v1/completions with return_token_ids, or to "
    "/generate, whose replies have the token ids and log-probs"
)


_SWEEP_S = 1.0
_MODELS = "/v1/models"


def agents_app(settings: WorkerSettings, router_url: str) -> FastAPI:
    """The application, made on its event loop; its lifespan opens and closes the connections to the
    router, and closes the sessions' files.

    Raises:
        FolderInUse, NotOurs, OSError: the folder of its sessions cannot be used.
    """
    config = settings.config
    link = RouterLink(
        router_url,
        client_key=settings.client_key,
        control_key=settings.control_key,
        request_timeout_s=settings.request_timeout_s,
    )

    def now_s() -> float:
        return asyncio.get_running_loop().time()

    store = SessionStore(
        SessionFiles(settings.folder),
        max_bytes=config.max_session_bytes,
        max_sessions=config.max_sessions,
        ttl_s=config.session_ttl_s,
        now_s=now_s(),
    )

    async def find_folder() -> str:
        return config.tokenizer_path or await link.tokenizer_folder()

    chats = ChatSessions(
        store,
        find_folder,
        link,
        now_s=now_s,
        renderer=config.renderer,
        tool_call_parser=config.tool_call_parser,
    )

    async def sweep() -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            store.expire(now_s())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await link.open()
        await chats.open()
        sweeping = keep_task(sweep, "agents-sweep", Then.STARTS_AGAIN)
        try:
            yield
        finally:
            sweeping.cancel()
            await chats.close()
            await link.close()

    app = FastAPI(title="ray-rollout agents", lifespan=lifespan, redirect_slashes=False)
    app.state.chats = chats
    _add_checks(app, settings)
    _add_state(app, chats)
    _add_chats(app, chats, link, settings.max_read_bytes)
    _add_sessions(app, store)
    return app


def _add_checks(app: FastAPI, settings: WorkerSettings) -> None:
    """Refuse what has no key, or belongs to another worker."""
    keys = BearerKeys(settings.client_key, settings.control_key, _is_clients)

    class Checks:
        def __init__(self, app: Any) -> None:
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
                await _reply(refusal)(scope, receive, send)
            else:
                await self._app(scope, receive, send)

        def _refusal(self, scope: Any) -> ChatFailure | None:
            path: str = scope["path"]
            if not keys.admit(scope["headers"], path, is_generation=False):
                return failure(401, "unauthorized", "a bearer key is needed")
            session_id = path.removeprefix("/sessions/").partition("/")[0]
            if not path.startswith("/sessions/"):
                return None
            if len(session_id) > MAX_ID_CHARACTERS or not session_id.isprintable():
                return failure(400, "bad_request", _BAD_ID)
            number = worker_of(session_id, settings.num_workers)
            if number == settings.number:
                return None
            message = (
                f"session {session_id} belongs to worker {number} of the agents, and this is "
                f"worker {settings.number}; policy.session(...).base_url has its address"
            )
            return failure(421, "misdirected", message)

    app.add_middleware(Checks)


def _is_clients(path: str) -> bool:
    return path == _MODELS or (path.startswith("/sessions/") and "/v1/" in path)


def _add_state(app: FastAPI, chats: ChatSessions) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while the worker runs."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(metrics_text(chats.store), media_type="text/plain; version=0.0.4")


def _add_chats(app: FastAPI, chats: ChatSessions, link: RouterLink, max_bytes: int) -> None:
    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def chat_completions(session_id: str, request: Request) -> Response:
        """One turn: OpenAI's chat completion, whose history keeps its exact token ids."""
        try:
            body = await _body_of(request, max_bytes)
            pass_on(request.headers)
            texts = [
                (CONTRACT_FIELDS[name], value)
                for name, value in request.headers.items()
                if name in CONTRACT_FIELDS
            ]
            pieces, body = chats.answer(session_id, body, texts), b""
            signed = await _unless_left(request, anext(pieces))
            first = await anext(pieces)
            assert isinstance(signed, Mapping)
            assert isinstance(first, bytes)
            headers = dict(signed)
            if first.startswith(b"data:"):
                events = _with(first, pieces)
                return StreamingResponse(events, headers=headers, media_type="text/event-stream")
            await pieces.aclose()
            return Response(first, headers=headers, media_type="application/json")
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

    @app.get(_MODELS)
    @app.get("/sessions/{session_id}/v1/models")
    async def models() -> Response:
        """The names that an engine's model is served under."""
        try:
            status, body = await link.get(_MODELS)
            return Response(body, status, media_type="application/json")
        except ChatFailure as error:
            return _reply(error)


def _add_sessions(app: FastAPI, store: SessionStore) -> None:
    @app.get("/sessions/{session_id}")
    async def turns(session_id: str) -> Response:
        """The turns of a session, in the order in which they ended."""
        try:
            with readable():
                session = await store.get(session_id)
        except ChatFailure as error:
            return _reply(error)
        if session is None:
            return _reply(_no_session(session_id))
        parts = _parts(session_id, list(session.tree.turns))
        return StreamingResponse(parts, media_type="application/json")

    @app.delete("/sessions/{session_id}")
    async def delete(session_id: str) -> Response:
        """Delete a session with its turns; a later turn of this id gets 410."""
        if not await store.close(session_id):
            return _reply(_no_session(session_id))
        return JSONResponse({"session_id": session_id})


async def _body_of(request: Request, max_bytes: int) -> bytes:
    """All of a request's body; ``request.body()`` would keep it as long as the request.

    Raises:
        ChatFailure: it is too long, arrives too slowly, or does not end.
    """
    parts, num_bytes = [], 0
    try:
        async with asyncio.timeout(STALLED_S) as limit:
            began_s = asyncio.get_running_loop().time()
            async for part in request.stream():
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    message = f"the body is over {max_bytes} bytes (router.max_read_bytes)"
                    raise failure(413, "too_large", message)
                limit.reschedule(began_s + STALLED_S + num_bytes / LEAST_BYTES_PER_S)
    except TimeoutError:
        raise failure(408, "timeout", "the body arrives too slowly") from None
    except ClientDisconnect:
        raise failure(499, "client_left", "the client left") from None
    return b"".join(parts)


async def _with(first: bytes, pieces: AsyncGenerator[Any, None]) -> AsyncIterator[bytes]:
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
