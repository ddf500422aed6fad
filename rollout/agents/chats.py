"""Chats of agents in sessions: ``/sessions/{id}/v1`` is a base URL of OpenAI's protocol.

Always true: engines get token ids.  A turn's prompt begins with the exact ids of the turn it
continues, so a chat survives its engine as any other ``/generate`` request does.  Templates and
tokenizers run in threads, and for long chats in a process: the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TypeVar, TypeVarTuple

from engines.protocol import GenerateReply
from rollout.agents.failures import ChatFailure, failure
from rollout.agents.model.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from rollout.agents.model.tool_calls import Answer, unread_call
from rollout.agents.plan import (
    Ended,
    Plan,
    Progress,
    history_in,
    new_id,
    plan_in,
    plan_of_folder,
    read_reply,
)
from rollout.agents.turns.store import Session, SessionStore
from rollout.agents.turns.tree import Generated, Turn
from rollout.agents.wire.answers import ChatAnswer, as_events
from rollout.agents.wire.chat_request import ChatRequest
from rollout.agents.wire.messages import BadChat, Message
from rollout.router.continuation.contracts import Texts, contract_in
from rollout.router.http.fast_json import dumps
from rollout.router.http.reading_process import ReadingFailed, ReadingProcess
from rollout.rules.contract import Contract

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_NUM_THREADS = 2
_MOST_AT_ONCE = 4096
_MOST_BYTES_AT_ONCE = 1 << 30
_MOST_BYTES_IN_THREAD = 1 << 16
_NUM_READ = 4
_DONE_EVENT = b"data: [DONE]\n\n"


class ChatSessions:
    """Answers the chats of a router's sessions.

    Attributes:
        store: the sessions; used on the event loop only.

    Args:
        find_folder: finds the folder of tokenizer and template; called at the first chat.
        generate: takes a session's id, a body of ``/generate``, the session if it stays with
            the weights of its first turn, and what the tokens have to fulfil; gives the tokens so
            far, at last the end; raises ``ChatFailure``.
        reading: where long chats are read.
        tool_call_parser: name of the form of tool calls; ``auto`` for the template's.
    """

    def __init__(
        self,
        store: SessionStore,
        find_folder: Callable[[], Awaitable[str]],
        generate: Callable[
            [str, bytes, Session | None, Contract], AsyncGenerator[Progress | Ended, None]
        ],
        reading: ReadingProcess,
        *,
        now_s: Callable[[], float],
        tool_call_parser: str = "auto",
    ) -> None:
        self.store = store
        self._generate = generate
        self._reading = reading
        self._now_s = now_s
        self._model = _ChatModel(find_folder, tool_call_parser)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "chat-template")
        self._num_running = 0
        self._num_bytes = 0
        self._unread_calls: set[str] = set()  # beginnings that were reported

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- one turn ---------------------------------------------------------------------------

    async def answer(
        self, session_id: str, body: bytes, texts: Texts = ()
    ) -> AsyncGenerator[bytes, None]:
        """Lines of a head that name the engine, then the body in pieces: a JSON object, or events.
        The first ones come when the engine has replied.

        Args:
            texts: fields of the request's contract that are headers.

        Raises:
            BadChat: template or request do not fit, or the contract is none.
            ChatFailure: there is no answer.
        """
        num_bytes = len(body)
        if why := self.store.why_closed(session_id):
            raise failure(410, "session_closed", why)
        if why := self.store.why_full(session_id, self._now_s()):
            raise failure(507, "sessions_full", why)
        if self._num_running >= _MOST_AT_ONCE:
            raise failure(503, "unavailable", f"{_MOST_AT_ONCE} chats of sessions are under way")
        if self._num_bytes + num_bytes > _MOST_BYTES_AT_ONCE:
            message = f"chats of sessions under way take {self._num_bytes} bytes"
            raise failure(503, "unavailable", message)
        session = self.store.begin_turn(session_id, self._now_s())
        self._num_running += 1
        self._num_bytes += num_bytes
        try:
            plan = await self._planned(session_id, session, body)
            del body
            contract = _contract_of(texts, plan.chat)
            stays = plan.chat.stays or bool(session.names)
            replies = self._generate(session_id, plan.body, session if stays else None, contract)
            plan = replace(plan, body=b"")
            written = self._written(session_id, session, plan, replies)
            async with aclosing(replies), aclosing(written) as parts:
                async for part in parts:
                    yield part
        finally:
            self._num_running -= 1
            self._num_bytes -= num_bytes
            self.store.end_turn(session_id, session, self._now_s())

    async def _planned(self, session_id: str, session: Session, body: bytes) -> Plan:
        """The turn; what holds the interpreter's lock for long is done in another process.

        Raises:
            BadChat: template or request do not fit.
            ChatFailure: it goes on with a chat that a lost router had.
        """
        is_long = len(body) > _MOST_BYTES_IN_THREAD
        try:
            if is_long:
                history, begun = await self._reading.call(history_in, body, client=session_id)
            else:
                history, begun = await self._in_thread(history_in, body)
            # What begins in the middle of a chat would be a sample without its first turns.
            is_begun = not session.tree.turns and any(history.is_answer)
            if is_begun and (why := self.store.why_lost(session_id)):
                raise failure(410, "session_lost", why)
            tokenizer = await self._model.load(self._in_thread)
            known = session.tree.known(history, begun)
            if is_long or len(known.ids) > _MOST_BYTES_IN_THREAD:
                return await self._reading.call(
                    plan_of_folder, *self._model.key, body, known, client=session_id
                )
            return await self._in_thread(plan_in, tokenizer, body, known)
        except ReadingFailed as error:
            raise failure(503, "unavailable", str(error)) from error

    async def _in_thread(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _written(
        self,
        session_id: str,
        session: Session,
        plan: Plan,
        replies: AsyncGenerator[Progress | Ended, None],
    ) -> AsyncGenerator[bytes, None]:
        """The response, and the turn into the session's tree before its last byte."""
        chat, tokenizer = plan.chat, self._model.tokenizer
        assert tokenizer is not None
        head = {"id": f"chatcmpl-{new_id()}", "created": int(time.time()), "model": chat.model}
        token_texts = tokenizer.token_texts if chat.wants_logprobs else None
        reader = tokenizer.reader if chat.calls_tools else None
        writer = ChatAnswer(head, reader, token_texts)
        has_begun = False
        try:
            async for reply in replies:
                if isinstance(reply, Ended):
                    continue
                begin = writer.num_tokens_sent
                ids, logprobs = reply.ids[begin:], reply.logprobs_from(begin)
                if payloads := writer.piece(reply.text, ids, logprobs):
                    if not has_begun:
                        yield reply.signed
                    has_begun = True
                    yield as_events(payloads)
            assert isinstance(reply, Ended)
            ended, whole = reply, reply.reply
            is_long = len(whole.text) + len(whole.output_ids) > _MOST_BYTES_IN_THREAD
            do = self._in_thread if is_long else _at_once
            with _not_recorded():
                answer, generated = await do(read_reply, reader, ended, chat.tools)
            if reader is not None:
                self._warn_of_unread_call(unread_call(answer), reader.form.name)
            message = {**answer.message(), "content": chat.begun + answer.content}
            turn = _keep(session, plan, generated, whole, message)
            self.store.num_turns[plan.prompt.drift] += 1
        except ChatFailure as error:
            if not has_begun:
                raise
            yield b"data: " + (error.body.replace(b"\n", b" ")) + b"\n\n" + _DONE_EVENT
            return
        end = await do(_end_of_response, writer, chat, answer, turn, plan.num_prompt)
        if not has_begun:
            yield ended.signed
        yield end

    def _warn_of_unread_call(self, begin: str, form: str) -> None:
        if begin and begin not in self._unread_calls:  # the model writes the same in every turn
            self._unread_calls.add(begin)
            logger.warning(
                "an answer has a tool call that begins with %r and was not read: it is not complete"
                " or not in the form %s (router.tool_call_parser); such calls stay in the text",
                begin,
                form,
            )


