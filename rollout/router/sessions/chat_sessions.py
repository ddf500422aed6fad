"""Chats of agents in sessions: ``/sessions/{id}/v1`` is a base URL of OpenAI's protocol.

Always true: engines get token ids.  A turn's prompt begins with the exact ids of the turn it
continues, so a chat survives its engine as any other ``/generate`` request does.  Templates and
tokenizers run in threads of their own, and the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from engines.protocol import GenerateReply
from rollout.router.http.fast_json import dumps
from rollout.router.sessions.alignment import compared, continuation, drift_of, tokenised
from rollout.router.sessions.answers import ChatAnswer, as_events
from rollout.router.sessions.chat_request import ChatRequest, read_chat
from rollout.router.sessions.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from rollout.router.sessions.messages import History, Message, history_of
from rollout.router.sessions.session_store import Session, SessionStore
from rollout.router.sessions.tool_calls import Answer, AnswerReader, unread_call
from rollout.router.sessions.tool_forms import schemas_of
from rollout.router.sessions.tree import Generated, Prompt, Turn
from rollout.rules.continuation import spans_of

logger = logging.getLogger(__name__)

_NUM_THREADS = 2
_MOST_AT_ONCE = 4096
_MOST_BYTES_AT_ONCE = 1 << 30
_MOST_BYTES_ON_LOOP = 1 << 16
_DONE_EVENT = b"data: [DONE]\n\n"


class ChatFailure(Exception):
    """A turn without an answer, and the response that says so."""

    def __init__(self, status: int, body: bytes, retry_after: str = "") -> None:
        super().__init__(body[:200].decode(errors="replace"))
        self.status = status
        self.body = body
        self.retry_after = retry_after


def failure(status: int, kind: str, message: str) -> ChatFailure:
    return ChatFailure(status, dumps({"error": {"type": kind, "message": message}}))


@dataclass(frozen=True, slots=True)
class Plan:
    """A turn that is about to be generated: all ids of its prompt, and the new ones.

    Attributes:
        tokenizer: that it was made with.
        reader: of an answer that may have tool calls.
    """

    history: History
    ids: list[int]
    prompt: Prompt
    tokenizer: ChatTokenizer
    reader: AnswerReader | None


class ChatSessions:
    """Answers the chats of a router's sessions.

    Attributes:
        store: the sessions; used on the event loop only.

    Args:
        find_folder: finds the folder of tokenizer and template; called at the first chat.
        generate: takes a session's id and a body of ``/generate``, and gives the replies so far,
            the last one finished; raises ``ChatFailure``.
        tool_call_parser: name of the form of tool calls; ``auto`` for the template's.
        on_tokenizer: gets the tokenizer when it is loaded.
    """

    def __init__(
        self,
        store: SessionStore,
        find_folder: Callable[[], Awaitable[str]],
        generate: Callable[[str, dict[str, Any]], AsyncGenerator[GenerateReply, None]],
        *,
        now_s: Callable[[], float],
        on_tokenizer: Callable[[ChatTokenizer], None],
        tool_call_parser: str = "auto",
    ) -> None:
        self.store = store
        self._find_folder = find_folder
        self._generate = generate
        self._now_s = now_s
        self._tool_call_parser = tool_call_parser
        self._on_tokenizer = on_tokenizer
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "chat-template")
        self._tokenizer: ChatTokenizer | None = None
        self._loading = asyncio.Lock()
        self._num_running = 0
        self._num_bytes = 0
        self._unread_calls: set[str] = set()  # beginnings that were reported

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- one turn ---------------------------------------------------------------------------

    async def answer(self, session_id: str, chat: ChatRequest) -> AsyncIterator[bytes]:
        """The response's body in pieces: one, or the events of a stream.

        The first piece is there when the engine has replied.

        Raises:
            BadChat: template or request do not fit.
            ChatFailure: there is no answer.
        """
        pieces = self._run(session_id, chat)
        first = await anext(pieces)

        async def all_pieces() -> AsyncGenerator[bytes, None]:
            async with aclosing(pieces):
                yield first
                async for piece in pieces:
                    yield piece

        return all_pieces()

    async def _run(self, session_id: str, chat: ChatRequest) -> AsyncGenerator[bytes, None]:
        if why := self.store.why_closed(session_id):
            raise failure(410, "session_closed", why)
        if why := self.store.why_full(session_id, self._now_s()):
            raise failure(507, "sessions_full", why)
        if self._num_running >= _MOST_AT_ONCE:
            raise failure(503, "unavailable", f"{_MOST_AT_ONCE} chats of sessions are under way")
        if self._num_bytes + chat.num_bytes > _MOST_BYTES_AT_ONCE:
            message = f"chats of sessions under way take {self._num_bytes} bytes"
            raise failure(503, "unavailable", message)
        session = self.store.begin_turn(session_id, self._now_s())
        self._num_running += 1
        self._num_bytes += chat.num_bytes
        try:
            plan = await self._planned(session, chat)
            has_marks = plan.reader is not None and plan.reader.needs_special_tokens
            body = chat.body(plan.ids, special_tokens=has_marks)
            replies = self._generate(session_id, body)
            written = self._written(session, chat, plan, replies)
            async with aclosing(replies), aclosing(written) as parts:
                async for part in parts:
                    yield part
        finally:
            self._num_running -= 1
            self._num_bytes -= chat.num_bytes
            self.store.end_turn(session_id, session, self._now_s())

    async def read(self, body: bytes) -> ChatRequest:
        """The request in ``body``; a long one is read in a thread.

        Raises:
            BadChat: as ``read_chat`` does.
        """
        if len(body) <= _MOST_BYTES_ON_LOOP:
            return read_chat(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, read_chat, body)

    async def _planned(self, session: Session, chat: ChatRequest) -> Plan:
        tokenizer = await self._loaded()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, make_plan, tokenizer, session, chat)

    async def _loaded(self) -> ChatTokenizer:
        """The tokenizer.  If it cannot be loaded, the next chat tries again."""
        if self._tokenizer is None:
            async with self._loading:
                if self._tokenizer is None:
                    folder, loop = await self._find_folder(), asyncio.get_running_loop()
                    self._tokenizer = await loop.run_in_executor(
                        self._threads, load_chat_tokenizer, folder, self._tool_call_parser
                    )
                    self._on_tokenizer(self._tokenizer)
        return self._tokenizer

    async def _written(
        self,
        session: Session,
        chat: ChatRequest,
        plan: Plan,
        replies: AsyncGenerator[GenerateReply, None],
    ) -> AsyncGenerator[bytes, None]:
        """The response, and the turn into the session's tree before its last byte."""
        head = {"id": f"chatcmpl-{_new_id()}", "created": int(time.time()), "model": chat.model}
        token_texts = plan.tokenizer.token_texts if chat.wants_logprobs else None
        writer, reader = ChatAnswer(head, plan.reader, token_texts), plan.reader
        has_begun = False
        try:
            async for reply in replies:
                if reply.finish_reason is not None:
                    continue
                logprobs = reply.output_logprobs or ()
                if payloads := writer.piece(reply.text, reply.output_ids, logprobs):
                    has_begun = True
                    yield as_events(payloads)
            answer = Answer(reply.text)
            if reader is not None:
                answer = reader.read(reply.text, schemas_of(chat.tools), _new_id)
                self._warn_of_unread_call(unread_call(answer), reader.form.name)
            message = {**answer.message(), "content": chat.begun + answer.content}
            turn = _keep(session, plan, reply, message)
            self.store.num_turns[plan.prompt.drift] += 1
        except ChatFailure as error:
            if not has_begun:
                raise
            yield b"data: " + (error.body.replace(b"\n", b" ")) + b"\n\n" + _DONE_EVENT
            return
        num = len(plan.ids)
        if chat.is_streamed:
            yield as_events(writer.last(answer, turn, num, usage=chat.wants_usage)) + _DONE_EVENT
        else:
            yield dumps(writer.whole(answer, turn, num))

    def _warn_of_unread_call(self, begin: str, form: str) -> None:
        if begin and begin not in self._unread_calls:  # the model writes the same in every turn
            self._unread_calls.add(begin)
            logger.warning(
                "an answer has a tool call that begins with %r and was not read: it is not complete"
                " or not in the form %s (router.tool_call_parser); such calls stay in the text",
                begin,
                form,
            )


