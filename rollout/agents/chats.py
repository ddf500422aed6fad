"""Chats of agents in sessions: ``/sessions/{id}/v1`` is a base URL of OpenAI's protocol.

Always true: engines get token ids.  A turn's prompt begins with the exact ids of the turn it
continues, so a chat survives its engine as any other ``/generate`` request does.  Templates and
tokenizers run in threads: the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import replace
from typing import TypeVar, TypeVarTuple

from engines.process.background import start_task
from engines.protocol import GenerateReply
from rollout.agents.answers import ChatAnswer, as_events
from rollout.agents.failures import MOST_AT_ONCE, ChatFailure, failure
from rollout.agents.model.answer_reader import Answer, unread_call
from rollout.agents.model.families import ChatModel, load_chat_model
from rollout.agents.plan import (
    Ended,
    Plan,
    Progress,
    make_plan,
    measured_plan,
    new_id,
    read_in,
    read_reply,
    reading_of,
)
from rollout.agents.router_link import Pin, RouterLink
from rollout.agents.shares import Share, Shares, WorkEnded
from rollout.agents.turns.files import UnreadableSession
from rollout.agents.turns.store import Session, SessionStore
from rollout.agents.turns.tree import Generated, Turn
from rollout.agents.wire.chat_request import ChatRequest
from rollout.agents.wire.messages import BadChat, Message
from rollout.router.continuation.contracts import Texts, contract_in
from rollout.router.http.fast_json import dumps
from rollout.rules.contract import Contract

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MOST_BYTES_AT_ONCE = 1 << 30
_MOST_ON_LOOP = 1 << 12
"""Tokens that are read on the event loop, in a few milliseconds."""
_MOST_READ_ON_LOOP = 1 << 15
"""Bytes of a chat that is read in less than 1 ms."""
_DONE_EVENT = b"data: [DONE]\n\n"


class ChatSessions:
    """Answers the chats of one worker's sessions.

    Attributes:
        store: the sessions; used on the event loop only.

    Args:
        find_folder: finds the folder of tokenizer and template; called at the first chat.
        link: to the router.
        renderer: name of a family of models; ``auto`` for that of the template.
        tool_call_parser: name of the form of tool calls; ``auto`` for the template's.
    """

    def __init__(
        self,
        store: SessionStore,
        find_folder: Callable[[], Awaitable[str]],
        link: RouterLink,
        *,
        now_s: Callable[[], float],
        renderer: str = "auto",
        tool_call_parser: str = "auto",
    ) -> None:
        self.store = store
        self._link = link
        self._now_s = now_s
        self._model = _ChatModel(find_folder, renderer, tool_call_parser)
        self._shares = Shares()
        self._num_running = 0
        self._num_bytes = 0
        self._pins: dict[bytes, asyncio.Task[Pin]] = {}  # by session
        self._ending: set[asyncio.Task[None]] = set()
        store.on_end = lambda session: self._unpin(session.digest)
        self._unread_calls: set[str] = set()  # beginnings that were reported

    async def open(self) -> None:
        """Pin what sessions stay with that were there before."""
        for digest, name in self.store.staying():
            self._pins[digest] = start_task(self._link.pin_again(name), "agents-pin")

    async def close(self) -> None:
        """Ends work under way; the sessions stay."""
        self._shares.close()
        for digest in list(self._pins):
            self._unpin(digest)
        await asyncio.gather(*self._ending)
        await asyncio.to_thread(self.store.stop)

    # -- one turn ---------------------------------------------------------------------------

    async def answer(
        self, session_id: str, body: bytes, texts: Texts = ()
    ) -> AsyncGenerator[Mapping[str, str] | bytes, None]:
        """Headers that name the engine, then the body in pieces: a JSON object, or events.
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
        if self._num_running >= MOST_AT_ONCE:
            raise failure(503, "unavailable", f"{MOST_AT_ONCE} chats of sessions are under way")
        if self._num_bytes + num_bytes > _MOST_BYTES_AT_ONCE:
            message = f"chats of sessions under way take {self._num_bytes} bytes"
            raise failure(503, "unavailable", message)
        with ExitStack() as counts:
            counts.enter_context(self._counted(num_bytes))
            with readable():
                session = await self.store.begin_turn(session_id, self._now_s())
            counts.callback(lambda: self.store.end_turn(session, self._now_s()))
            plan = await self._planned(session_id, session, body)
            del body
            contract = _contract_of(texts, plan.chat)
            names = session.pinned
            if plan.chat.stays or names:
                names = await self._pinned(session, plan.chat)
            request = _naming(plan.body, *(names or (plan.chat.lora_path,)))
            plan = replace(plan, body=b"")
            replies = self._link.generate(session_id, request, contract)
            del request
            written = self._written(session_id, session, plan, replies)
            async with aclosing(replies), aclosing(written) as parts:
                async for part in parts:
                    yield part

    @contextmanager
    def _counted(self, num_bytes: int) -> Iterator[None]:
        self._num_running += 1
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_running -= 1
            self._num_bytes -= num_bytes

    async def _planned(self, session_id: str, session: Session, body: bytes) -> Plan:
        """The turn.

        Raises:
            BadChat: template or request do not fit.
            ChatFailure: it cannot be planned now.
        """
        # Half of its time is for what is read again, of all messages.
        of_all = len(body) >> 4
        if len(body) > _MOST_READ_ON_LOOP:
            chat, history = await self._work(session_id, of_all, read_in, body)
        else:
            chat, history = read_in(body)
        model = await self._model.load()
        known = session.tree.known(history, *chat.begun)
        num_known = known.checkpoints[-1].num_characters if known.checkpoints else 0
        num_new = max(len(body) - num_known, of_all)
        return await self._work(session_id, num_new, make_plan, model, chat, history, known)

    async def _work(
        self, session_id: str, num_bytes: int, work: Callable[[*Ts, Share], T], *arguments: *Ts
    ) -> T:
        """What the work on so many bytes returns, in a thread.

        Raises:
            ChatFailure: it took too long.
        """
        try:
            return await self._shares.run(session_id, num_bytes, work, *arguments)
        except WorkEnded as error:
            raise failure(503, "unavailable", str(error)) from None

    async def _pinned(self, session: Session, chat: ChatRequest) -> tuple[str | None]:
        """The version of an adapter that all turns of the session have, None for the base.

        Raises:
            ChatFailure: the router does not keep it.
        """
        pinning = self._pins.get(session.digest)
        if pinning is None:
            wanted = session.pinned[0] if session.pinned else chat.lora_path
            if wanted is None:
                session.pinned = (None,)
                return session.pinned
            pinning = start_task(self._pin(session, wanted), "agents-pin")
            self._pins[session.digest] = pinning
        try:
            pin = await asyncio.shield(pinning)
        except ChatFailure:
            if self._pins.get(session.digest) is pinning:
                del self._pins[session.digest]
            raise
        session.pinned = (pin.name,)
        return session.pinned

    async def _pin(self, session: Session, wanted: str) -> Pin:
        """A pin that is known to the worker behind this one, too.

        Raises:
            ChatFailure: the router does not keep the version, or it cannot be written down.
        """
        pin = await self._link.pin(wanted)
        if pin.name is not None and pin.is_kept:
            try:
                with _not_recorded():
                    await self.store.stay(session, pin.name)
            except ChatFailure:
                await pin.close()
                raise
        return pin

    def _unpin(self, digest: bytes) -> None:
        """The session has ended."""
        pinning = self._pins.pop(digest, None)
        if pinning is not None:
            self._ending.add(ending := start_task(_close(pinning), "agents-unpin"))
            ending.add_done_callback(self._ending.discard)

    async def _written(
        self,
        session_id: str,
        session: Session,
        plan: Plan,
        replies: AsyncGenerator[Progress | Ended, None],
    ) -> AsyncGenerator[Mapping[str, str] | bytes, None]:
        """The response, and the turn into the session's tree before its last byte."""
        chat, model = plan.chat, self._model.model
        assert model is not None
        head = {"id": f"chatcmpl-{new_id()}", "created": int(time.time()), "model": chat.model}
        token_texts = model.chat.token_texts if chat.wants_logprobs else None
        writer = ChatAnswer(head, reading_of(model, plan), token_texts)
        has_begun = False
        try:
            async for reply in replies:
                if isinstance(reply, Ended):
                    continue
                if events := await self._read(session_id, len(reply.ids), _piece, writer, reply):
                    if not has_begun:
                        yield reply.signed
                    has_begun = True
                    yield events
            assert isinstance(reply, Ended)
            ended, whole = reply, reply.reply
            num = len(whole.output_ids)
            with _not_recorded():
                plan = measured_plan(plan, session.tree, whole)
                answer, generated = await self._read(
                    session_id, num, read_reply, model, plan, ended
                )
            if chat.calls_tools:
                self._warn_of_unread_call(unread_call(answer), model.form.name)
            message = answer.message_behind(*chat.begun)
            with _not_recorded():
                turn = await self._kept(session, plan, generated, whole, message)
        except ChatFailure as error:
            if not has_begun:
                raise
            yield b"data: " + (error.body.replace(b"\n", b" ")) + b"\n\n" + _DONE_EVENT
            return
        end_of = writer, chat, answer, turn, plan.num_prompt
        end = await self._read(session_id, num, _end_of_response, *end_of)
        if not has_begun:
            yield ended.signed
        yield end

    async def _kept(
        self,
        session: Session,
        plan: Plan,
        generated: Generated,
        reply: GenerateReply,
        answer: Message,
    ) -> Turn:
        num_computed = plan.num_prompt + len(generated.ids) - 1
        experts = session.tree.new_experts(plan.prompt, reply.routed_experts, num_computed)
        made = replace(generated, experts=experts)
        return await self.store.keep(session, plan.history, plan.prompt, made, answer)

    async def _read(
        self, session_id: str, num: int, work: Callable[[*Ts], T], *arguments: *Ts
    ) -> T:
        """What the work on an answer of so many tokens returns."""
        if num > _MOST_ON_LOOP:
            return await self._work(session_id, 0, lambda share: work(*arguments))
        return work(*arguments)

    def _warn_of_unread_call(self, begin: str, form: str) -> None:
        if begin and begin not in self._unread_calls:  # the model writes the same in every turn
            self._unread_calls.add(begin)
            logger.warning(
                "an answer has a tool call that begins with %r and was not read: it is not complete"
                " or not in the form %s (agents.tool_call_parser); such calls stay in the text",
                begin,
                form,
            )


