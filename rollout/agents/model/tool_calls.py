"""Content and tool calls of an answer, in the form of its model (pure).

Always true: text that is not a call in this form stays in the answer's content.  What was certain
of a beginning of a text is the beginning of its content, whatever follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rollout.agents.model.tool_forms import FORMS, Call, Form, Schemas

_BEGINS_ELSEWHERE = ("<arg_key>", " to=functions.")
"""Of calls in other forms; the last one is gpt-oss's, which no form reads."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of an answer in two parts.

    Attributes:
        calls: as OpenAI's messages have them.
    """

    content: str
    calls: tuple[dict[str, Any], ...] = ()

    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        if not self.calls:
            return {"role": "assistant", "content": self.content}
        content = self.content or None
        return {"role": "assistant", "content": content, "tool_calls": list(self.calls)}


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads the answers of one model.

    Attributes:
        begins: where a call may begin.
        hidden: special tokens that engines would not write into the text, but must because marks of
            the form are special tokens too; None if they are not.
        partial: beginnings of what can begin a call, and of hidden tokens.
        longest: length of the longest of these.
    """

    form: Form
    begins: re.Pattern[str]
    hidden: re.Pattern[str] | None
    partial: frozenset[str]
    longest: int

    @property
    def needs_special_tokens(self) -> bool:
        """Whether engines must write special tokens into the text."""
        return self.hidden is not None

    def visible(self, text: str) -> str:
        """The text of an engine without special tokens that are no marks of the form."""
        return text if self.hidden is None else self.hidden.sub("", text)

    def certain(self, text: str, begin: int = 0) -> tuple[str, int]:
        """What is content of a text that begins with an engine's ``text``, whatever follows.

        Args:
            begin: where it begins: 0, or what an earlier call returned for the text so far.

        Returns:
            It, and where the next begins.
        """
        rest = text[begin:]
        shown = self.visible(rest)
        lengths = range(min(self.longest, len(shown)), 0, -1)
        num_open = next((num for num in lengths if shown[-num:] in self.partial), 0)
        call = next(self._begins(shown, is_first=begin == 0), len(shown))
        content = shown[: min(call, len(shown) - num_open)].rstrip()
        return content, begin + self._num_before(rest, len(content))

    def _num_before(self, text: str, num: int) -> int:
        """How many characters of an engine's text the first ``num`` visible ones take."""
        if self.hidden is not None:
            for match in self.hidden.finditer(text):
                if match.start() >= num:
                    break
                num += len(match[0])
        return num

    def read(self, text: str, schemas: Schemas, new_id: Callable[[], str]) -> Answer:
        """Separate the tool calls from an engine's text.

        Args:
            schemas: of the request's tools.
            new_id: makes a text of at least 9 letters and digits that no other call has.
        """
        text = self.visible(text)
        read_at = self.form.reader(text, schemas)
        calls: list[Call] = []
        content, end = [], 0
        for begin in self._begins(text):
            if begin < end or (found := read_at(begin)) is None:
                continue
            content.append(text[end:begin])
            calls += found[0]
            end = found[1]
        if not calls:
            return Answer(text)
        messages, ids = [], {""}
        for call in calls:
            call_id = self.form.id_form.format(new_id()) if call.id in ids else call.id
            ids.add(call_id)
            messages.append(_message(call, call_id))
        content.append(text[end:])
        return Answer("".join(content).rstrip(), tuple(messages))

    def _begins(self, text: str, *, is_first: bool = True) -> Iterator[int]:
        """Where calls may begin, in order; ``is_first``: an answer begins with this text."""
        if is_first and self.form.may_be_bare and text.lstrip().startswith("{"):
            yield 0
        for match in self.begins.finditer(text):
            yield match.start()


def reader_of(form: Form, special_tokens: Iterable[str]) -> AnswerReader:
    """The reader of a model with these special tokens."""
    special, marks = set(special_tokens), {*form.begins, *form.others}
    hidden, pattern = special - marks, None
    if special & marks:
        # A longer one first: another one may begin it.  Without one the pattern matches nothing.
        pattern = re.compile("|".join(map(re.escape, sorted(hidden, reverse=True))) or r"(?!)")
    words = {*form.begins, *(hidden if pattern else ())}
    partial = frozenset(word[:num] for word in words for num in range(1, len(word)))
    begins = re.compile("|".join(map(re.escape, form.begins)))
    return AnswerReader(form, begins, pattern, partial, max(map(len, words)))


def _message(call: Call, call_id: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    try:
        arguments.encode()
    except UnicodeEncodeError:  # half of a surrogate pair stays escaped, as the model wrote it
        arguments = json.dumps(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def unread_call(answer: Answer) -> str:
    """The beginning of a call in ``answer`` that was not read; empty if there is none."""
    begins = (*(begin for form in FORMS for begin in form.begins), *_BEGINS_ELSEWHERE)
    return next((begin for begin in begins if begin in answer.content), "")
