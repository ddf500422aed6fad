"""The prompt of a turn, and what is kept of its reply (pure)."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from engines.protocol import GenerateReply
from rollout.agents.model.alignment import Template, compared, continuation, drift_of, tokenised
from rollout.agents.model.chat_tokenizer import ChatTokenizer
from rollout.agents.model.tool_calls import Answer, AnswerReader
from rollout.agents.model.tool_forms import schemas_of
from rollout.agents.turns.tree import IDS, Generated, Known, Prompt, compact_generated
from rollout.agents.wire.chat_request import ChatRequest, read_chat
from rollout.agents.wire.messages import History, history_of
from rollout.router.http.fast_json import dumps
from rollout.rules.continuation import spans_of

_NUM_READ = 4

Check = Callable[[], None]


def unchecked() -> None:
    """Work that is wanted to its end."""


class Progress(Protocol):
    """The tokens of a turn so far."""

    @property
    def text(self) -> str: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def signed(self) -> Mapping[str, str]: ...
    def logprobs_from(self, num: int) -> list[float]:
        """Those of the tokens from this one on."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a turn's generation.

    Attributes:
        num_cached: tokens of its prompt that the first engine had in its cache; None if that does
            not say.
        signed: headers that name the engine and its weights.
    """

    reply: GenerateReply
    num_cached: int | None = None
    signed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A turn that is about to be generated.

    Attributes:
        chat: without its messages.
        history: the last digests of its messages.
        num_prompt: ids of its prompt.
        body: for ``/generate``, with all of them.
    """

    chat: ChatRequest
    history: History
    prompt: Prompt
    num_prompt: int
    body: bytes


@lru_cache(_NUM_READ)  # a chat is needed twice, and then no more
def _read(body: bytes) -> tuple[ChatRequest, History]:
    chat = read_chat(body)
    return chat, history_of(chat.messages, chat.tools)


def history_in(body: bytes, check: Check = unchecked) -> tuple[History, str]:
    """The digests of a chat's messages, and the beginning of its answer.

    Args:
        check: raises where the work is not wanted any more.

    Raises:
        BadChat: as ``read_chat`` does.
    """
    chat, history = _read(body)
    return history, chat.begun


def plan_in(tokenizer: ChatTokenizer, body: bytes, known: Known, check: Check = unchecked) -> Plan:
    """The plan of the chat in ``body``; raises as ``make_plan`` does."""
    return make_plan(tokenizer, *_read(body), known)


def make_plan(tokenizer: ChatTokenizer, chat: ChatRequest, history: History, known: Known) -> Plan:
    """The prompt of a turn.

    Args:
        known: what its session has of it.

    Raises:
        BadChat: the template refuses the messages.
    """
    template = tokenizer.bound(chat.tools, chat.options)
    text = template.render(chat.messages, for_answer=True) + chat.begun
    new = _continuation(template, chat, known)
    if new is None:
        first, checkpoints = tokenised(template, text)
        ids = array(IDS, first)
        drift = drift_of(None, is_fork=known.is_fork or known.parent is not None)
        prompt = Prompt(None, ids, drift, checkpoints=checkpoints)
    else:
        ids = known.ids + array(IDS, new)
        difference, checkpoints = compared(template, text, ids, known.checkpoints)
        drift = drift_of(difference, is_fork=known.is_fork)
        prompt = Prompt(known.parent, array(IDS, new), drift, difference, checkpoints)
    has_marks = chat.calls_tools and tokenizer.reader.needs_special_tokens
    body = dumps(chat.body(ids.tolist(), special_tokens=has_marks))
    return Plan(chat.without_prompt(), history.last(), prompt, len(ids), body)


def _continuation(template: Template, chat: ChatRequest, known: Known) -> list[int] | None:
    """The ids behind those that are known; None for a new beginning."""
    if known.parent is None or known.is_unfinished:
        return None if known.parent is None else []
    mark = os.urandom(8).hex()
    new = continuation(template, chat.messages, known.num_known, known.end, mark)
    return new + tokenised(template, chat.begun)[0] if new is not None and chat.begun else new


def read_reply(reader: AnswerReader | None, ended: Ended, tools: Any) -> tuple[Answer, Generated]:
    """The answer, and what a turn keeps of it, without routed experts."""
    reply = ended.reply
    answer = _read_answer(reader, reply.text, tools)
    ids, finish = reply.output_ids, reply.finish_reason
    assert finish is not None
    spans = spans_of(reply.weight_versions, reply.weight_version, len(ids))
    text = reply.text if reader is None else reader.visible(reply.text)
    made = Generated(
        ids,
        reply.output_logprobs or (),
        spans,
        finish,
        text,
        logprob_kind=reply.logprob_kind,
        num_cached=ended.num_cached,
        engine_id=ended.signed.get("x-engine-id", ""),
    )
    return answer, compact_generated(made)


def _read_answer(reader: AnswerReader | None, text: str, tools: Any) -> Answer:
    return Answer(text) if reader is None else reader.read(text, schemas_of(tools), new_id)


def new_id() -> str:
    return os.urandom(12).hex()
