"""Tool calls in the text of an answer, in the form of Hermes and Qwen (pure).

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.  Always true: text that is
not a call in this form stays in the answer's content.  The beginnings of other common forms are
known only to report them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BEGIN = "<tool_call>"
_OTHER_BEGINS = (
    "[TOOL_CALLS]",  # Mistral
    "<|python_tag|>",  # Llama 3
    "<function=",  # Qwen 3 Coder
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",  # DeepSeek
    "<|tool_calls_section_begin|>",  # Kimi
    "<|channel|>commentary to=",  # gpt-oss
    "<arg_key>",  # GLM
)
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


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


def parse_answer(text: str, new_id: Callable[[], str]) -> Answer:
    """Separate the tool calls from the text.

    Args:
        new_id: makes the id of a call.
    """
    calls: list[dict[str, Any]] = []
    content, end = "", 0
    for match in _CALL.finditer(text):
        if (function := _function(match[1])) is None:
            continue
        content += text[end : match.start()]
        end = match.end()
        calls.append({"id": new_id(), "type": "function", "function": function})
    if not calls:
        return Answer(text)
    return Answer((content + text[end:]).rstrip(), tuple(calls))


def unread_call(answer: Answer) -> str:
    """The beginning of a call in ``answer`` that was not read; empty if there is none."""
    begins = (_BEGIN, *_OTHER_BEGINS)
    return next((begin for begin in begins if begin in answer.content), "")


def _function(text: str) -> dict[str, str] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


def num_certain(text: str) -> int:
    """How many characters at the beginning of ``text`` belong to the content, whatever follows."""
    begin = text.find(_BEGIN)
    if begin < 0:
        begin = len(text)
        for length in range(min(len(_BEGIN) - 1, len(text)), 0, -1):
            if text.endswith(_BEGIN[:length]):
                begin -= length
                break
    return len(text[:begin].rstrip())