def make_plan(tokenizer: ChatTokenizer, session: Session, chat: ChatRequest) -> Plan:
    """The prompt of a turn.

    Raises:
        BadChat: the template refuses the messages.
    """
    template = tokenizer.bound(chat.tools, chat.options)
    history = history_of(chat.messages, chat.tools)
    match = session.tree.match(history)
    reader = tokenizer.reader if chat.calls_tools else None
    text = template.render(chat.messages, for_answer=True) + chat.begun
    turn = match.turn
    new: list[int] | None = None
    if chat.begun and (unfinished := session.tree.unfinished(history, chat.begun)) is not None:
        turn, new = unfinished, []
    elif turn is not None:
        mark = os.urandom(8).hex()
        new = continuation(template, chat.messages, match.num_known, turn.end, mark)
        if new is not None and chat.begun:
            new += tokenised(template, chat.begun)[0]
    if turn is None or new is None:
        ids, checkpoints = tokenised(template, text)
        drift = drift_of(None, is_fork=match.is_fork or turn is not None)
        prompt = Prompt(None, ids, drift, checkpoints=checkpoints)
        return Plan(history, ids, prompt, tokenizer, reader)
    ids = session.tree.ids(turn) + new
    known = session.tree.checkpoints(turn)
    difference, checkpoints = compared(template, text, ids, known)
    drift = drift_of(difference, is_fork=match.is_fork)
    prompt = Prompt(turn.number, new, drift, difference, checkpoints)
    return Plan(history, ids, prompt, tokenizer, reader)


def _keep(session: Session, plan: Plan, reply: GenerateReply, answer: Message) -> Turn:
    ids = reply.output_ids
    finish = reply.finish_reason
    assert finish is not None
    spans = spans_of(reply.weight_versions, reply.weight_version, len(ids))
    num_computed = len(plan.ids) + len(ids) - 1
    try:
        experts = session.tree.new_experts(plan.prompt, reply.routed_experts, num_computed)
        logprobs = reply.output_logprobs or ()
        text = reply.text if plan.reader is None else plan.reader.visible(reply.text)
        made = Generated(ids, logprobs, spans, finish, text, experts)
        return session.tree.add(plan.history, plan.prompt, made, answer)
    except ValueError as error:
        raise failure(502, "not_recorded", str(error)) from None


def _new_id() -> str:
    return os.urandom(12).hex()
