"""Tool calls in texts, and streams that say the same as whole replies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.protocol import FinishReason
from rollout.router.sessions.answers import ChatAnswer
from rollout.router.sessions.tool_calls import Answer, num_certain, parse_answer, unread_call
from rollout.router.sessions.tree import Generated, Prompt, Turn

STOP = FinishReason("stop", 0)
TURN = Turn(0, Prompt(None, [1]), Generated([2], [0.0], (), STOP, ""))
CALL = '<tool_call>{"name": "f", "arguments": {"x": [1, "}"]}}</tool_call>'
PIECES = [
    CALL,
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "a",
    " ",
    "\n",
    '{"name": 1}',
    "\ufffd",
    "é",
]


def test_a_call_is_separated_from_the_text_around_it() -> None:
    answer = parse_answer(f"I add.\n{CALL}", lambda: "call_1")
    assert answer.content == "I add."
    function = {"name": "f", "arguments": '{"x": [1, "}"]}'}
    assert answer.calls == ({"id": "call_1", "type": "function", "function": function},)
    assert answer.message()["content"] == "I add."
    assert parse_answer(CALL, lambda: "c").message()["content"] is None


def test_what_is_no_call_stays_in_the_text() -> None:
    for text in ("<tool_call>{}</tool_call>", "<tool_call>{no json}</tool_call>", "<tool_call>{"):
        assert parse_answer(text, lambda: "c") == Answer(text)


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}]', "[TOOL_CALLS]"),
        ("I add. <function=f><parameter=x>1</parameter></function>", "<function="),
        ("<tool_call>{no json}</tool_call>", "<tool_call>"),
        (CALL, ""),
        ("2 + 2 is 4", ""),
    ],
)
def test_a_call_in_another_form_is_noticed_and_stays_in_the_text(text: str, begin: str) -> None:
    answer = parse_answer(text, lambda: "c")
    assert unread_call(answer) == begin
    assert not begin or answer == Answer(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.booleans(), st.integers(1, 9))
def test_a_stream_joined_is_the_whole_message(
    pieces: list[str], calls_tools: bool, step: int
) -> None:
    text = "".join(pieces)
    answer = parse_answer(text, lambda: "c") if calls_tools else Answer(text)
    whole = ChatAnswer({}, calls_tools).whole(answer, TURN, 1)
    writer = ChatAnswer({}, calls_tools)
    payloads: list[Any] = []
    for end in range(0, len(text), step):
        payloads += writer.piece(text[:end])
    payloads += writer.last(answer, TURN, 1, usage=True)
    choices = [choice for payload in payloads for choice in payload["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content") or "" for delta in deltas) == answer.content
    assert [call["id"] for delta in deltas for call in delta.get("tool_calls", [])] == [
        call["id"] for call in answer.calls
    ]
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert payloads[-1]["usage"] == whole["usage"]


@given(st.lists(st.sampled_from(PIECES), max_size=8))
def test_text_that_was_sent_is_never_part_of_a_call(pieces: list[str]) -> None:
    text = "".join(pieces)
    content = parse_answer(text, lambda: "c").content
    for end in range(len(text)):
        assert content.startswith(text[: num_certain(text[:end])])
