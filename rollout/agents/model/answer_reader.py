"""Thinking, content and tool calls of an answer, read from its ids as they come.

Always true: text that is no complete call stays in the content.  The pieces that were given out,
joined, are the whole answer's, wherever the ids were cut; reading takes time in proportion to
them, whatever a model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from rollout.agents.model.call_forms import (
    FORMS,
    HARMONY,
    HARMONY_MARKS,
    Call,
    Form,
    Mark,
    call_of,
)
from rollout.agents.model.reply_text import Decode, Marks, ReplyText, StopStrings

_BEGINS_ELSEWHERE = ("<arg_key>", " to=functions.")
"""Texts of calls in other forms."""
_MOST_MARKS = 1024
Parse = Callable[..., Any]
"""``Renderer.parse_response``."""
_ENDS_OF_MESSAGES = (HARMONY_MARKS[0], HARMONY_MARKS[4], "<|call|>", "<|return|>")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in three parts.

    Attributes:
        calls: as OpenAI's messages have them.
        num_thinking: ids up to the end of the thinking, or None if that is not known.
    """

    content: str
    calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""
    num_thinking: int | None = None

    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": list(self.calls)}
        return message

    def message_behind(self, content: str, reasoning: str) -> dict[str, Any]:
        """The message with what the client had of it."""
        joined = replace(self, content=content + self.content, reasoning=reasoning + self.reasoning)
        return joined.message()


class State(StrEnum):
    """Where an answer is: it may begin with thinking, is in it, or behind it."""

    BEGIN = "begin"
    THINKING = "thinking"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Opening:
    """What a prompt says of the answer behind it.

    Attributes:
        ids: the last ones of the prompt before the answer.
        begun: those of the answer that the prompt has.
    """

    state: State = State.BEGIN
    ids: Sequence[int] = ()
    begun: Sequence[int] = ()


class Piece(NamedTuple):
    """New text of an answer."""

    content: str
    reasoning: str


@dataclass(slots=True)
class _Part:
    """A text that grows, without the space at its ends unless that is wanted."""

    keeps_space: bool
    _has_begun: bool = False
    _pieces: list[str] = field(default_factory=list)
    _new: list[str] = field(default_factory=list)
    _space: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        if not self.keeps_space and not self._has_begun:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._new += [*self._space, body]
            self._space, self._has_begun = [], True
        if space := text[len(body) :]:
            self._space.append(space)

    def end(self, *, keeps_space: bool) -> None:
        self._new += self._space if keeps_space else []
        self._space = []

    def take(self) -> str:
        """What is new and certain."""
        text = "".join(self._new)
        if text:
            self._pieces.append(text)
        self._new = []
        return text

    def forget(self) -> None:
        self._pieces, self._new = [], []

    @property
    def text(self) -> str:
        return "".join([*self._pieces, *self._new])


