"""The prompt of a turn, and what is kept of its reply (pure)."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engines.protocol import GenerateReply
from rollout.agents.model.alignment import (
    Checkpoint,
    compared,
    continuation,
    drift_of,
    first_difference,
    tokenised,
)
from rollout.agents.model.answer_reader import Answer, Opening, Reading, State, WholeReading
from rollout.agents.model.chat_tokenizer import UNCHECKED, Check, checked
from rollout.agents.model.families import ChatModel
from rollout.agents.model.images import fields_of, placed
from rollout.agents.turns.tree import IDS, Generated, Known, Prompt, TurnTree, compact_generated
from rollout.agents.wire.chat_request import Begun, ChatRequest, read_chat
from rollout.agents.wire.images import images_of
from rollout.agents.wire.messages import History, Message, history_of
from rollout.router.http.fast_json import dumps
from rollout.rules.continuation import spans_of

_NUM_BEFORE = 32
"""Ids of a prompt before an answer, which say how it begins."""
_NUM_CHARACTERS = 256
"""The same of its text."""


class Progress(Protocol):
    """The tokens of a turn so far."""

    @property
    def text(self) -> str: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def signed(self) -> Mapping[str, str]: ...
    def logprobs_from(self, num: int) -> list[float]:
        """Log-probs of the tokens from number ``num`` on."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a turn's generation.

    Attributes:
        num_cached: tokens of its prompt that the first engine had in its cache, or None if that
            does not say.
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
        opening: what the prompt says of the answer.
        body: for ``/generate``, with all of them.
    """

    chat: ChatRequest
    history: History
    prompt: Prompt
    num_prompt: int
    opening: Opening
    body: bytes


def read_in(body: bytes, check: Check = UNCHECKED) -> tuple[ChatRequest, History]:
    """A chat, and the digests of its messages.

    Args:
        check: see ``Check``.

    Raises:
        BadChat: as ``read_chat`` does.
    """
    chat = read_chat(body)
    return chat, history_of(chat.messages, chat.tools, check)


def make_plan(
    model: ChatModel,
    chat: ChatRequest,
    history: History,
    known: Known,
    check: Check = UNCHECKED,
) -> Plan:
    """The prompt of a turn.

    Args:
        known: what its session has of it.
        check: see ``Check``.

    Raises:
        BadChat: the template refuses the messages.
    """
    with checked(check):
        return _planned(model, chat, history, known)


def _planned(model: ChatModel, chat: ChatRequest, history: History, known: Known) -> Plan:
    options = dict(chat.options)
    if chat.effort and model.takes("reasoning_effort"):
        options.setdefault("reasoning_effort", chat.effort)
    messages = model.as_rendered(chat.messages)
    kind = _FromTemplate if model.has_template else _FromRenderer
    source = kind(model, messages, chat.tools, options)
    begun = _text_of(model, chat.begun, source.end)
    begun_ids = source.encode(begun)
    if known.is_unfinished:
        new: list[int] | None = []
        begun_ids = known.ids[len(known.ids) - known.num_answer :].tolist()
    elif known.parent is None:
        new = None
    else:
        behind = messages[known.num_known :]
        new = model.bridged(known.ids, known.num_answer, behind, chat.tools, options)
        new = source.continued(known) if new is None else new
        new = None if new is None else new + begun_ids
    if new is None:
        first, checkpoints = source.whole(begun)
        ids = array(IDS, first)
        drift = drift_of(None, is_fork=known.is_fork or known.parent is not None)
        prompt = Prompt(None, ids, drift, checkpoints=checkpoints)
        num_known, before = 0, array(IDS)
    else:
        added = array(IDS, new)
        ids = known.ids + added
        difference, checkpoints = source.compared(begun, ids, known)
        drift = drift_of(difference, is_fork=known.is_fork)
        prompt = Prompt(known.parent, added, drift, difference, checkpoints)
        num_known, before = known.num_known, known.ids
        if known.is_unfinished:
            num_known = len(chat.messages)
    urls, num_before = images_of(chat.messages), len(images_of(chat.messages[:num_known]))
    images = placed(urls, num_before, before, prompt.ids, model.chat.image_token)
    body = chat.body(ids.tolist(), stop_ids=model.stop_ids) | fields_of(urls, images)
    prompt = replace(prompt, images=images)
    opening = _opening(model, ids, begun_ids)
    return Plan(chat.without_prompt(), history.last(), prompt, len(ids), opening, dumps(body))


class _FromTemplate:
    """What the model's chat template makes of messages.

    Attributes:
        end: the last text before the answer.
    """

    def __init__(
        self, model: ChatModel, messages: Sequence[Message], tools: Any, options: dict[str, Any]
    ) -> None:
        self._template = model.bound(tools, options)
        self._messages = messages
        self._ends = model.ends
        self._text = self._template.render(messages, for_answer=True)
        self.end = self._text[-_NUM_CHARACTERS:]

    def encode(self, text: str) -> list[int]:
        return tokenised(self._template, text)[0]

    def continued(self, known: Known) -> list[int] | None:
        """The ids behind those that are known, or None if the template does not show them."""
        mark = os.urandom(8).hex()
        return continuation(
            self._template, self._messages, known.num_known, known.end, mark, self._ends
        )

    def whole(self, begun: str) -> tuple[list[int], list[Checkpoint]]:
        """The ids of all, and where a comparison with them may begin."""
        return tokenised(self._template, self._text + begun)

    def compared(
        self, begun: str, ids: array[int], known: Known
    ) -> tuple[int | None, list[Checkpoint]]:
        """The first of ``ids`` that ``whole`` does not have, and more such places."""
        return compared(self._template, self._text + begun, ids, known.checkpoints)


class _FromRenderer:
    """The same of the renderer of a model that has no template."""

    def __init__(
        self, model: ChatModel, messages: Sequence[Message], tools: Any, options: dict[str, Any]
    ) -> None:
        self.encode = model.chat.encode
        self._ids = model.rendered(messages, tools, options)
        self.end = model.chat.decode(self._ids[-_NUM_BEFORE:])

    def continued(self, known: Known) -> list[int] | None:
        return None

    def whole(self, begun: str) -> tuple[list[int], list[Checkpoint]]:
        return self._ids + self.encode(begun), []

    def compared(
        self, begun: str, ids: array[int], known: Known
    ) -> tuple[int | None, list[Checkpoint]]:
        return first_difference(ids, self._ids + self.encode(begun)), []


def _is_thinking(model: ChatModel, prompt: str) -> bool:
    """Whether an answer behind this end of a prompt begins within its thinking."""
    thinking = model.reader.thinking
    return thinking is not None and prompt.rstrip().endswith(thinking[0])


def _text_of(model: ChatModel, begun: Begun, prompt: str) -> str:
    """The beginning of an answer behind this end of a prompt, as the model writes it."""
    thinking = model.reader.thinking
    if not begun.reasoning or thinking is None:
        return begun.content
    begin = "" if _is_thinking(model, prompt) else f"{thinking[0]}\n"
    end = f"\n{thinking[1]}\n\n{begun.content}" if begun.content else ""
    return f"{begin}{begun.reasoning}{end}"


def _opening(model: ChatModel, ids: array[int], begun: list[int]) -> Opening:
    end = len(ids) - len(begun)
    before = ids[max(0, end - _NUM_BEFORE) : end].tolist()
    is_thinking = _is_thinking(model, model.chat.decode(before))
    return Opening(State.THINKING if is_thinking else State.BEGIN, before, begun)


def reading_of(model: ChatModel, plan: Plan) -> Reading | WholeReading:
    """Reads the answer of a turn from its ids as they come."""
    chat = plan.chat
    return model.reader.reading(
        tools=chat.tools,
        stops=chat.stops,
        ends=(*chat.stop_ids, *model.eos_ids),
        opening=plan.opening,
        new_id=new_id,
    )


def measured_plan(plan: Plan, tree: TurnTree, reply: GenerateReply) -> Plan:
    """The same with the ids that its images have in the engine.

    Raises:
        ValueError: the engine computed another prompt.
    """
    prompt = tree.measured(plan.prompt, reply.prompt_ids)
    num_prompt = plan.num_prompt + tree.num_added(prompt)
    is_known = num_prompt > plan.num_prompt and not reply.num_failovers
    if is_known and reply.prompt_tokens != num_prompt:
        raise ValueError(f"the engine computed {reply.prompt_tokens} ids, not {num_prompt}")
    return replace(plan, prompt=prompt, num_prompt=num_prompt)


def read_reply(model: ChatModel, plan: Plan, ended: Ended) -> tuple[Answer, Generated]:
    """The answer, and what a turn keeps of it, without routed experts."""
    reply = ended.reply
    ids, finish = reply.output_ids, reply.finish_reason
    assert finish is not None
    reading = reading_of(model, plan)
    reading.feed(ids)
    answer = reading.end(finish.matched)
    spans = spans_of(reply.weight_versions, reply.weight_version, len(ids))
    made = Generated(
        ids,
        reply.output_logprobs or (),
        spans,
        finish,
        reply.text,
        logprob_kind=reply.logprob_kind,
        num_cached=ended.num_cached,
        engine_id=ended.signed.get("x-engine-id", ""),
    )
    return answer, compact_generated(made)


def new_id() -> str:
    return os.urandom(12).hex()