class _ChatModel:
    """The model of a folder, loaded at the first chat.

    Attributes:
        model: None until it is loaded.
    """

    def __init__(
        self, find_folder: Callable[[], Awaitable[str]], renderer: str, tool_call_parser: str
    ) -> None:
        self.model: ChatModel | None = None
        self._find_folder = find_folder
        self._how = (renderer, tool_call_parser)
        self._loading = asyncio.Lock()

    async def load(self) -> ChatModel:
        """The model.  If it cannot be loaded, the next chat tries again."""
        if self.model is None:
            async with self._loading:
                if self.model is None:
                    folder = await self._find_folder()
                    self.model = await asyncio.to_thread(load_chat_model, folder, *self._how)
        return self.model


async def _close(pinning: asyncio.Task[Pin]) -> None:
    with suppress(ChatFailure):  # there is none
        await (await pinning).close()


def _naming(body: bytes, lora_path: str | None) -> bytes:
    """The body of a request with its adapter, which it has not named so far."""
    if lora_path == "":
        return body
    return b'{"lora_path":' + dumps(lora_path) + b"," + body.removeprefix(b"{")


def _piece(writer: ChatAnswer, reply: Progress) -> bytes:
    """The events of what is new, or empty if nothing is."""
    return as_events(writer.piece(reply.ids, reply.logprobs_from))


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


@contextmanager
def readable() -> Iterator[None]:
    """A session that cannot be read, as a response."""
    try:
        yield
    except UnreadableSession as error:
        raise failure(410, "session_unreadable", str(error)) from error
    except OSError as error:
        raise failure(503, "unavailable", f"the session cannot be read: {error}") from error


@contextmanager
def _not_recorded() -> Iterator[None]:
    try:
        yield
    except (ValueError, OverflowError, TypeError, OSError) as error:
        raise failure(502, "not_recorded", str(error)) from None
