"""Messages of OpenAI's chats: their form for a chat template, and when two are the same (pure).

Always true: the digest of a history depends on its tools, and on all of its messages in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from typing import Any

import orjson

from rollout.agents.wire.images import BadImage, read_image

Message = Mapping[str, Any]
MAX_MESSAGES = 1 << 14
TOO_MANY_MESSAGES = f"messages must be a list of 1 to {MAX_MESSAGES} messages"
_END_OF_THINKING = "</think>"


class BadChat(ValueError):
    """A chat that cannot be answered, and why."""


@dataclass(frozen=True, slots=True)
class History:
    """Digests of the beginnings of a list of messages.

    Attributes:
        exact: digests of the first 0, 1, 2 ... messages.
        loose: the same without the thinking and the outer white space of answers, because clients
            remove these.  The thinking is a field, or all of the content up to its end.
        is_answer: whether each message is an assistant's.
    """

    exact: list[bytes]
    loose: list[bytes]
    is_answer: list[bool]

    def last(self) -> History:
        """The digests of all messages, without those of their beginnings."""
        return History(self.exact[-1:], self.loose[-1:], self.is_answer[-1:])

    def plus(self, answer: Message) -> tuple[bytes, bytes]:
        """The exact and the loose digest with ``answer`` behind all messages."""
        return _both(self.exact[-1], self.loose[-1], _read_message(len(self.is_answer), answer))


def read_messages(raw: Any) -> list[dict[str, Any]]:
    """The messages of a request as chat templates expect them.

    Raises:
        BadChat: they have another form.
    """
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_MESSAGES:
        raise BadChat(TOO_MANY_MESSAGES)
    return [_read_message(index, message) for index, message in enumerate(raw)]


def _read_message(index: int, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
        raise BadChat(f"messages[{index}] must be an object with a role and a content")
    message = {name: value for name, value in raw.items() if value is not None}
    message["content"] = _read_content(index, raw["role"], raw.get("content"))
    thinking = message.pop("reasoning", message.get("reasoning_content"))
    if isinstance(thinking, str) and thinking:
        message["reasoning_content"] = thinking
    else:
        message.pop("reasoning_content", None)
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise BadChat(f"messages[{index}].tool_calls must be a list of calls of functions")
        message["tool_calls"] = [_read_call(call) for call in calls]
        if not calls:
            del message["tool_calls"]
    return message


def _read_content(index: int, role: str, content: Any) -> str | list[dict[str, str]]:
    """A text, or parts if there are images among them."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    read = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            read.append({"type": "text", "text": str(part.get("text", ""))})
        elif kind == "image_url":
            try:
                read.append(read_image(part, role))
            except BadImage as error:
                raise BadChat(f"messages[{index}]: {error}") from None
        else:
            raise BadChat(f"messages[{index}].content must be text and images (image_url)")
    has_images = any(part["type"] == "image" for part in read)
    return read if has_images else "".join(part["text"] for part in read)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call for a template: OpenAI sends its arguments as JSON text, templates need an
    object."""
    function = dict(call["function"])
    try:
        given = function.get("arguments") or {}
        if isinstance(given, str):
            given = json.loads(given)
            json.dumps(given, ensure_ascii=False).encode()  # fails with half of a surrogate pair
        function["arguments"] = given
    except (ValueError, RecursionError):
        pass  # the template gets the text
    return {**call, "function": function}


def with_texts(messages: Sequence[Message]) -> list[Message]:
    """The same messages with the JSON text of each call's arguments, as OpenAI sends them."""
    return [
        {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def history_of(
    messages: Sequence[Message], tools: Any, check: Callable[[], None] = lambda: None
) -> History:
    """The digests of ``messages``, which ``read_messages`` returned.

    Args:
        check: called for each of them.
    """
    of_tools = _digest(b"", _identity(tools))
    exact, loose = [of_tools], [of_tools]
    for message in messages:
        check()
        for digests, new in zip((exact, loose), _both(exact[-1], loose[-1], message), strict=True):
            digests.append(new)
    return History(exact, loose, [message["role"] == "assistant" for message in messages])


def _both(exact: bytes, loose: bytes, message: Message) -> tuple[bytes, bytes]:
    """The exact and the loose digest with this message behind all that these are of."""
    calls = [
        (call.get("id"), call["function"]["name"], call["function"].get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    role, content = message["role"], message.get("content") or ""
    rest = (message.get("name"), message.get("tool_call_id"), calls)
    identity = of_loose = _identity((role, content, *rest))
    if role == "assistant":
        if thinking := message.get("reasoning_content"):
            identity = _identity((role, content, *rest, thinking))
        of_loose = _identity((role, content.rpartition(_END_OF_THINKING)[2].strip(), *rest))
    return _digest(exact, identity), _digest(loose, of_loose)


def _identity(value: Any) -> bytes:
    """Equal for equal values, whatever the order of their names."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # half of a surrogate pair, or an integer of more than 64 bits
        return json.dumps(value, sort_keys=True).encode()


def _digest(before: bytes, value: bytes) -> bytes:
    return blake2s(before + value, digest_size=16).digest()