@dataclass(slots=True)
class Reading:
    """Reads one answer.

    Args:
        thinking: the marks around it, or None if the model has none.
        ends: tokens that may end the answer, and are then no part of its text.
        tools: of the request; without them no calls are read.
        new_id: makes a text of at least 9 letters and digits that no other call has.
    """

    form: Form
    thinking: tuple[str, str] | None
    source: ReplyText
    stops: StopStrings
    ends: frozenset[int]
    tools: Sequence[Any]
    state: State
    new_id: Callable[[], str]
    _content: _Part = field(default_factory=lambda: _Part(keeps_space=True))
    _reasoning: _Part = field(default_factory=lambda: _Part(keeps_space=False))
    _num_thinking: int | None = 0
    _last: list[int] = field(default_factory=list)
    _begun: list[str] = field(default_factory=list)
    _block: list[str] = field(default_factory=list)
    _draft: list[str] = field(default_factory=list)
    _calls: list[Call] = field(default_factory=list)
    _is_behind_calls: bool = False

    def open(self, ids: Sequence[int]) -> None:
        """Read the end of the prompt, where an answer has a head."""

    def feed(self, ids: Sequence[int]) -> Piece:
        """What is certain with the next ids, and was not before."""
        ids = [*self._last, *ids]
        self._last = [ids.pop()] if ids and ids[-1] in self.ends else []
        for token in self.source.feed(ids):
            self._take_all(self.stops.feed(token))
        return Piece(self._content.take(), self._reasoning.take())

    def resume(self, ids: Sequence[int]) -> None:
        """Read the beginning of the answer, which the client has."""
        self.feed(ids)
        self._settle(None)
        self._content.end(keeps_space=True)
        self._content.forget()
        self._reasoning.forget()
        self._calls = []

    def end(self, matched: str | int | None = None) -> Answer:
        """The whole answer, behind what the client had of it.

        Args:
            matched: the stop string or the token that ended it, which is no part of its text.
        """
        self._settle(matched)
        if self.state is State.THINKING:
            self._num_thinking = self.source.num_ids
        self._content.end(keeps_space=not self._calls)
        self._reasoning.end(keeps_space=False)
        content, reasoning = self._content.text, self._reasoning.text
        num = self._num_thinking if reasoning else None
        calls = messages_of(self._calls, self.form, self.new_id)
        return Answer(content, calls, reasoning, num)

    def _settle(self, matched: str | int | None) -> None:
        """Take what was held back: nothing follows it."""
        last = [token for token in self._last if token != matched]
        self._last = []
        for token in (*self.source.feed(last), *self.source.rest()):
            self._take_all(self.stops.feed(token))
        self._take_all(self.stops.rest(matched if isinstance(matched, str) else None))
        if self._draft:  # there was no end of the thinking before the calls
            draft, self._draft = self._draft, []
            self._end_thinking(None)
            self._take_all(draft)
        self._end()

    # -- one token after another ----------------------------------------------------------------

    def _take_all(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            self._take(token)

    def _take(self, token: str) -> None:
        if self._block:
            self._block.append(token)
            if isinstance(token, Mark) and token == self.form.blocks.get(self._block[0]):
                self._end_block()
        elif self.state is State.BEGIN:
            self._take_first(token)
        elif self.state is State.THINKING:
            self._take_thought(token)
        elif isinstance(token, Mark) and self.tools and token in self.form.blocks:
            self._block = [token]
        elif self._is_behind_calls and token == self.form.stray:
            pass
        else:
            self._is_behind_calls = self._is_behind_calls and token.isspace()
            self._content.add(token)

    def _take_first(self, token: str) -> None:
        if self.thinking is not None and isinstance(token, Mark) and token == self.thinking[0]:
            self._begun, self.state = [], State.THINKING
        elif not isinstance(token, Mark) and token.isspace():
            self._begun.append(token)
        else:
            begun, self._begun = [*self._begun, token], []
            self.state = State.CONTENT
            if self.form.may_be_bare and self.tools and token.lstrip().startswith("{"):
                self._block = begun
            else:
                self._take_all(begun)

    def _take_thought(self, token: str) -> None:
        assert self.thinking is not None
        begin, end = self.thinking
        is_mark = isinstance(token, Mark)
        if is_mark and token == end:
            for drafted in self._draft:
                self._reasoning.add(drafted)
            self._draft = []
            self._end_thinking(token)
        elif self._draft or (is_mark and self.tools and self._may_end_thinking(token)):
            self._draft.append(token)
        elif not is_mark or token != begin:
            self._reasoning.add(token)

    def _may_end_thinking(self, token: str) -> bool:
        return self.form.call_ends_thinking and token in self.form.blocks

    def _end_thinking(self, mark: str | None) -> None:
        self.state = State.CONTENT
        self._num_thinking = mark.num_ids or None if isinstance(mark, Mark) else None
        self._content.keeps_space = False

    def _end_block(self) -> None:
        block, self._block = self._block, []
        read = self.form.calls(block, self.tools)
        if read is None:
            for token in block:
                self._content.add(token)
            return
        calls, rest = read
        self._calls += calls
        self._is_behind_calls = True
        if rest:
            self._content.add(rest)

    def _end(self) -> None:
        if self._block:
            if self.form.blocks.get(self._block[0], "") == "":
                self._end_block()
            else:
                block, self._block = self._block, []
                for token in block:
                    self._content.add(token)
        begun, self._begun = self._begun, []
        for token in begun:
            self._content.add(token)


def messages_of(
    calls: Iterable[Call], form: Form, new_id: Callable[[], str]
) -> tuple[dict[str, Any], ...]:
    """The calls as OpenAI's messages have them, each with an id of its own."""
    messages, ids = [], {""}
    for call in calls:
        call_id = form.id_form.format(new_id()) if call.id in ids else call.id
        ids.add(call_id)
        function = {"name": call.name, "arguments": call.arguments}
        messages.append({"id": call_id, "type": "function", "function": function})
    return tuple(messages)


@dataclass(slots=True)
class HarmonyReading(Reading):
    """Reads an answer of gpt-oss: messages with a head, which names a channel or a function."""

    _head: list[str] = field(default_factory=list)
    _is_head: bool = True
    _has_message: bool = False

    def open(self, ids: Sequence[int]) -> None:
        text = ReplyText(self.source.decode, self.source.marks)
        tokens = [*text.feed(ids), *text.rest()]
        starts = [at for at, token in enumerate(tokens) if token == HARMONY_MARKS[0]]
        self._take_all(tokens[starts[-1] :] if starts else [])

    def _take(self, token: str) -> None:
        is_mark = isinstance(token, Mark)
        if is_mark and token in _ENDS_OF_MESSAGES:
            self._end_message(token)
        elif self._is_head and (not is_mark or token != HARMONY_MARKS[2]):
            self._head.append(token)
        elif self._is_head:
            self._head.append(token)
            self._is_head, self._has_message = False, True
            self.state = self._state_of_head()
        elif self._block:
            self._block.append(token)
        else:
            part = self._reasoning if self.state is State.THINKING else self._content
            part.add(token)

    def _state_of_head(self) -> State:
        head = "".join(self._head)
        if self.tools and " to=functions." in head:
            self._block = [Mark(HARMONY_MARKS[0]), *self._head]
        channel = head.partition(HARMONY_MARKS[1])[2].lstrip()
        return State.THINKING if channel.startswith("analysis") else State.CONTENT

    def _end_message(self, token: str) -> None:
        if self._block:
            self._block.append(token)
            self._end_block()
        elif self.state is State.THINKING and not self._is_head:
            self._num_thinking = token.num_ids or None if isinstance(token, Mark) else None
        self._has_message = self._has_message or token == HARMONY_MARKS[0]
        self._head, self._is_head, self.state = [], True, State.BEGIN

    def _end(self) -> None:
        if not self._has_message:  # a text alone
            self._content.add("".join(self._head))
        for token in self._block:
            self._content.add(token)
        self._block = []


@dataclass(slots=True)
class WholeReading:
    """Reads an answer with the parser of its renderer, which takes all of it.

    Args:
        parse: of ids, tools and the prompt's last ids.
    """

    parse: Parse
    form: Form
    decode: Decode
    tools: Sequence[Any]
    before: Sequence[int]
    new_id: Callable[[], str]
    _ids: list[int] = field(default_factory=list)
    _num_begun: int = 0

    def feed(self, ids: Sequence[int]) -> Piece:
        self._ids += ids
        return Piece("", "")

    def resume(self, ids: Sequence[int]) -> None:
        self._ids += ids
        self._num_begun = len(self._ids)

    def end(self, matched: str | int | None = None) -> Answer:
        if self._ids[-1:] == [matched]:
            self._ids.pop()
        begun, whole = self._parts(self._ids[: self._num_begun]), self._parts(self._ids)
        content = whole.content.removeprefix(begun.content)
        if isinstance(matched, str) and (at := content.rfind(matched)) >= 0:
            content = content[:at]
        reasoning = whole.reasoning.removeprefix(begun.reasoning)
        return Answer(content, whole.calls, reasoning)

    def _parts(self, ids: list[int]) -> Answer:
        if not ids:
            return Answer("")
        if self.decode(ids).count("<") > _MOST_MARKS:  # parsers search an end for each
            return Answer(self.decode(ids))
        parsed = self.parse(ids, tools=list(self.tools), prompt_ids=list(self.before))
        calls = [call_of(attempt) for attempt in parsed.tool_calls] if self.tools else []
        messages = messages_of([call for call in calls if call], self.form, self.new_id)
        attempts = zip(parsed.tool_calls, calls or [None] * len(parsed.tool_calls), strict=True)
        unread = [self._text_of(ids, attempt) for attempt, call in attempts if call is None]
        content = "\n".join(filter(None, [parsed.content, *unread]))
        return Answer(content, messages, parsed.reasoning_content or "")

    def _text_of(self, ids: list[int], attempt: Any) -> str:
        span = attempt.token_span
        return attempt.raw if span is None else self.decode(ids[slice(*span)])


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads the answers of one model.

    Attributes:
        thinking: the marks around it, or None if the model has none.
        parse: reads a whole answer, where the form is that of no row of the table.
    """

    form: Form
    thinking: tuple[str, str] | None
    marks: Marks
    decode: Decode
    parse: Parse | None = None

    def reading(
        self,
        *,
        tools: Sequence[Any] = (),
        stops: Sequence[str] = (),
        ends: Iterable[int] = (),
        opening: Opening = Opening(),
        new_id: Callable[[], str],
    ) -> Reading | WholeReading:
        """A reading of one answer behind a prompt.

        Args:
            stops, ends: texts and tokens that may end it; then they are no part of its text.
        """
        reading: Reading | WholeReading
        if self.parse is not None:
            common = (self.form, self.decode, tools, opening.ids, new_id)
            reading = WholeReading(self.parse, *common)
        else:
            source = ReplyText(self.decode, self.marks, opening.ids)
            texts = frozenset(ends) - self.marks.ids.keys()
            parts = (source, StopStrings(stops), texts, tools, opening.state, new_id)
            kind = HarmonyReading if self.form is HARMONY else Reading
            reading = kind(self.form, self.thinking, *parts)
            reading.open(opening.ids)
        if opening.begun:
            reading.resume(opening.begun)
        return reading


def unread_call(answer: Answer) -> str:
    """The beginning of a call in ``answer`` that was not read, or empty if there is none."""
    begins = (*(begin for form in FORMS for begin in form.blocks), *_BEGINS_ELSEWHERE)
    return next((begin for begin in begins if begin in answer.content), "")
