"""Tool calls in texts, and streams that say the same as whole replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import FinishReason
from rollout.agents.model.tool_calls import Answer, AnswerReader, reader_of, unread_call
from rollout.agents.model.tool_forms import FORMS, HERMES, schemas_of
from rollout.agents.turns.tree import Generated, Prompt, Turn
from rollout.agents.wire.answers import ChatAnswer
from tests.support.tool_families import FAMILIES, TOOLS

STOP = FinishReason("stop", 0)
CALL = '<tool_call>{"name": "f", "arguments": {"x": [1, "}"]}}</tool_call>'
PIECES = [
    CALL,
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "a",
    " ",
    "\n",
    "{",
    "<",
    "[",
    '{"name": 1}',
    '{"name": "add"};',
    "\ufffd",
    "é",
    "<s>",
    "</s>",
    "[INST]",
]
FORM_NAMES = [form.name for form in FORMS]
SCHEMAS = schemas_of(TOOLS)
HERMES_READER = reader_of(HERMES, [])


def texts_of(ids: Sequence[int]) -> list[str]:
    return list(map(chr, ids))


def reader_with(name: str, marks_are_special: bool) -> AnswerReader:
    form = next(form for form in FORMS if form.name == name)
    marks = [form.begins[0]] if marks_are_special else []
    return reader_of(form, [*marks, "<s>", "</s>", "[INST]", "<|python"])


def pieces_of(name: str) -> st.SearchStrategy[list[str]]:
    """Whole calls of a form, parts of them, and what other texts are made of."""
    form = next(form for form in FORMS if form.name == name)
    calls = [family.call for family in FAMILIES.values() if family.form == name]
    marks = [*form.begins, *form.others]
    parts = st.sampled_from([*PIECES, *calls, *marks, *(mark[:-1] for mark in marks)])
    cut = st.builds(lambda call, at: call[:at], st.sampled_from(calls or [CALL]), st.integers(0))
    return st.lists(parts | cut, max_size=10)


def new_id() -> str:
    return "c" * 24


def read(text: str) -> Answer:
    return HERMES_READER.read(text, {}, new_id)


def test_a_call_is_separated_from_the_text_around_it() -> None:
    answer = read(f"I add.\n{CALL}")
    assert answer.content == "I add."
    function = {"name": "f", "arguments": '{"x": [1, "}"]}'}
    call_id = f"call_{new_id()}"
    assert answer.calls == ({"id": call_id, "type": "function", "function": function},)
    assert answer.message()["content"] == "I add."
    assert read(CALL).message()["content"] is None


def test_what_is_no_call_stays_in_the_text() -> None:
    numbers = ("NaN", "[-Infinity]", "1e400")
    calls = (
        f'<tool_call>{{"name": "f", "arguments": {{"x": {one}}}}}</tool_call>' for one in numbers
    )
    for text in (
        "<tool_call>{}</tool_call>",
        "<tool_call>{no json}</tool_call>",
        "<tool_call>{",
        *calls,
    ):
        assert read(text) == Answer(text)


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}]', "[TOOL_CALLS]"),
        ("I add. <function=f><parameter=x>1</parameter></function>", "<function="),
        ("<tool_call>{no json}</tool_call>", "<tool_call>"),
        ("commentary to=functions.f json{}", " to=functions."),
        (CALL, ""),
        ("2 + 2 is 4", ""),
    ],
)
def test_a_call_in_another_form_is_noticed_and_stays_in_the_text(text: str, begin: str) -> None:
    answer = read(text)
    assert unread_call(answer) == begin
    assert not begin or answer == Answer(text)


def test_two_calls_with_one_id_get_two() -> None:
    """As a model may repeat what it has read."""
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    answer = reader_with("kimi_k2", False).read(text, {}, new_id)
    assert [one["id"] for one in answer.calls] == ["functions.f:0", f"call_{new_id()}"]


@pytest.mark.parametrize("name", [None, *FORM_NAMES])
@given(st.data(), st.booleans())
def test_a_stream_joined_is_the_whole_message(
    name: str | None, data: st.DataObject, marks_are_special: bool
) -> None:
    text = "".join(data.draw(pieces_of(name or "hermes")))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    reader = reader_with(name, marks_are_special) if name else None
    answer = reader.read(text, SCHEMAS, new_id) if reader else Answer(text)
    ids, logprobs = [ord(one) for one in text], [-float(place) for place in range(len(text))]
    turn = Turn(0, Prompt(None, [1]), Generated(ids, logprobs, (), STOP, ""))
    whole = ChatAnswer({}, reader, texts_of).whole(answer, turn, 1)
    writer = ChatAnswer({}, reader, texts_of)
    payloads: list[Any] = []
    for end in cuts:
        begin = writer.num_tokens_sent
        payloads += writer.piece(text[:end], ids[begin:end], logprobs[begin:end])
    payloads += writer.last(answer, turn, 1, usage=True)
    choices = [choice for payload in payloads for choice in payload["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content") or "" for delta in deltas) == answer.content
    assert [call["id"] for delta in deltas for call in delta.get("tool_calls", [])] == [
        call["id"] for call in answer.calls
    ]
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    entries = [one for choice in choices for one in (choice["logprobs"] or {}).get("content", [])]
    assert entries == whole["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == logprobs
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert payloads[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("name", FORM_NAMES)
@given(st.data(), st.booleans())
def test_text_that_was_sent_is_never_part_of_a_call(
    name: str, data: st.DataObject, marks_are_special: bool
) -> None:
    reader = reader_with(name, marks_are_special)
    text = "".join(data.draw(pieces_of(name)))
    content = reader.read(text, SCHEMAS, new_id).content
    for end in range(len(text)):
        assert content.startswith(reader.certain(text[:end])[0])


@pytest.mark.parametrize("name", FORM_NAMES)
@given(st.data())
def test_text_that_is_no_call_is_unchanged(name: str, data: st.DataObject) -> None:
    reader = reader_of(reader_with(name, False).form, ["<s>"])
    text = "".join(data.draw(pieces_of(name)))
    answer = reader.read(text, SCHEMAS, new_id)
    assert answer.calls or answer.content == text