class _ChatModel:
    """The tokenizer and the template of a model, loaded at the first chat.

    Attributes:
        tokenizer: None until it is loaded.
    """

    def __init__(self, find_folder: Callable[[], Awaitable[str]], tool_call_parser: str) -> None:
        self.tokenizer: ChatTokenizer | None = None
        self._find_folder = find_folder
        self._folder = ""
        self._tool_call_parser = tool_call_parser
        self._loading = asyncio.Lock()

    @property
    def key(self) -> tuple[str, str]:
        """What another process loads the same with."""
        return self._folder, self._tool_call_parser

    async def load(self, in_thread: Callable[..., Awaitable[ChatTokenizer]]) -> ChatTokenizer:
        """The tokenizer.  If it cannot be loaded, the next chat tries again."""
        if self.tokenizer is None:
            async with self._loading:
                if self.tokenizer is None:
                    self._folder = await self._find_folder()
                    self.tokenizer = await in_thread(load_chat_tokenizer, *self.key)
        return self.tokenizer


async def _at_once(work: Callable[[*Ts], T], *arguments: *Ts) -> T:
    return work(*arguments)


def _contract_of(texts: Texts, chat: ChatRequest) -> Contract:
    try:
        return contract_in(texts, chat.contract)
    except ValueError as error:
        raise BadChat(str(error)) from None


def _end_of_response(
    writer: ChatAnswer, chat: ChatRequest, answer: Answer, turn: Turn, num_prompt: int
) -> bytes:
    if not chat.is_streamed:
        return dumps(writer.whole(answer, turn, num_prompt))
    return as_events(writer.last(answer, turn, num_prompt, usage=chat.wants_usage)) + _DONE_EVENT


def _keep(
    session: Session, plan: Plan, generated: Generated, reply: GenerateReply, answer: Message
) -> Turn:
    num_computed = plan.num_prompt + len(generated.ids) - 1
    with _not_recorded():
        experts = session.tree.new_experts(plan.prompt, reply.routed_experts, num_computed)
        made = replace(generated, experts=experts)
        return session.tree.add(plan.history, plan.prompt, made, answer)


@contextmanager
def _not_recorded() -> Iterator[None]:
    try:
        yield
    except (ValueError, OverflowError, TypeError) as error:
        raise failure(502, "not_recorded", str(error)) from None
